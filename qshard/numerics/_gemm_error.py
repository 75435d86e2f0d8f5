"""Errors of products: of two quantized matrices, and of a quantized weight with recorded activations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qshard._core import quantize_steps
from qshard._core.validation import FormatLike, as_format
from qshard.formats import Format, Usage
from qshard.layout import matrix_shape, plane
from qshard.numerics._arrays import ShardedArray, as_sharded
from qshard.numerics._display import Frame
from qshard.numerics._plots import bar_chart
from qshard.numerics._reductions import Comparison, as_float
from qshard.numerics._statistics import decibels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROWS = 1024  # rows of a weight that are processed at a time, rounded up to whole blocks


@dataclass(frozen=True, kw_only=True)
class GemmError(Frame):
    """Errors of `a @ b.T` with quantized operands; the result of `gemm_error`.

    Attributes:
      format_a: format of `a`; None if `a` is not quantized.
      format_b: format of `b`; None if `b` is not quantized.
      sqnr_db: `10 * log10(sum(y**2) / sum((z - y)**2))` for the exact `y = a @ b.T` and the product `z` of quantized
        operands, both in float64.
      of_a_db: `sqnr_db` if only `a` is quantized; infinity if `format_a` is None.
      of_b_db: `sqnr_db` if only `b` is quantized; infinity if `format_b` is None.
      max_error: largest `|z - y|`, divided by the root mean square of `y`.
      mean_error: mean of `z - y`, divided by the root mean square of `y`. It measures bias; with stochastic rounding
        its expectation is 0.
      predicted_db: SQNR predicted for independent errors: the noise of `a` alone plus the noise of `b` alone.
    """

    format_a: Format | None
    format_b: Format | None
    sqnr_db: float
    of_a_db: float
    of_b_db: float
    max_error: float
    mean_error: float
    predicted_db: float

    def records(self) -> list[dict[str, Any]]:
        """Return one row."""
        named = {"format_a": str(self.format_a), "format_b": str(self.format_b)}
        return [{**vars(self), **named}]

    def plot(self) -> Figure:
        """Plot the SQNR with both operands quantized, with each alone, and as predicted.

        Raises:
          ImportError: matplotlib is not installed.
        """
        names = ["both", f"a alone: {self.format_a}", f"b alone: {self.format_b}", "predicted"]
        return bar_chart(names, {"SQNR in dB": [self.sqnr_db, self.of_a_db, self.of_b_db, self.predicted_db]})


@np.errstate(all="ignore")
def gemm_error(
    a: Any, b: Any, fmt_a: FormatLike | None, fmt_b: FormatLike | None = None, *, seed: int = 0
) -> GemmError:
    """Measure the error of `a @ b.T` with quantized operands against the exact product in float64.

    Args:
      a: `[*lead, K]`, real numbers; leading axes are folded into rows.
      b: `[*lead, K]`, real numbers; leading axes are folded into rows.
      fmt_a: format of the rowwise plane of `a`, or its name; None: not quantized. Blocks run along K.
      fmt_b: format of the rowwise plane of `b`, or its name; None: not quantized.
      seed: seed of stochastic rounding. `b` uses `seed + 1`.

    Returns:
      The errors that quantization causes. Both products are accumulated in float64, so errors of a device's GEMM are
      not included.

    Raises:
      TypeError: an operand does not have real numbers.
      ValueError: the operands differ in K, a format does not support the shape of an operand, or an operand is sharded.

    Non-finite elements, original or quantized, count as 0 in both products. Sharded arrays are not supported: pass a
    local shard, or a few rows.

    >>> found = gemm_error(np.eye(2), [[448.0, 17.0]], None, "FP8_E4M3")  # 17 is rounded to 16
    >>> round(found.of_b_db, 2), found.of_a_db
    (53.03, inf)

    Sources: NUMERICS.md, on the prediction and on the additional error of products on devices.
    """
    fmt_a, fmt_b = (None if fmt is None else as_format(fmt, "gemm_error") for fmt in (fmt_a, fmt_b))
    wholes = [_one_rectangle(x, name) for x, name in ((a, "a"), (b, "b"))]
    if wholes[0].shape[-1:] != wholes[1].shape[-1:]:
        raise ValueError(
            f"gemm_error: a {wholes[0].shape} and b {wholes[1].shape} have different last axes (K); pass b as [N, K]"
        )
    pairs = []
    for whole, fmt, name, own in zip(wholes, (fmt_a, fmt_b), "ab", (seed, seed + 1), strict=True):
        given = whole.rectangles[0][0].astype(np.float64)
        value = given if fmt is None else stored_values(whole, fmt, own, name)
        counted = np.isfinite(given) & np.isfinite(value)
        pairs.append((np.where(counted, given, 0), np.where(counted, value, 0)))
    (exact_a, stored_a), (exact_b, stored_b) = pairs
    y = exact_a @ exact_b.T
    signal = float(np.sum(y * y))
    error = stored_a @ stored_b.T - y
    noises = [
        float(np.sum(np.square(part)))
        for part in (error, (stored_a - exact_a) @ exact_b.T, exact_a @ (stored_b - exact_b).T)
    ]
    rms = math.sqrt(signal / y.size) if y.size else 0.0
    return GemmError(
        format_a=fmt_a,
        format_b=fmt_b,
        sqnr_db=decibels(signal, noises[0]),
        of_a_db=decibels(signal, noises[1]),
        of_b_db=decibels(signal, noises[2]),
        max_error=float(np.abs(error).max()) / rms if rms else math.nan,
        mean_error=float(error.mean()) / rms if rms else math.nan,
        predicted_db=decibels(signal, noises[1] + noises[2]),
    )


def _one_rectangle(x: Any, name: str) -> ShardedArray:
    whole = as_sharded(x, "gemm_error")
    if not whole.is_one:
        raise ValueError(f"gemm_error: {name} {whole.shape} is sharded; pass a part of it as a plain array")
    return whole


def stored_values(whole: ShardedArray, fmt: Format, seed: int, name: str) -> NDArray[np.float64]:
    """Quantize the rowwise plane of a matrix, and return its values."""
    from qshard.numerics import _kernels as kernels

    matrix = np.ascontiguousarray(whole.rectangles[0][0])
    plane(fmt, matrix_shape(whole.shape), Usage.ROWWISE, op="gemm_error", name=name)
    philox = kernels.philox("gemm_error", seed) if fmt.stochastic else None
    parts = quantize_steps.quantize(kernels.ops, matrix, fmt, Usage.ROWWISE, philox=philox)[Usage.ROWWISE]
    value: NDArray[np.float32] = quantize_steps.dequantize(kernels.ops, parts, fmt, Usage.ROWWISE, "float32")
    return value.astype(np.float64)


@np.errstate(all="ignore")
def output_noise(x: Any, w: Any, fmt: FormatLike, *, seed: int = 0) -> float:
    """Compute the noise-to-signal ratio of `y = x @ w.T` if only `w` is quantized; NaN without a finite signal.

        sum((x @ (value - w).T)**2) / sum((x @ w.T)**2)

    Products are computed in float32. Non-finite elements of `w`, original or quantized, count as 0 in both sums. Pass
    arrays that this process has in full.

    Raises:
      TypeError: `x` or `w` does not have real numbers.
      ValueError: `x` and `w` differ in K, or `fmt` does not support the shape of `w`.

    >>> output_noise(np.ones((1, 2)), [[448.0, 17.0]], "FP8_E4M3") == (1 / 465) ** 2  # 17 is rounded to 16
    True
    """
    from qshard.numerics import _kernels as kernels

    fmt = as_format(fmt, "output_noise")
    given, weight = as_float(x, "output_noise").array, as_float(w, "output_noise").array
    if given.shape[-1:] != weight.shape[-1:]:
        raise ValueError(
            f"output_noise: x {given.shape} and w {weight.shape} have different last axes (K); pass the input of w"
        )
    plane(fmt, weight.shape, Usage.ROWWISE, op="output_noise", name="w")
    matrix = np.ascontiguousarray(weight).reshape(matrix_shape(weight.shape))
    inputs = given.reshape(matrix_shape(given.shape)).astype(np.float32)
    philox = kernels.philox("output_noise", seed) if fmt.stochastic else None
    parts = quantize_steps.quantize(kernels.ops, matrix, fmt, Usage.ROWWISE, philox=philox)[Usage.ROWWISE]
    where = plane(fmt, matrix.shape, Usage.ROWWISE)
    compared = Comparison(kernels.ops, matrix, parts, fmt, where, kernels.block_scales(parts, fmt))
    block = fmt.block_shape()[0]
    step = -(-ROWS // block) * block
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


def _energy(y: NDArray[np.float32]) -> float:
    return float(np.sum(np.square(y, dtype=np.float64)))
