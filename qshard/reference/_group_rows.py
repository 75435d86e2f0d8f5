"""Padded rows of experts."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Rows = NDArray[np.int32]


def group_rows(sizes: ArrayLike, *, tiles: int, tokens: int, unit: int) -> tuple[Rows, Rows, Rows, Rows, Rows]:
    """Assign padded rows to experts, for `tokens` rows that are sorted by expert.

    Expert e has `sizes[e]` rows and the next multiple of `unit` padded rows, at least `unit`. Its rows go to the first
    of its padded rows. Negative sizes count as 0, and rows past `tokens` do not count.

    Args:
      sizes: int32 `[E]`.
      tiles: number of runs of `unit` padded rows, at least `tokens // unit + E + 1`.
      tokens: number of rows.
      unit: padded rows of an expert come in multiples of this.

    Returns:
      stops: for each expert, the end of its padded rows.
      ends: for each expert, the end of its rows.
      rows: for each padded row, its row; `tokens` for padding.
      place: for each row, its padded row; the last padded row for rows of no expert.
      fits: 0 if sizes are negative or exceed `tokens`, else 1.

    >>> stops, ends, rows, place, fits = group_rows([3, 0, 1], tiles=6, tokens=5, unit=2)
    >>> stops.tolist(), ends.tolist(), rows.tolist()
    ([4, 6, 8], [3, 3, 4], [0, 1, 2, 5, 5, 5, 3, 5, 5, 5, 5, 5])
    >>> place.tolist(), fits.tolist()
    ([0, 1, 2, 6, 11], [1])
    """
    stops: list[int] = []
    ends: list[int] = []
    rows, place = [tokens] * (tiles * unit), [tiles * unit - 1] * tokens
    numbers = [int(size) for size in np.asarray(sizes).reshape(-1)]
    end = stop = 0
    for size in numbers:
        own = min(max(size, 0), tokens - end)
        for i in range(own):
            rows[stop + i], place[end + i] = end + i, stop + i
        end, stop = end + own, stop + max(1, -(-own // unit)) * unit
        ends.append(end)
        stops.append(stop)
    fits = all(size >= 0 for size in numbers) and sum(numbers) <= tokens
    made = (stops, ends, rows, place, [int(fits)])
    return tuple(np.array(each, np.int32) for each in made)  # type: ignore[return-value]
