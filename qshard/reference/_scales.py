"""Amaxes, and the scales of every format computed from them."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qshard.formats import E2M1, E4M3, E8M0, ElementFormat, Format
from qshard.reference._elements import Codes, Float32, decode, encode

FLOAT_MAX = np.finfo(np.float32).max
ONE = np.float32(1)


class Amax(NamedTuple):
    """Amaxes that determine the scales of a plane `[rows, cols]`.

    Amaxes of shards are merged by an elementwise maximum.

    Attributes:
      whole: float32 `[]` for the tensor or `[rows]` for its rows; None if the format has no such scale.
      block: float32 `[ceil(rows / block_rows), ceil(cols / block_cols)]`; None for one scale per tensor.
    """

    whole: Float32 | None
    block: Float32 | None

    def merge(self, other: Amax) -> Amax:
        """Return the amaxes of both shards together. NaN wins."""
        return Amax(*(None if a is None or b is None else np.maximum(a, b) for a, b in zip(self, other, strict=True)))


class Scales(NamedTuple):
    """Scales of a plane `[rows, cols]`.

    Attributes:
      multiplier: float32 encode scales: one per block, or `[]`.
      scale_inv: stored decode scales: float32, or uint8 codes of the format's scale dtype; same shape as `multiplier`.
      global_scale_inv: float32 `[]` or `[rows]`; None if the format has no global scale.
    """

    multiplier: Float32
    scale_inv: NDArray[Any]
    global_scale_inv: Float32 | None = None


def amax(x: ArrayLike, axis: int | tuple[int, ...] | None = None) -> Float32:
    """Compute max |x| as a maximum of bit patterns, exact in any order. NaN gives 0x7FC00000, no elements give 0.

    >>> amax([1.0, -3.0, 2.0]), amax([])
    (array(3., dtype=float32), array(0., dtype=float32))
    """
    patterns = np.abs(np.asarray(x, np.float32)).view(np.uint32)
    largest = np.asarray(np.max(patterns, axis=axis, initial=0)).view(np.float32)
    return np.where(np.isnan(largest), np.float32(np.nan), largest)


def block_amax(x: ArrayLike, block: tuple[int, int]) -> Float32:
    """Compute the amax of each block of `x` `[rows, cols]`. The last block of an axis may be shorter.

    >>> block_amax([[1, 2, 3], [4, 5, -6]], (1, 2))
    array([[2., 3.],
           [5., 6.]], dtype=float32)
    """
    x = np.asarray(x, np.float32)
    grid = [-(-size // unit) for size, unit in zip(x.shape, block, strict=True)]
    padding = [(0, count * unit - size) for count, unit, size in zip(grid, block, x.shape, strict=True)]
    blocks = np.pad(x, padding).reshape(grid[0], block[0], grid[1], block[1])  # zero padding changes no amax
    return amax(blocks, axis=(1, 3))


def per_element(blocks: NDArray[Any], block: tuple[int, int] | None, shape: tuple[int, ...]) -> NDArray[Any]:
    """Repeat each block's value for the elements of the block, `[rows, cols]`."""
    if block is None:
        return np.broadcast_to(blocks, shape)
    return np.repeat(np.repeat(blocks, block[0], axis=0), block[1], axis=1)[: shape[0], : shape[1]]


def amax_or_nan(amax: ArrayLike, nonfinite: str) -> Float32:
    """Return `amax` with infinity replaced by NaN if `nonfinite` is "nan"."""
    amax = np.asarray(amax, np.float32)
    return np.where(np.isinf(amax) & (nonfinite == "nan"), np.float32(np.nan), amax)


@np.errstate(all="ignore")
def scale_to(largest: float | np.float32, amax: ArrayLike) -> Float32:
    """Compute the fp32 scale from amax to `largest`: `min(fl(largest / amax), FLT_MAX)`; 1 if amax is 0, inf or NaN."""
    a = np.asarray(amax, np.float32)
    return np.where(np.isfinite(a) & (a > 0), np.minimum(np.float32(largest) / a, FLOAT_MAX), ONE)


def largest_power(scale: Float32) -> Float32:
    """Round down to a power of two, by clearing the mantissa."""
    return (scale.view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)


@np.errstate(all="ignore")
def scale_from_amax(
    amax: ArrayLike, element: ElementFormat, *, pow2: bool = False, eps: float = 0.0, nonfinite: str = "saturate"
) -> tuple[Float32, Float32]:
    """Compute the fp32 scale that maps amax to the largest element, and its inverse.

        a = max(amax, eps);   scale = scale_to(element.max, a), or the largest power of two below ("pow2")
        scale_inv = fl(1 / scale)
        nonfinite "nan": scale and scale_inv are NaN if a is inf or NaN

    >>> scale_from_amax([0.0, 1.0, 896.0], E4M3)[0]
    array([  1. , 448. ,   0.5], dtype=float32)

    Sources: arXiv:2209.05433; TransformerEngine, `compute_scale_from_amax`.
    """
    a = np.maximum(np.asarray(amax, np.float32), np.float32(eps))  # keeps NaN
    scale = scale_to(element.max, a)
    if pow2:
        scale = largest_power(scale)
    if nonfinite == "nan":
        scale = np.where(np.isfinite(a), scale, np.float32(np.nan))
    return np.asarray(scale), np.asarray(ONE / scale)


@np.errstate(all="ignore")
def e8m0_from_amax(amax: ArrayLike, element: ElementFormat, *, rounding: Literal["up", "floor"] = "up") -> Codes:
    """Compute the E8M0 code of a block's `scale_inv`.

        up:     the least power of two, from 2**-127 to 2**127, that is not below fl(amax * fl(1 / element.max))
        floor:  2 ** (floor(log2(amax)) - element.max_exponent), and 2**-127 if that is less (OCP)

    With both roundings, NaN gives 255 and infinity gives 254.

    >>> e8m0_from_amax([0.0, 448.0, 449.0], E4M3), e8m0_from_amax([448.0, 449.0], E4M3, rounding="floor")
    (array([  0, 127, 128], dtype=uint8), array([127, 127], dtype=uint8))

    Sources: arXiv:2506.08027, and OCP Microscaling Formats v1.0, section 6.3 (floor).
    """
    amax = np.asarray(amax, np.float32)
    value = amax * (ONE / np.float32(element.max))
    if rounding == "up":
        powers = decode(np.arange(E8M0.max_code + 1), E8M0)
        code = np.searchsorted(powers, np.minimum(value, powers[-1]))  # the first power that is not below
    else:
        _, exponent = np.frexp(amax)  # amax = m * 2**exponent with m in [0.5, 1)
        code = np.where(amax > 0, np.maximum(exponent - 1 - element.max_exponent + E8M0.bias, 0), 0)
    code = np.where(np.isinf(amax), E8M0.max_code, code)
    return np.where(np.isnan(amax), E8M0.nan_code, code).astype(np.uint8)


def nvfp4_global_scale(amax: ArrayLike, fmt: Format) -> Float32:
    """Compute the global scale S of a tensor or row."""
    return scale_to(E2M1.max * fmt.scaling.scale_max, amax)


@np.errstate(all="ignore")
def nvfp4_block_scales(scale: Float32, global_scale: Float32) -> tuple[Float32, Codes]:
    """Compute the multiplier and the E4M3 code of fp32 block scales `[rows, blocks]`.

    d = E4M3(min(scale, 448));   multiplier = min(fl(1 / fl(d * fl(1 / S))), FLT_MAX)
    """
    code = encode(np.minimum(scale, np.float32(E4M3.max)), E4M3)
    return np.minimum(ONE / (decode(code, E4M3) * (ONE / global_scale)[..., None]), FLOAT_MAX), code


@np.errstate(all="ignore")
def scales_from_amax(amax: Amax, fmt: Format) -> Scales:
    """Compute all scales of a plane from its amaxes. Every rank computes the same scales from the merged amaxes.

    Not for `fmt.scaling.four_over_six`, where scales also depend on the elements.
    """
    options: dict[str, Any] = {"pow2": fmt.scaling.pow2, "eps": fmt.scaling.eps, "nonfinite": fmt.nonfinite}
    if fmt.block is None:
        assert amax.whole is not None
        return Scales(*scale_from_amax(amax.whole, fmt.element, **options))
    assert amax.block is not None
    if fmt.scale_dtype == "float32":
        return Scales(*scale_from_amax(amax.block, fmt.element, **options))
    block = amax_or_nan(amax.block, fmt.nonfinite)
    if fmt.scale_dtype == E8M0.name:
        code = e8m0_from_amax(block, fmt.element, rounding=fmt.scaling.scale_rounding)
        return Scales(ONE / decode(code, E8M0), code)  # the inverse of a power of two is exact
    assert amax.whole is not None
    global_scale = nvfp4_global_scale(amax.whole, fmt)
    sixth = global_scale * (ONE / np.float32(E2M1.max))
    block_scale = block * sixth[..., None]
    return Scales(*nvfp4_block_scales(block_scale, global_scale), ONE / global_scale)


@np.errstate(all="ignore")
def delayed_scale(scale: ArrayLike, amax: ArrayLike, element: ElementFormat, *, margin: int = 0) -> Float32:
    """Compute the scale that delayed scaling casts with, from the `scale` of earlier steps and the current `amax`.

        scale; or if it is 0 (no history), the scale that an update with only this amax would give;
        1 if that update is skipped because amax is 0, infinite or NaN

    >>> delayed_scale([0.0, 2.0, 0.0], [7.0, 7.0, 0.0], E4M3)
    array([64.,  2.,  1.], dtype=float32)
    """
    scale, amax = np.asarray(scale, np.float32), np.asarray(amax, np.float32)
    first, _ = delayed_scale_update(np.ones_like(amax), amax[..., None], amax, element, margin=margin)
    return np.where(scale == 0, first, scale)


@np.errstate(all="ignore")
def delayed_scale_update(
    scale: ArrayLike,
    history: ArrayLike,
    amax: ArrayLike,
    element: ElementFormat,
    *,
    margin: int = 0,
    algorithm: Literal["max", "most_recent"] = "max",
) -> tuple[Float32, Float32]:
    """Update scale and history at the end of a step, given amaxes that are reduced over ranks.

        a step with amax 0 changes nothing; otherwise amax is appended to the history, and the oldest entry is dropped
        a = max(history), or amax itself ("most_recent")
        scale = scale_to(fl(element.max * 2**-margin), a) if a is finite; otherwise scale is unchanged

    Args:
      scale: float32 `[...]`, of the step that ends; 0 before the first one.
      history: float32 `[..., L]`, oldest first.
      amax: float32 `[...]`, of the step that ends.
      element: element format.
      margin: headroom in powers of two.
      algorithm: compute the scale from the "max" of the history, or from the "most_recent" amax.

    Returns:
      Scale and history for the next step.

    >>> delayed_scale_update(1.0, [0.0, 7.0], 3.5, E4M3)
    (array(64., dtype=float32), array([7. , 3.5], dtype=float32))
    """
    scale, history, amax = (np.asarray(value, np.float32) for value in (scale, history, amax))
    seen = amax != 0  # true for NaN
    history = np.where(seen[..., None], np.concatenate([history[..., 1:], amax[..., None]], axis=-1), history)
    a = np.max(history, axis=-1) if algorithm == "max" else amax  # keeps NaN
    target = np.float32(element.max) * np.float32(2.0**-margin)
    return np.where(seen & np.isfinite(a), scale_to(target, a), scale), history
