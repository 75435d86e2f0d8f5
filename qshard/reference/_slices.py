"""Flat slices of a weight: row-major elements `[start, start + length)` with arbitrary boundaries, as optimizers shard.

    amaxes = [slice_amax(...) of each rank], merged by maximum  ->  scales_from_amax  ->  each rank: cast_slice

The result has the bytes of `quantize` of the whole weight. Both functions place the slice into a whole weight of zeros,
which is slow and simple: a zero changes no amax.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qshard.formats import Format, Usage
from qshard.layout import Shape, matrix_shape, slice_plane
from qshard.reference._elements import Codes, Float32
from qshard.reference._planes import cast, plane_amax
from qshard.reference._scales import Amax, scales_from_amax


def slice_amax(x: ArrayLike, fmt: Format, shape: Shape, start: int, usage: Usage = Usage.ROWWISE) -> Amax:
    """Compute the amax of each block of the whole weight from one slice; 0 for blocks without elements in the slice.

    Args:
      x: float32, bfloat16 or float16 `[length]`. To quantize the weight that the model uses, round an fp32 master to
        the model's dtype first.
      fmt: the format.
      shape: shape of the whole weight.
      start: index of `x[0]` in the weight.
      usage: a plane that is stored in the order of the weight: `ROWWISE`, or `COLUMNWISE` for MXFP8 with 1-D blocks.

    Returns:
      Amaxes, with `block` in the orientation of the plane, which is `[K, M / 32]` for the columnwise plane.

    Raises:
      ValueError: the plane is stored transposed, or its scales depend on more than amaxes (`four_over_six`).

    >>> from qshard.formats import FP8_1x128
    >>> slice_amax([2.0, -3.0, 4.0], FP8_1x128, (2, 4), start=2).block
    array([[3.],
           [4.]], dtype=float32)
    """
    slice_plane(fmt, shape, usage, op="slice_amax")
    return plane_amax(_place_in_whole(x, shape, start, usage), fmt)


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
    """Write the codes of a slice into the data of the whole plane, and leave all other codes unchanged.

    `out` is the uint8 `data` of the whole plane in any shape, updated in place. If a code shares its byte with an
    element outside the slice, that half is unchanged. `amax` is merged over all slices. Other arguments, and errors, as
    in `slice_amax`.

    >>> from qshard.formats import FP8_E4M3
    >>> whole = np.zeros((2, 2), np.uint8)
    >>> cast_slice([1.0, 2.0], whole, FP8_E4M3, (2, 2), 1, slice_amax([1.0, 2.0], FP8_E4M3, (2, 2), 1))
    >>> whole
    array([[  0, 118],
           [126,   0]], dtype=uint8)
    """
    slice_plane(fmt, shape, usage, op="cast_slice")
    whole = _place_in_whole(x, shape, start, usage)
    index = _matrix(np.arange(whole.size), shape, usage)
    codes = cast(whole, fmt, scales_from_amax(amax, fmt).multiplier, seed=seed, index=index)
    in_order = (codes.T if usage is Usage.COLUMNWISE else codes).reshape(-1)
    bits = 8 // fmt.element.codes_per_byte  # bits of the byte that one code uses
    for i in range(start, start + np.size(x)):
        byte, shift = divmod(i * bits, 8)
        mask = (1 << bits) - 1 << shift
        out.flat[byte] = (int(out.flat[byte]) & ~mask) | (int(in_order[i]) << shift)


def _place_in_whole(x: ArrayLike, shape: Shape, start: int, usage: Usage) -> Float32:
    part = np.asarray(x, np.float32)
    whole = np.zeros(math.prod(shape), np.float32)
    whole[start : start + part.size] = part
    return _matrix(whole, shape, usage)


def _matrix(flat: NDArray[Any], shape: Shape, usage: Usage) -> NDArray[Any]:
    matrix = flat.reshape(matrix_shape(shape))
    return matrix.T if usage is Usage.COLUMNWISE else matrix
