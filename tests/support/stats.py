"""The oracle of `qshard.numerics.stats`: its formulas on whole arrays, over `qshard.reference`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qshard import reference
from qshard.formats import Format, Usage
from qshard.layout import PlaneLayout, matrix_shape, plane


@np.errstate(all="ignore")
def expected_stats(x: NDArray[Any], fmt: Format, usage: Usage, *, seed: int = 0) -> dict[str, Any]:
    """The fields of `Stats` of float32, bfloat16 or float16 `x`, but for those that say what was asked for."""
    quantized = reference.quantize(x, fmt, usage, seed=seed)
    stored = quantized.rowwise if usage is Usage.ROWWISE else quantized.columnwise
    given = reference.tensor_of_plane(x, fmt, usage).astype(np.float64)
    value = quantized.dequantize(np.float32, usage=usage).astype(np.float64)
    element = np.abs(quantized.elements(usage).astype(np.float64))
    scale, of_blocks = quantized.scales(usage).astype(np.float64), quantized.block_scales(usage)
    size, top = np.abs(given), fmt.element.max
    step = 2.0 ** (fmt.element.max_exponent - fmt.element.mantissa_bits)
    finite = np.isfinite(given) & np.isfinite(value)
    error, counted = np.abs(value - given), finite & (given != 0)
    relative, exponents = error[counted] / size[counted], exponent(size[counted])
    signal, noise = np.sum(given[finite] ** 2), np.sum(error[finite] ** 2)
    shown = exponent(of_blocks[np.isfinite(of_blocks) & (of_blocks > 0)])
    bits = sum(8 * part.nbytes for part in vars(stored).values() if part is not None)
    ratio = block_ratios(np.where(finite, given, 0), np.where(finite, error, 0), plane(fmt, x.shape, usage))
    return {
        "sqnr_db": decibels(signal, noise),
        "worst_block_db": decibels(1, np.nanmax(ratio)) if not np.isnan(ratio).all() else math.nan,
        "worst_block": None if np.isnan(ratio).all() else AnyOf(ratio),
        "max_relative_error": np.max(relative) if relative.size else math.nan,
        "mean_relative_error": np.mean(relative) if relative.size else math.nan,
        "zeros_made": share((given != 0) & (value == 0)),
        "saturated": share((element == top) & (scale > 0) & (size > (top + step / 2) * scale)),
        "subnormal": share((element > 0) & (element < 2.0 ** (1 - fmt.element.bias))),
        "counted": share(finite),
        "nonfinite_given": share(~np.isfinite(given)),
        "nonfinite_made": share(np.isfinite(given) & ~np.isfinite(value)),
        "bits_per_element": bits / x.size if x.size else 0.0,
        "scale_histogram": {int(e): int(np.sum(shown == e)) for e in np.unique(shown)},
        "error_by_exponent": {int(e): np.mean(relative[exponents == e]) for e in np.unique(exponents)},
    }


def block_ratios(given: NDArray[Any], error: NDArray[Any], where: PlaneLayout) -> NDArray[Any]:
    """Noise for signal of each block, as the grid of scales; NaN without a signal."""
    matrix = matrix_shape(where.shape)
    given, error = (part.reshape(matrix) for part in (given, error))
    if where.transposed:
        given, error = given.T, error.T
    block = where.block or given.shape
    grid = [-(-size // max(length, 1)) for size, length in zip(given.shape, block, strict=True)]
    if not given.size:
        return np.full(grid, np.nan)
    row, col = np.indices(given.shape)
    index = (row // block[0] * grid[1] + col // block[1]).reshape(-1)
    signal, noise = (np.bincount(index, np.square(part).reshape(-1)) for part in (given, error))
    return np.where(signal > 0, noise / signal, np.nan).reshape(grid)


class AnyOf:
    """Equal to the index of any of the largest, up to rounding."""

    def __init__(self, ratio: NDArray[Any]) -> None:
        self.ratio = ratio

    def __eq__(self, index: object) -> bool:
        return math.isclose(self.ratio[index], np.nanmax(self.ratio), rel_tol=1e-12)

    __hash__ = None

    def __repr__(self) -> str:
        return f"the index of {np.nanmax(self.ratio)} in a grid {self.ratio.shape}"


def decibels(signal: float, noise: float) -> float:
    if not signal:
        return math.nan
    return 10 * math.log10(signal / noise) if noise else math.inf


def exponent(x: NDArray[Any]) -> NDArray[Any]:
    """floor(log2(x)), exactly."""
    return np.frexp(x)[1] - 1


def share(mask: NDArray[Any]) -> float:
    return float(np.mean(mask)) if mask.size else 0.0


def assert_same_stats(given: Any, whole: Any) -> None:
    """Statistics of an array in pieces are those of the whole: counts and maxima exactly, sums to rounding."""
    for name, want in vars(whole).items():
        got = getattr(given, name)
        if name in ("sqnr_db", "mean_relative_error", "worst_block_db"):  # Sums in float64, in another order.
            assert math.isclose(got, want, rel_tol=1e-11, abs_tol=1e-11) or (math.isnan(got) and math.isnan(want)), (
                f"{name}: {got}, whole {want}"
            )
        elif name == "error_by_exponent":
            assert got.keys() == want.keys()
            assert all(math.isclose(got[e], want[e], rel_tol=1e-11) for e in want)
        elif name == "max_relative_error" and math.isnan(want):
            assert math.isnan(got)
        elif name != "worst_block":  # Of equals, rounding decides; the ratio is compared above.
            assert got == want, f"{name}: {got}, whole {want}"
    assert (given.worst_block is None) == (whole.worst_block is None)
