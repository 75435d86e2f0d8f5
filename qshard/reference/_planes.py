"""Amax, scales and codes of one plane, stored as a matrix `[rows, cols]` with blocks of `fmt.block`."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from qshard.formats import E2M1, E4M3, Format
from qshard.reference._elements import Codes, Float32, decode, encode, encode_stochastic
from qshard.reference._philox import random_bytes
from qshard.reference._scales import (
    Amax,
    Scales,
    amax,
    amax_or_nan,
    block_amax,
    nvfp4_block_scales,
    nvfp4_global_scale,
    per_element,
)


def plane_amax(x: Float32, fmt: Format) -> Amax:
    """Compute the amaxes that the scales of a plane need."""
    whole = None
    if fmt.block is None or fmt.scaling.global_scale is not None:
        whole = amax(x, axis=1 if fmt.scaling.global_scale == "row" else None)
    return Amax(whole, None if fmt.block is None else block_amax(x, fmt.block))


@np.errstate(all="ignore")
def cast(x: Float32, fmt: Format, multiplier: Float32, *, seed: int, index: ArrayLike) -> Codes:
    """Encode `fl(x * multiplier)`, one code per uint8. `index` is the index of each element in the whole tensor."""
    scaled = x * per_element(multiplier, fmt.block, x.shape)
    if fmt.nonfinite == "nan":  # needed where no scale is NaN, as in delayed scaling
        scaled = np.where(np.isinf(x), np.float32(np.nan), scaled)
    if fmt.rounding == "stochastic":
        return encode_stochastic(scaled, random_bytes(seed, index))
    return encode(scaled, fmt.element)


@np.errstate(all="ignore")
def four_over_six(x: Float32, fmt: Format, amax: Amax) -> Scales:
    """Choose between two scales per block, with amax at 6 or at 4: the one with the smaller error, or 6 if equal.

    base = fl(fl(amax / 6) * S);   d6 = E4M3(min(base, 448));   d4 = E4M3(min(fl(base * 1.5), 448))
    """
    assert amax.whole is not None
    assert amax.block is not None
    global_scale = nvfp4_global_scale(amax.whole, fmt)
    base = amax_or_nan(amax.block, fmt.nonfinite) / np.float32(E2M1.max) * global_scale[..., None]
    multiplier4, d4 = nvfp4_block_scales(base * np.float32(1.5), global_scale)
    multiplier6, d6 = nvfp4_block_scales(base, global_scale)
    error4 = block_error(x, fmt, multiplier4, d4, amax.whole)
    error6 = block_error(x, fmt, multiplier6, d6, amax.whole)
    four = error4 < error6  # false if either error is NaN
    return Scales(
        np.where(four, multiplier4, multiplier6), np.where(four, d4, d6), np.float32(1) / np.asarray(global_scale)
    )


def block_error(x: Float32, fmt: Format, multiplier: Float32, d: Codes, whole: Float32) -> Float32:
    """Sum |e| or fl(e * e) over each block in fp32, with e = fl(fl(fl(fl(q * d) * amax) / (6 * scale_max)) - x).

    Each row of a block is summed in element order. Rows are summed in a binary tree: row i with row i + 8, 4, 2, 1.
    """
    assert fmt.block is not None
    q = decode(encode(x * per_element(multiplier, fmt.block, x.shape), E2M1), E2M1)
    stored = q * per_element(decode(d, E4M3), fmt.block, x.shape) * whole[..., None]
    e = stored / np.float32(E2M1.max * fmt.scaling.scale_max) - x
    terms = np.abs(e) if fmt.scaling.four_over_six == "mae" else e * e
    block_rows, block_cols = fmt.block
    terms = terms.reshape(d.shape[0], block_rows, d.shape[1], block_cols)
    rows = terms[..., 0]
    for i in range(1, block_cols):
        rows = rows + terms[..., i]
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    return np.asarray(rows[:, 0])
