"""How much of a tensor lies far out, where formats that share scales lose the rest."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qshard.numerics._measures import as_float
from qshard.numerics._sums import SIZE

FAR = 6.0
"""Times the root mean square. Of a Gaussian, 2 elements of 10**9 lie beyond."""


def outlier_share(x: Any) -> float:
    """The share of elements with `|x| > 6 * sqrt(mean(x**2))`, of those that are finite.

    Args:
      x: as for `stats`.

    Returns:
      The share of all elements; 0 of none.

    Raises:
      TypeError: `x` does not hold real numbers.

    Sharded arrays: as for `stats`.

    >>> outlier_share([1.0] * 99 + [1000.0])
    0.01
    """
    array = as_float(x, "outlier_share").array.reshape(-1)
    total, counted = 0.0, 0
    for part in _parts(array):
        total += float(np.einsum("i,i", part, part))
        counted += part.size
    limit = FAR * math.sqrt(total / counted) if counted else 0.0
    far = sum(int(np.count_nonzero(np.abs(part) > limit)) for part in _parts(array))
    return far / array.size if array.size else 0.0


def _parts(flat: NDArray[Any]) -> Iterator[NDArray[np.float64]]:
    """The finite elements, so many at a time that they stay in cache."""
    for first in range(0, flat.size, SIZE):
        part = flat[first : first + SIZE].astype(np.float64)
        finite = np.isfinite(part)
        yield part if finite.all() else part[finite]
