"""Products of codes, accumulated in the order of the CPU kernels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float32]


def gemm(
    a: Float,
    b: Float,
    blocks: Sequence[Float] | None = None,
    cols: int | None = None,
    scales: Sequence[Float | np.float32] = (np.float32(1), np.float32(1)),
) -> Float:
    """Compute `a @ b.T` of codes with scales: `[M, N]`, with every operation rounded to fp32.

    Products of codes are exact. They are summed along K within a block. The sum of a block, times the scale of `a`,
    times the scale of `b`, is added to the running total.

    Args:
      a: values of codes, `[M, K]`.
      b: values of codes, `[N, K]`.
      blocks: scales of the blocks along K, `[M, blocks]` for `a` and `[N, blocks]` for `b`.
      cols: length of a block along K.
      scales: scale of all of `a`, and of all of `b`.

    >>> gemm(np.ones((2, 3), np.float32), np.ones((1, 3), np.float32), scales=(np.float32(2), np.float32(0.5)))
    array([[3.],
           [3.]], dtype=float32)
    """
    (m, k), (n, _) = a.shape, b.shape
    total = np.zeros((m, n), np.float32)
    length = max(1, k) if cols is None else cols
    for block, begin in enumerate(range(0, k, length)):
        part = np.zeros((m, n), np.float32)
        for i in range(begin, min(k, begin + length)):
            part += a[:, i, None] * b[None, :, i]
        if blocks is not None:
            part = part * blocks[0][:, block, None] * blocks[1][None, :, block]
        total += part
    result: Float = total * scales[0] * scales[1]
    return result
