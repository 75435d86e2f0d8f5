"""What a format of a weight does to the product that the weight is for, with activations of a real run."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qshard._core import quantize_steps
from qshard._core.validation import FormatLike, as_format
from qshard.formats import Format, Usage
from qshard.layout import matrix_shape, plane
from qshard.numerics._measures import as_float

ROWS = 1024
"""Of a weight, at a time, or more where a block has more."""


@np.errstate(all="ignore")
def output_noise(x: Any, w: Any, fmt: FormatLike, *, seed: int = 0) -> float:
    """The noise for the signal of `y = x @ w.T`, where `w` alone is quantized.

        sum((x @ (value - w).T)**2) / sum((x @ w.T)**2)

    Args:
      x: `[..., K]`, real numbers, as for `stats`. They are multiplied in float32.
      w: `[*lead, K]`, as `x` of `stats`. Elements that are not finite, in `w` or as stored, count as 0 in both.
      fmt: of the rowwise plane of `w`, or its name.
      seed: of stochastic rounding, 64 bits.

    Returns:
      The ratio; NaN without a signal, or where that is not finite, as where `x` is not.

    Raises:
      TypeError: `x` or `w` does not hold real numbers.
      ValueError: `x` has another K, or `fmt` has no such plane of `w`.

    Sharded arrays: as for `stats`.

    >>> output_noise(np.ones((1, 2)), [[448.0, 17.0]], "FP8_E4M3") == (1 / 465) ** 2  # 17 becomes 16.
    True
    """
    from qshard.numerics import _kernels as kernels
    from qshard.numerics._sums import Compared

    fmt = as_format(fmt, "output_noise")
    given, weight = as_float(x, "output_noise").array, as_float(w, "output_noise").array
    if given.shape[-1:] != weight.shape[-1:]:
        raise ValueError(
            f"output_noise: x {given.shape} does not end in the K of w {weight.shape}; give what it multiplies"
        )
    plane(fmt, weight.shape, Usage.ROWWISE, op="output_noise", name="w")
    matrix = np.ascontiguousarray(weight).reshape(matrix_shape(weight.shape))
    inputs = given.reshape(matrix_shape(given.shape)).astype(np.float32)
    draws = kernels.draws("output_noise", seed) if fmt.stochastic else None
    parts = quantize_steps.quantize(kernels.ops, matrix, fmt, Usage.ROWWISE, draws=draws)[Usage.ROWWISE]
    where = plane(fmt, matrix.shape, Usage.ROWWISE)
    compared = Compared(kernels.ops, matrix, parts, fmt, where, kernels.block_scales(parts, fmt))
    step = _step(fmt)
    signal = noise = 0.0
    for first in range(0, matrix.shape[0], step):
        rows = slice(first, min(first + step, matrix.shape[0]))
        part = compared.part((rows, slice(0, matrix.shape[1])))
        value = quantize_steps.dequantize(kernels.ops, part, fmt, Usage.ROWWISE, "float32")
        exact = matrix[rows].astype(np.float32)
        counted = np.isfinite(value) & np.isfinite(exact)
        value, exact = np.where(counted, value, 0), np.where(counted, exact, 0)
        signal += _energy(inputs @ exact.T)
        noise += _energy(inputs @ (value - exact).T)
    return noise / signal if 0 < signal < math.inf else math.nan


def _step(fmt: Format) -> int:
    """Rows of a whole number of blocks."""
    block = fmt.block[0] if fmt.block else 1
    return -(-ROWS // block) * block


def _energy(y: NDArray[np.float32]) -> float:
    return float(np.sum(np.square(y, dtype=np.float64)))
