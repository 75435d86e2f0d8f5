"""Flat slices of a weight, as optimizers shard it: `[start, start + length)` of the row-major elements, cut anywhere.

    amaxes = [slice_amax(...) of each rank], merged by maximum  ->  scales_from_amax  ->  each rank: cast_slice

gives the bytes of `quantize` of the whole weight. Both functions put the slice into a whole of zeros, which is slow and
obviously right: a zero changes no amax.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qshard.formats import Format, Usage
from qshard.layout import Shape, matrix_shape, plane
from qshard.reference.elements import Codes, Float32
from qshard.reference.planes import cast, plane_amax
from qshard.reference.scales import Amax, scales_from_amax

__all__ = ["cast_slice", "slice_amax"]


def slice_amax(x: ArrayLike, fmt: Format, shape: Shape, start: int, usage: Usage = Usage.ROWWISE) -> Amax:
    """The amax of each block of the whole weight, as far as a slice knows: 0 where it has no element.

    Args:
      x: float32, bfloat16 or float16 `[length]`. To quantize what the model sees, round an fp32 master to the model's
        dtype first.
      fmt: the format.
      shape: of the whole weight.
      start: index of `x[0]` in it.
      usage: of a plane that is stored in the order of the weight: `ROWWISE`, or `COLUMNWISE` of MXFP8 vectors.

    Returns:
      `block` in the orientation of the plane: that of the columnwise plane is `[K, M / 32]`.

    Raises:
      ValueError: the plane is stored in another order, or its scales depend on more than amaxes (`four_over_six`).

    >>> from qshard.formats import FP8_1x128
    >>> slice_amax([2.0, -3.0, 4.0], FP8_1x128, (2, 4), start=2).block
    array([[3.],
           [4.]], dtype=float32)
    """
    _check(fmt, shape, usage, "slice_amax")
    return plane_amax(_matrix(_in_whole(x, shape, start), shape, usage), fmt)


def cast_slice(
    x: ArrayLike,
    out: Codes,
    fmt: Format,
    shape: Shape,
    start: int,
    amax: Amax,
    usage: Usage = Usage.ROWWISE,
    *,
    seed: int = 0,
) -> None:
    """Write the codes of a slice into the data of the whole plane, and nothing else: not even the other half of a byte.

    Args:
      x, fmt, shape, start, usage: as for `slice_amax`.
      out: uint8, the `data` of the whole plane, of any shape; written in place.
      amax: merged over all slices.
      seed: of stochastic rounding.

    Raises:
      ValueError: as for `slice_amax`.

    >>> from qshard.formats import FP8_E4M3
    >>> whole = np.zeros((2, 2), np.uint8)
    >>> cast_slice([1.0, 2.0], whole, FP8_E4M3, (2, 2), 1, slice_amax([1.0, 2.0], FP8_E4M3, (2, 2), 1))
    >>> whole
    array([[  0, 118],
           [126,   0]], dtype=uint8)
    """
    _check(fmt, shape, usage, "cast_slice")
    length = np.size(x)
    whole = _matrix(_in_whole(x, shape, start), shape, usage)
    index = _matrix(np.arange(whole.size), shape, usage)
    codes = cast(whole, fmt, scales_from_amax(amax, fmt).multiplier, seed=seed, index=index)
    in_order = (codes.T if usage is Usage.COLUMNWISE else codes).reshape(-1)
    bits = 8 // fmt.element.codes_per_byte  # of the byte that a code has, or shares
    for i in range(start, start + length):
        byte, shift = divmod(i * bits, 8)
        mask = (1 << bits) - 1 << shift
        out.flat[byte] = (int(out.flat[byte]) & ~mask) | (int(in_order[i]) << shift)


def _check(fmt: Format, shape: Shape, usage: Usage, op: str) -> None:
    if plane(fmt, shape, usage, op=op).transposed:
        raise ValueError(f"{op}: usage ({usage}) of {fmt} is not stored in the order of x; gather, then transpose")
    if fmt.scaling.four_over_six:
        raise ValueError(
            f"{op}: four_over_six ({fmt.scaling.four_over_six}) is not a matter of amaxes alone; quantize whole blocks"
        )


def _in_whole(x: ArrayLike, shape: Shape, start: int) -> Float32:
    part = np.asarray(x, np.float32)
    whole = np.zeros(matrix_shape(shape), np.float32).reshape(-1)
    whole[start : start + part.size] = part
    return whole


def _matrix(flat: NDArray[Any], shape: Shape, usage: Usage) -> NDArray[Any]:
    matrix = flat.reshape(matrix_shape(shape))
    return matrix.T if usage is Usage.COLUMNWISE else matrix
