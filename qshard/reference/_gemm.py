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


def group_slices(stops: Sequence[int], rows: int, unit: int = 1) -> list[slice]:
    """Return the rows of each group, from 0 for the first.

    A stop is clamped to `0..rows`, rounded down to a multiple of `unit`, and at least the stop before it.

    Args:
      stops: where each group ends.
      rows: rows of all groups.
      unit: rows of a block.

    >>> group_slices([2, 1, 9], 8)
    [slice(0, 2, None), slice(2, 2, None), slice(2, 8, None)]
    """
    start, slices = 0, []
    for stop in stops:
        inside = min(max(int(stop), 0), rows)
        stop = max(start, inside - inside % unit)
        slices.append(slice(start, stop))
        start = stop
    return slices


def gemm_grouped(
    a: Float,
    b: Float,
    stops: Sequence[int],
    blocks: Sequence[Float] | None = None,
    cols: int | None = None,
    scales: Sequence[Float] | None = None,
    ends: Sequence[int] | None = None,
    tokens: int | None = None,
) -> Float:
    """Multiply the rows of each group by the group's matrix, with `gemm`: `[M, N]`, or `[tokens, N]` without padding.

    Rows of the result that belong to no group are zeros.

    Args:
      a: values of codes, `[M, K]`.
      b: values of codes, `[E, N, K]`.
      stops: where the rows of each group end, as in `group_slices`.
      blocks: scales of the blocks along K, `[M, blocks]` for `a` and `[E, N, blocks]` for `b`.
      cols: length of a block along K.
      scales: scale of each group in `a`, and in `b`, both `[E]`.
      ends: where the rows of each group end in the result, as in `group_slices`; None for `stops`. The result has the
        first rows of each group, and zeros where the group has fewer.
      tokens: rows of the result; None for M.

    >>> gemm_grouped(np.ones((3, 2), np.float32), np.float32([[[1, 2]], [[3, 4]]]), [1, 2])
    array([[3.],
           [7.],
           [0.]], dtype=float32)
    """
    result = np.zeros((a.shape[0] if tokens is None else tokens, b.shape[1]), np.float32)
    places = group_slices(stops if ends is None else ends, len(result))
    for e, (rows, place) in enumerate(zip(group_slices(stops, a.shape[0]), places, strict=True)):
        number = min(rows.stop - rows.start, place.stop - place.start)
        rows, place = (slice(each.start, each.start + number) for each in (rows, place))
        of_rows = None if blocks is None else (blocks[0][rows], blocks[1][e])
        of_group = [np.float32(1)] * 2 if scales is None else [scale[e] for scale in scales]
        result[place] = gemm(a[rows], b[e], of_rows, cols, of_group)
    return result


def gemm_grouped_k(
    a: Float,
    b: Float,
    stops: Sequence[int],
    blocks: Sequence[Float] | None = None,
    cols: int | None = None,
    scales: Sequence[Float] | None = None,
) -> Float:
    """Contract the part of K of each group, with `gemm`: `[E, M, N]`. A group without rows gives zeros.

    Args:
      a: values of codes, `[M, K]`.
      b: values of codes, `[N, K]`.
      stops: where the part of each group ends, as in `group_slices`, with `cols` as its unit.
      blocks: scales of the blocks along K, `[M, blocks]` for `a` and `[N, blocks]` for `b`.
      cols: length of a block along K.
      scales: scale of each group in `a`, and in `b`, both `[E]`.

    >>> gemm_grouped_k(np.float32([[1, 2, 3]]), np.ones((1, 3), np.float32), [2, 3])[:, 0, 0]
    array([3., 3.], dtype=float32)
    """
    unit = 1 if cols is None else cols
    result = np.zeros((len(stops), a.shape[0], b.shape[0]), np.float32)
    for e, part in enumerate(group_slices(stops, a.shape[1], unit)):
        if part.start == part.stop:
            continue
        own = slice(part.start // unit, part.stop // unit)
        of_part = None if blocks is None else (blocks[0][:, own], blocks[1][:, own])
        of_group = [np.float32(1)] * 2 if scales is None else [scale[e] for scale in scales]
        result[e] = gemm(a[:, part], b[:, part], of_part, cols, of_group)
    return result
