"""The oracle of `qshard.numerics.stats`: its formulas on whole arrays, over `qshard.reference`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qshard import reference
from qshard.formats import Format, Usage


@np.errstate(all="ignore")
def expected_stats(x: NDArray[Any], fmt: Format, usage: Usage, *, seed: int = 0) -> dict[str, Any]:
    """The fields of `Stats` of float32, bfloat16 or float16 `x`, but for those that say what was asked for."""
    quantized = reference.quantize(x, fmt, usage, seed=seed)
    stored = quantized.rowwise if usage is Usage.ROWWISE else quantized.columnwise
    given = reference.what_is_stored(x, fmt, usage).astype(np.float64)
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
    return {
        "sqnr_db": math.nan if not signal else 10 * math.log10(signal / noise) if noise else math.inf,
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


def exponent(x: NDArray[Any]) -> NDArray[Any]:
    """floor(log2(x)), exactly."""
    return np.frexp(x)[1] - 1


def share(mask: NDArray[Any]) -> float:
    return float(np.mean(mask)) if mask.size else 0.0
