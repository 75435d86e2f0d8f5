"""Histograms of a tensor's exponents and of the codes that a format stores for it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from qshard._core.validation import FormatLike, as_format
from qshard.formats import Format, Usage
from qshard.numerics._arrays import as_sharded
from qshard.numerics._display import Frame
from qshard.numerics._plots import histograms
from qshard.numerics._reductions import Sums, exponent_counts, magnitudes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Histogram(Frame):
    """Histogram of a tensor's exponents and codes; the result of `histogram`.

    Attributes:
      given: `floor(log2 |x|)` -> number of finite nonzero elements.
      zeros_given: number of elements that are 0.
      nonfinite_given: number of elements that are infinite or NaN.
      codes: magnitude of a code, as a number before scaling -> number of elements. NaN codes are not counted. Formats
        without NaN store NaN as their largest code, which is counted.
      error: `floor(log2 |x|)` -> mean relative error, as in `Stats.error_by_exponent`.
    """

    format: Format
    usage: Usage
    given: Mapping[int, int]
    zeros_given: int
    nonfinite_given: int
    codes: Mapping[float, int]
    error: Mapping[int, float]

    def records(self) -> list[dict[str, Any]]:
        """Return one row per exponent."""
        return [
            {"exponent": e, "elements": count, "mean_relative_error": self.error.get(e, math.nan)}
            for e, count in self.given.items()
        ]

    def plot(self) -> Figure:
        """Plot the number of elements by exponent, and by code.

        Raises:
          ImportError: matplotlib is not installed.
        """
        codes = {f"{value:g}": count for value, count in self.codes.items()}
        given = {str(e): count for e, count in self.given.items()}
        return histograms({"elements by floor(log2 |x|)": given, f"elements by code of {self.format}": codes})


@np.errstate(all="ignore")
def histogram(x: Any, fmt: FormatLike, usage: Usage = Usage.ROWWISE, *, seed: int = 0) -> Histogram:
    """Count the elements of `x` by exponent, and by the code that a format stores for them.

    Args:
      x: as in `stats`.
      fmt: the format, or its name.
      usage: `ROWWISE` or `COLUMNWISE`.
      seed: seed of stochastic rounding, 64 bits.

    Returns:
      The histogram. Counts are exact, and `sum(given.values()) + zeros_given + nonfinite_given` is the number of
      elements. For a rotated plane, all counts refer to the rotated tensor.

    Errors and sharded arrays as in `stats`. Every process gets the counts of the whole array.

    >>> found = histogram([1.0, -1.0, 0.5, 0.0], "FP8_E4M3")
    >>> found.given, found.zeros_given, found.codes
    ({-1: 1, 0: 2}, 1, {0.0: 1, 224.0: 1, 448.0: 2})
    """
    from qshard.numerics._rectangles import compare_shards  # late: it needs the extension

    fmt, whole = as_format(fmt, "histogram"), as_sharded(x, "histogram")
    codes, total = np.zeros(256, np.int64), Sums()
    given, zeros = Counter[int](), 0
    for rectangle in compare_shards(whole, fmt, usage, seed, "histogram"):
        total += rectangle.sums(lambda elements: None)
        own = magnitudes(rectangle.parts.data, fmt)
        rows, columns = rectangle.own or (slice(None), slice(None))
        codes += np.bincount(own[rows, columns].reshape(-1), minlength=codes.size)
        size = np.abs(rectangle.x.astype(np.float32))
        zeros += int(np.count_nonzero(size == 0)) - (own.size - own[rows, columns].size)
        given.update(exponent_counts(size))
    merged, found, all_zeros, all_codes = Sums(), Counter[int](), 0, np.zeros_like(codes)
    for part, part_given, part_zeros, part_codes in whole.gathered((total, given, zeros, codes)):
        merged += part
        all_zeros += part_zeros
        all_codes += part_codes
        found.update(part_given)
    element = fmt.element
    return Histogram(
        format=fmt,
        usage=usage,
        given=dict(sorted(found.items())),
        zeros_given=all_zeros,
        nonfinite_given=merged.nonfinite_given,
        codes={_value(element, code): int(all_codes[code]) for code in range(element.max_code + 1) if all_codes[code]},
        error=merged.error_by_exponent,
    )


def _value(element: Any, code: int) -> float:
    field, mantissa = divmod(code, 2**element.mantissa_bits)
    if not field:
        return math.ldexp(mantissa, 1 - element.bias - element.mantissa_bits)
    return math.ldexp(2**element.mantissa_bits + mantissa, field - element.bias - element.mantissa_bits)
