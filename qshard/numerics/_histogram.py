"""How the elements of a tensor lie on the grid of a format."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from qshard._core.validation import FormatLike, as_format
from qshard.formats import Format, Usage
from qshard.numerics._arrays import whole_of
from qshard.numerics._display import Frame
from qshard.numerics._plots import histograms
from qshard.numerics._reductions import LEAST, Sums, exponent_counts, magnitudes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Histogram(Frame):
    """How the elements of a tensor lie on the grid of a format; what `histogram` returns.

    Attributes:
      format, usage: of the plane.
      given: `floor(log2 |x|)` -> number of finite elements other than 0.
      zeros_given, nonfinite_given: numbers of elements that are 0, or infinite or NaN.
      codes: magnitude of a code, as the number that it stands for before scales -> number of elements. NaN is left
        out, where the element format has it; else it has the code of the largest.
      error: mean relative error of the elements of that size, by exponent, as `Stats.error_by_exponent`.
    """

    format: Format
    usage: Usage
    given: Mapping[int, int]
    zeros_given: int
    nonfinite_given: int
    codes: Mapping[float, int]
    error: Mapping[int, float]

    def records(self) -> list[dict[str, Any]]:
        """A row for each exponent."""
        return [
            {"exponent": e, "elements": count, "mean_relative_error": self.error.get(e, math.nan)}
            for e, count in self.given.items()
        ]

    def plot(self) -> Figure:
        """Elements by exponent, and by code.

        Raises:
          ImportError: matplotlib is not installed.
        """
        codes = {f"{value:g}": count for value, count in self.codes.items()}
        given = {str(e): count for e, count in self.given.items()}
        return histograms({"elements by floor(log2 |x|)": given, f"elements by code of {self.format}": codes})


@np.errstate(all="ignore")
def histogram(x: Any, fmt: FormatLike, usage: Usage = Usage.ROWWISE, *, seed: int = 0) -> Histogram:
    """How many elements of `x` have each exponent, and how many are stored as each code of a format.

    Args:
      x, usage, seed: as for `stats`.
      fmt: the format, or its name.

    Returns:
      Counts, exact: `sum(given.values()) + zeros_given + nonfinite_given` is the number of elements. A rotated plane is
      that of the rotated tensor, in all of it.

    Raises:
      TypeError, ValueError: as for `stats`.

    Sharded arrays: as for `stats`; counts are of the whole array, and every process has them.

    >>> found = histogram([1.0, -1.0, 0.5, 0.0], "FP8_E4M3")
    >>> found.given, found.zeros_given, found.codes
    ({-1: 1, 0: 2}, 1, {0.0: 1, 224.0: 1, 448.0: 2})
    """
    from qshard.numerics._pieces import compare_shards  # The package can be imported without the extension.

    fmt, whole = as_format(fmt, "histogram"), whole_of(x, "histogram")
    codes, total = np.zeros(256, np.int64), Sums()
    given: dict[int, int] = {}
    zeros = 0
    for piece in compare_shards(whole, fmt, usage, seed, "histogram"):
        total += piece.sums(lambda elements: None)
        own = magnitudes(piece.parts.data, fmt)
        rows, columns = piece.own or (slice(None), slice(None))
        codes += np.bincount(own[rows, columns].reshape(-1), minlength=codes.size)
        size = np.abs(piece.x.astype(np.float32))
        zeros += int(np.count_nonzero(size == 0)) - (own.size - own[rows, columns].size)
        for e, count in exponent_counts(size).items():
            given[e] = given.get(e, 0) + count
    merged, found, all_zeros, all_codes = Sums(), dict[int, int](), 0, np.zeros_like(codes)
    for part, part_given, part_zeros, part_codes in whole.gathered((total, given, zeros, codes)):
        merged += part
        all_zeros += part_zeros
        all_codes += part_codes
        for e, count in part_given.items():
            found[e] = found.get(e, 0) + count
    errors = {i + LEAST: float(merged.errors[i] / merged.counts[i]) for i in np.flatnonzero(merged.counts).tolist()}
    element = fmt.element
    return Histogram(
        format=fmt,
        usage=usage,
        given=dict(sorted(found.items())),
        zeros_given=all_zeros,
        nonfinite_given=merged.nonfinite_given,
        codes={_value(element, code): int(all_codes[code]) for code in range(element.max_code + 1) if all_codes[code]},
        error=errors,
    )


def _value(element: Any, code: int) -> float:
    """The number of a code without sign."""
    field, mantissa = divmod(code, 2**element.mantissa_bits)
    if not field:
        return math.ldexp(mantissa, 1 - element.bias - element.mantissa_bits)
    return math.ldexp(2**element.mantissa_bits + mantissa, field - element.bias - element.mantissa_bits)
