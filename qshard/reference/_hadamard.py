"""The random Hadamard transform, which spreads outliers over 16 elements before NVFP4 quantization."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, NDArray

from qshard.reference._elements import Float32

_SIZE = 16
_SIGN_MASK = 0xD7E8


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
    """Compute the transform with Python integers: bfloat16 numbers are multiples of 2**-133."""
    finite = np.isfinite(blocks).all(axis=1, keepdims=True)
    sums = np.matmul(_INTEGER(np.ldexp(np.where(finite, blocks, 0), 133)), _INTEGER(_rotation()))
    rotated = np.where(finite, np.asarray(_ROUND(sums), np.float64), blocks @ _rotation())  # else inf and NaN
    return np.where(np.isnan(rotated), np.nan, rotated)


def _rotation() -> NDArray[np.float64]:
    signs = [-1.0 if _SIGN_MASK >> i & 1 else 1.0 for i in range(_SIZE)]
    return np.array([[signs[i] * (-1) ** (i & j).bit_count() for j in range(_SIZE)] for i in range(_SIZE)])


def _round_to_bfloat16(value: int) -> float:
    """Return the bfloat16 nearest to `value * 2**-133 / 4`, ties to even."""
    unit = max(abs(value).bit_length() - 8, 2)
    odd = value >> unit & 1
    rounded = math.ldexp((value + 2 ** (unit - 1) - 1 + odd) >> unit, unit - 135)
    return math.copysign(rounded if abs(rounded) < 2.0**128 else math.inf, value)


_INTEGER = np.frompyfunc(int, 1, 1)
_ROUND = np.frompyfunc(_round_to_bfloat16, 1, 1)
