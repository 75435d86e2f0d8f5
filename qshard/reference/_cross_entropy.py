"""Cross entropy of logits with the bits of the kernels: fp32 in a fixed order, and fp64 for values per row."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qshard.reference._activation import exp_in_parts, halves
from qshard.reference._elements import Float32

PART, PART_LANES, EIGHT, TEAMS = 1024, 256, 8, 8
"""Logits per part, partial sums per part, size of the groups that are added first, and number of teams.

Team t adds parts t, t + 8, t + 16 and so on, one by one.
"""

_LEAST, _NONE = np.float32(-87), np.float32(-np.inf)
_NORMAL, _SQRT_HALF = 1 << 23, 0x3F3504F3  # bits of the smallest normal float32, and of sqrt(1/2)

Stats = tuple[Float32, Float32, Float32]  # statistics per row: largest logit, sum of e^(x - largest), sum of x


def exp_of_negative(x: Float32) -> Float32:
    """Compute e^x for x <= 0; 0 below -87.

    >>> exp_of_negative(np.float32([0, -1, -88])).tolist()
    [1.0, 0.3678794801235199, 0.0]
    """
    fraction, power = exp_in_parts(np.where(x < _LEAST, _LEAST, x), rest=False)
    e = fraction * (power + np.int32(0x3F800000)).view(np.float32)
    result: Float32 = np.where(x < _LEAST, np.float32(0), e.reshape(np.shape(x)))
    return result


def log(x: Float32) -> NDArray[np.float64]:
    """Compute the natural logarithm in fp64 with the atanh series. Subnormal numbers give -inf, like 0.

    >>> log(np.float32([1, 0, 2])).tolist()
    [0.0, -inf, 0.6931471805599453]
    """
    bits = np.ascontiguousarray(x).view(np.int32)
    exponent = (bits - _SQRT_HALF) >> 23
    m = (bits - (exponent << 23)).view(np.float32).astype(np.float64)
    s = (m - 1) / (m + 1)
    square, total = s * s, np.zeros_like(s)
    for k in range(17, 0, -2):
        total = total * square + 1.0 / k
    found = exponent * float.fromhex("0x1.62e42fefa39efp-1") + 2.0 * s * total
    found = np.where((x + np.float32(0)).view(np.int32) < _NORMAL, -np.inf, np.where(np.isposinf(x), np.inf, found))
    result: NDArray[np.float64] = np.where(x >= 0, found, np.nan)
    return result


def merge(a: Stats, b: Stats) -> Stats:
    """Merge the statistics of two sets of logits."""
    most = np.where(b[0] > a[0], b[0], a[0])
    shift = np.where(most == _NONE, np.float32(0), most)
    return most, a[1] * exp_of_negative(a[0] - shift) + b[1] * exp_of_negative(b[0] - shift), a[2] + b[2]


def no_logits(rows: int) -> Stats:
    return np.full(rows, _NONE), np.zeros(rows, np.float32), np.zeros(rows, np.float32)


def row_stats(x: Float32, *, total: bool) -> Stats:
    """Compute the statistics of logits `[rows, V]`, part by part in teams."""
    rows, columns = x.shape
    teams = [no_logits(rows) for _ in range(TEAMS)]
    for number, at in enumerate(range(0, columns, PART)):
        teams[number % TEAMS] = merge(teams[number % TEAMS], _part(x[:, at : at + PART], total))
    found = teams[0]
    for team in teams[1:]:
        found = merge(found, team)
    return found


def _part(x: Float32, total: bool) -> Stats:
    most = np.where(np.isnan(x), _NONE, x).max(axis=1, initial=_NONE) + np.float32(0)
    shift = np.where(most == _NONE, np.float32(0), most)
    e = exp_of_negative(x - shift[:, None])
    return most, _sum(e), _sum(x) if total else np.zeros(len(x), np.float32)


def _sum(x: Float32) -> Float32:
    lanes = np.zeros((len(x), PART_LANES), np.float32)
    for at in range(0, x.shape[1], PART_LANES):
        width = min(PART_LANES, x.shape[1] - at)
        lanes[:, :width] = lanes[:, :width] + x[:, at : at + width]
    return halves(halves(lanes.reshape(len(x), PART_LANES // EIGHT, EIGHT)))


def losses(
    found: Stats,
    logit: Float32,
    labels: NDArray[np.int32],
    *,
    classes: int,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
) -> tuple[Float32, Float32]:
    """Compute the loss and log(sum of e^x) of each row.

    `found` has the statistics of the rows over all classes, and `logit` the logit of each row's label.
    """
    lse = (found[0] + log(found[1])).astype(np.float32)
    s, z, wide = float(np.float32(smoothing)), float(np.float32(z_loss)), lse.astype(np.float64)
    loss = wide - (1.0 - s) * logit.astype(np.float64)
    if s:
        loss = loss - s * found[2].astype(np.float64) / float(classes)
    loss = (loss + z * wide * wide).astype(np.float32)
    loss = np.where((labels >= 0) & (labels < classes), loss, np.float32(np.nan))
    return np.where(labels == ignore_index, np.float32(0), loss), lse


def gradients(
    x: Float32,
    labels: NDArray[np.int32],
    lse: Float32,
    grad: Float32,
    *,
    classes: int,
    first: int,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
) -> Float32:
    """Compute the gradient of the logits in fp32.

    `x` has the logits of the classes from `first` on, of `classes` in all shards. `lse` is log(sum of e^x), and `grad`
    the gradient of the loss, of each row.
    """
    s, z, g = float(np.float32(smoothing)), float(np.float32(z_loss)), grad.astype(np.float64)
    is_class = (labels >= 0) & (labels < classes)
    slope = np.where(is_class, grad, np.float32(np.nan)) * (1.0 + 2.0 * z * lse.astype(np.float64)).astype(np.float32)
    shared, own = (-g * s / float(classes)).astype(np.float32), (g * (1.0 - s)).astype(np.float32)
    d = slope[:, None] * exp_of_negative(x - lse[:, None]) + shared[:, None]
    columns = first + np.arange(x.shape[1], dtype=np.int64)
    d = np.where(columns == labels[:, None], d - own[:, None], d)
    result: Float32 = np.where((labels == ignore_index)[:, None], np.float32(0), d)
    return result
