"""Padded rows of experts: their order, the rows of x that grouped products multiply, and the sums of rows by token."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qshard.reference._activation import fma, row_sum
from qshard.reference._elements import Float32

Rows = NDArray[np.int32]


def group_rows(sizes: ArrayLike, *, tiles: int, tokens: int, tile_rows: int) -> tuple[Rows, Rows, Rows, Rows, Rows]:
    """Assign padded rows to experts, for `tokens` rows that are sorted by expert.

    Expert e has `sizes[e]` rows and the next multiple of `tile_rows` padded rows, at least `tile_rows`. Its rows go to
    the first of its padded rows. Negative sizes count as 0, and rows past `tokens` do not count.

    Args:
      sizes: int32 `[E]`.
      tiles: number of runs of `tile_rows` padded rows, at least `tokens // tile_rows + E + 1`.
      tokens: number of rows.
      tile_rows: padded rows of an expert come in multiples of this.

    Returns:
      stops: for each expert, the end of its padded rows.
      ends: for each expert, the end of its rows.
      rows: for each padded row, its row; `tokens` for padding.
      place: for each row, its padded row; the last padded row for rows of no expert.
      fits: 0 if sizes are negative or exceed `tokens`, else 1.

    >>> stops, ends, rows, place, fits = group_rows([3, 0, 1], tiles=6, tokens=5, tile_rows=2)
    >>> stops.tolist(), ends.tolist(), rows.tolist()
    ([4, 6, 8], [3, 3, 4], [0, 1, 2, 5, 5, 5, 3, 5, 5, 5, 5, 5])
    >>> place.tolist(), fits.tolist()
    ([0, 1, 2, 6, 11], [1])
    """
    stops: list[int] = []
    ends: list[int] = []
    rows, place = [tokens] * (tiles * tile_rows), [tiles * tile_rows - 1] * tokens
    numbers = [int(size) for size in np.asarray(sizes).reshape(-1)]
    end = stop = 0
    for size in numbers:
        own = min(max(size, 0), tokens - end)
        for i in range(own):
            rows[stop + i], place[end + i] = end + i, stop + i
        end, stop = end + own, stop + max(1, -(-own // tile_rows)) * tile_rows
        ends.append(end)
        stops.append(stop)
    fits = all(size >= 0 for size in numbers) and sum(numbers) <= tokens
    made = (stops, ends, rows, place, [int(fits)])
    return tuple(np.array(each, np.int32) for each in made)  # type: ignore[return-value]


def gather_rows(x: NDArray[Any], rows: ArrayLike) -> NDArray[Any]:
    """Gather rows of a matrix, with zeros for padding.

    Args:
      x: `[T, K]`, of any dtype.
      rows: integers `[P]`. A number outside 0 to T - 1 means padding.

    Returns:
      `[P, K]`, of the dtype of `x`.

    >>> gather_rows(np.float32([[1, 2], [3, 4]]), [1, 2, 0, -1])
    array([[3., 4.],
           [0., 0.],
           [1., 2.],
           [0., 0.]], dtype=float32)
    """
    own = np.asarray(rows, np.int64)
    there = (own >= 0) & (own < len(x))
    gathered = np.zeros((len(own), x.shape[1]), x.dtype)
    gathered[there] = x[own[there]]
    return gathered


def expert_of_rows(stops: ArrayLike, count: int) -> NDArray[np.int64]:
    """Return the expert of each padded row.

    Row r belongs to the first expert e with `stops[e] > r`. Stops that decrease, or lie outside, assign rows by the
    same rule.

    Args:
      stops: integers `[E]`. Expert e has the rows from `stops[e - 1]`, or 0, to `stops[e]`.
      count: padded rows P.

    Returns:
      `[P]`. E for rows after all stops, which belong to no expert.

    >>> expert_of_rows([2, 2, 3], 5)
    array([0, 0, 2, 3, 3])
    """
    after = np.asarray(stops, np.int64) > np.arange(count)[:, None]
    return np.where(after.any(axis=1), after.argmax(axis=1), after.shape[1]) if after.size else np.zeros(count, int)


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
