"""The random Hadamard transform, which spreads outliers over 16 elements before NVFP4 quantization."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, NDArray

from qshard.reference._elements import Float32

_SIZE = 16
_SIGN_MASK = 0xD7E8
_DIGIT, _DIGITS = 41, 7
"""Bits of a digit, 53 of float64 - 8 of a significand - 4 of a sum of 16; digits for places up to 2**127."""


@np.errstate(all="ignore")
def hadamard_transform(x: ArrayLike) -> Float32:
    """Rotate every 16 elements of the last axis: `y = x @ diag(s) @ H / 4`, exact, then rounded once to bfloat16.

    `H[i, j] = (-1) ** popcount(i & j)` is the Hadamard matrix. `s[i]` is -1 if bit `i` of 0xD7E8 is set, else 1. `x` is
    first rounded to bfloat16. A sum of exactly 0 is +0; infinities and NaN follow IEEE sums.

    >>> hadamard_transform([4.0] + [0.0] * 15)[:8]
    array([1., 1., 1., 1., 1., 1., 1., 1.], dtype=float32)

    Sources: arXiv:2509.25149.
    """
    x = np.asarray(x, np.float32)
    blocks = x.astype(ml_dtypes.bfloat16).astype(np.float64).reshape(-1, _SIZE)
    # Sums of 8-bit significands are exact in float64, in any order, if the exponents differ by at most 53 - 8 - 4.
    sizes = np.abs(blocks)
    spread = np.frexp(sizes.max(axis=1))[1] - np.frexp(np.where(sizes > 0, sizes, np.inf).min(axis=1))[1]
    narrow = np.isfinite(blocks).all(axis=1) & (spread <= 53 - 8 - 4)
    rotated = np.empty_like(blocks)
    rotated[narrow] = _to_bfloat16(blocks[narrow] @ _rotation() / 4 + 0.0)
    rotated[~narrow] = _exact(blocks[~narrow])
    return rotated.astype(np.float32).reshape(x.shape)


def _to_bfloat16(y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Round to the nearest bfloat16, ties to even. Values that round to zero keep their sign."""
    unit = np.maximum(np.frexp(y)[1] - 8, -133)  # of 8 significant bits; at least the smallest subnormal
    rounded = np.ldexp(np.rint(np.ldexp(y, -unit)), unit)
    return np.where(np.abs(rounded) < 2.0**128, rounded, np.copysign(np.inf, y))


def _exact(blocks: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute the transform with integers of several digits: bfloat16 numbers are multiples of 2**-133.

    A sum of 16 digits with 8 bits above their lowest bit is exact in float64, in any order.
    """
    finite = np.isfinite(blocks).all(axis=1, keepdims=True)
    of_others = blocks @ _rotation()  # infinities and NaN
    blocks = np.where(finite, blocks, 0)
    place = np.maximum(np.frexp(blocks)[1] - 8, -133) + 133  # of the lowest of 8 bits
    digits = [
        (np.where(place // _DIGIT == k, np.ldexp(blocks, 133 - _DIGIT * k), 0) @ _rotation()).astype(np.int64)
        for k in range(_DIGITS)
    ]
    for k in range(_DIGITS - 1):
        digits[k + 1] += digits[k] >> _DIGIT
        digits[k] &= 2**_DIGIT - 1
    # Join digits from the highest down until there are enough bits. A last bit says whether the rest is 0.
    total, lowest, rest = digits[-1], np.full(blocks.shape, _DIGITS - 1), np.zeros(blocks.shape, bool)
    for k in reversed(range(_DIGITS - 1)):
        enough = np.abs(total) >= 2**10
        total = np.where(enough, total, (total << _DIGIT) + digits[k])
        lowest = np.where(enough, lowest, k)
        rest |= enough & (digits[k] != 0)
    rounded = _to_bfloat16(np.ldexp((2 * total + rest).astype(np.float64), _DIGIT * lowest - 133 - 3))
    return np.where(finite, rounded, np.where(np.isnan(of_others), np.nan, of_others))


def _rotation() -> NDArray[np.float64]:
    signs = [-1.0 if _SIGN_MASK >> i & 1 else 1.0 for i in range(_SIZE)]
    return np.array([[signs[i] * (-1) ** (i & j).bit_count() for j in range(_SIZE)] for i in range(_SIZE)])
