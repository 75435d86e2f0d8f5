"""Sums of the rows of experts for each token, with the bits of the kernels."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qshard.reference._activation import fma, row_sum
from qshard.reference._elements import Float32
from qshard.reference._rows import gather_rows


def combine_rows(y: Float32, positions: NDArray[np.int32], weights: Float32) -> Float32:
    """Sum `weights[t, c] * y[positions[t, c]]` over c in fp32, in order, without positions outside of y."""
    total = np.zeros((len(positions), y.shape[1]), np.float32)
    for c in range(positions.shape[1]):
        there = (positions[:, c] >= 0) & (positions[:, c] < len(y))
        term = fma(weights[:, c, None], gather_rows(y, positions[:, c]), total)
        total = np.where(there[:, None], term, total)
    return total


def combine_rows_grad(
    y: Float32, tokens: NDArray[np.int32], weights: Float32, grad: Float32
) -> tuple[Float32, Float32]:
    """Compute the gradients of y and of the weights in fp32, by row of y. Rows without a token give zeros."""
    there = (tokens >= 0) & (tokens < len(grad))
    rows = gather_rows(grad, tokens)
    dy = np.where(there[:, None], weights[:, None] * rows, np.float32(0))
    dweights: Float32 = np.where(there, row_sum(y, rows), np.float32(0))
    return dy, dweights
