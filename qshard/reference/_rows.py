"""Padded rows of experts: the rows of x that grouped products multiply, in the order of experts."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


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
