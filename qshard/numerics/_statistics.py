"""Statistics of quantization error: of one format, of several formats, and the share of outliers."""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qshard._core.validation import FormatLike, as_format, as_formats
from qshard.formats import FORMATS, Format, Usage
from qshard.layout import Shape, plane, source
from qshard.numerics._arrays import ShardedArray, as_sharded, check_shards
from qshard.numerics._display import progress_of
from qshard.numerics._reductions import SIZE, Floats, Sums, as_float, exponent_counts


class Note(enum.StrEnum):
    """A caveat of a row of statistics; `str` of a note is the text."""

    EMPTY = "no error is measured: x has no elements"
    ZEROS = "no error is measured: all elements that count are 0"
    NOTHING_COUNTS = "no error is measured: no element is finite both in x and as stored"
    NONFINITE_GIVEN = "SQNR and errors exclude elements that are infinite or NaN in x"
    NONFINITE_MADE = "SQNR and errors exclude finite elements that became infinite or NaN"
    BEYOND_FLOAT32 = "some of x is outside the range of float32, and became 0 or infinite first"
    ROTATED = "compared with the rotated tensor, not with x"
    SCALES = "some scales are 0, infinite or NaN, and have no exponent in the histogram"


@dataclass(frozen=True, kw_only=True, repr=False)
class Stats:
    """Statistics of the quantization of `x` to one plane; `value` stands for the dequantized elements.

    SQNR and relative errors are over elements with finite `x` and `value`; shares refer to all elements. If no such
    element is nonzero, SQNR and errors are NaN. Check `notes` before comparing rows.

    Attributes:
      shape: shape of `x`. A rotated plane is compared with the rotated tensor.
      sqnr_db: signal to quantization noise ratio, `10 * log10(sum(x**2) / sum((value - x)**2))`; infinity without
        noise.
      max_relative_error: largest `|value - x| / |x|` over `x != 0`. An element that becomes 0 counts as 1.
      mean_relative_error: mean of `|value - x| / |x|` over `x != 0`.
      zeros_made: share with `x != 0` and `value == 0`.
      saturated: share that is too large for its scale: `|x| > (max + step / 2) * scale`, where `step` is the distance
        from `max` to the next smaller element. These elements, infinities included, are stored as the largest element
        with an error that rounding does not explain.
      subnormal: share stored as a subnormal of the element format, with fewer significant bits.
      counted: share with finite `x` and `value`. `counted + nonfinite_given + nonfinite_made = 1`.
      nonfinite_given: share with infinite or NaN `x`.
      nonfinite_made: share with finite `x` and non-finite `value`, for example because a NaN shares the block.
      worst_block_db: lowest `sqnr_db` of a block; for one scale per tensor, `sqnr_db` of the tensor.
      worst_block: row and column of this block in `scale_inv` as a matrix; None if no block has a signal.
      beyond_float32: share that is finite and nonzero in the input, but infinite or 0 in float32.
      bits_per_element: bits of data and all scales, divided by the number of elements.
      scale_histogram: `floor(log2(scale))` -> number of blocks. `scale` is the full decode scale of a block. Scales
        that are 0, infinite or NaN are left out.
      error_by_exponent: `floor(log2(|x|))` -> mean relative error of the elements with this exponent.
    """

    format: Format
    usage: Usage
    shape: Shape
    sqnr_db: float
    max_relative_error: float
    mean_relative_error: float
    zeros_made: float
    saturated: float
    subnormal: float
    counted: float
    nonfinite_given: float
    nonfinite_made: float
    worst_block_db: float
    worst_block: tuple[int, int] | None
    beyond_float32: float
    bits_per_element: float
    scale_histogram: Mapping[int, int]
    error_by_exponent: Mapping[int, float]

    def __repr__(self) -> str:
        """Return the main statistics in one line. Shares of 0 are left out; `notes` is their number."""
        numbers = {"sqnr_db": self.sqnr_db, "mean_relative_error": self.mean_relative_error}
        numbers |= {name: share for name in ("zeros_made", "saturated") if (share := getattr(self, name))}
        shown: dict[str, Any] = {"format": self.format} | ({} if self.usage is Usage.ROWWISE else {"usage": self.usage})
        shown |= {"shape": self.shape} | {name: f"{value:.4g}" for name, value in numbers.items()}
        shown |= {"notes": len(self.notes)} if self.notes else {}
        return f"Stats({', '.join(f'{name}={value}' for name, value in shown.items())})"

    @property
    def notes(self) -> tuple[Note, ...]:
        """Caveats to know before comparing this row with another.

        >>> from qshard.formats import FP8_E4M3
        >>> for note in stats([math.inf, 1.0], FP8_E4M3).notes:
        ...     print(note)
        SQNR and errors exclude elements that are infinite or NaN in x
        """
        where = plane(self.format, self.shape, self.usage)
        nothing = math.isnan(self.sqnr_db)
        found = {
            Note.EMPTY: nothing and 0 in self.shape,
            Note.ZEROS: nothing and self.counted > 0,
            Note.NOTHING_COUNTS: nothing and not self.counted and 0 not in self.shape,
            Note.NONFINITE_GIVEN: self.counted > 0 and self.nonfinite_given > 0,
            Note.NONFINITE_MADE: self.counted > 0 and self.nonfinite_made > 0,
            Note.BEYOND_FLOAT32: self.beyond_float32 > 0,
            Note.ROTATED: where.rotated,
            Note.SCALES: sum(self.scale_histogram.values()) < math.prod(where.scale_shape),
        }
        return tuple(note for note, applies in found.items() if applies)


def stats(x: Any, fmt: FormatLike, usage: Usage = Usage.ROWWISE, *, seed: int = 0) -> Stats:
    """Quantize `x` and measure the error. `Stats` has the formulas.

    Args:
      x: `[*lead, K]`: an array of NumPy, of JAX or PyTorch on any device, any object with DLPack, or nested lists.
        Dtypes other than bfloat16 and float16 are rounded to float32 first, and compared with the rounded values.
      fmt: the format, or its name.
      usage: `ROWWISE` or `COLUMNWISE`.
      seed: seed of stochastic rounding, 64 bits.

    Returns:
      The statistics. They do not depend on the number of threads (`qshard.num_threads()`). Peak memory, beyond
      `x`, is about 2.5 times the size of `x`.

    Raises:
      TypeError: `x` does not have real numbers.
      ValueError: `fmt` does not support the shape of `x`; `usage` is not one plane; or a shard boundary splits a block
        of a format that does not allow it.

    Sharded JAX arrays and torch DTensors, such as FSDP2 parameters: each process measures its local shards on the host,
    and amaxes, sums and counts are reduced. No elements are communicated. Every process with a shard must call `stats`
    with the same arguments, and each gets the result. Counts, scales and maxima are exact for the whole array; sums are
    added in a different order, in float64. Shard boundaries may split blocks, except with four over six and in rotated
    planes: their block scales depend on more than amaxes.

    >>> from qshard.formats import FP8_E4M3
    >>> s = stats([448.0, 1.0, 17.0, 0.0009], FP8_E4M3)  # the scale is 1: 17 is rounded to 16, and 0.0009 to 0
    >>> s
    Stats(format=FP8_E4M3, shape=(4,), sqnr_db=53.03, mean_relative_error=0.2647, zeros_made=0.25)
    >>> s.zeros_made, s.max_relative_error, round(s.sqnr_db, 2), s.scale_histogram
    (0.25, 1.0, 53.03, {0: 1})

    Sources: see `qshard.formats` for each format.
    """
    return measure(as_sharded(x, "stats"), [as_format(fmt, "stats")], usage, seed, False, "stats")[0]


def compare(
    x: Any,
    formats: Iterable[FormatLike] | FormatLike | None = None,
    usage: Usage = Usage.ROWWISE,
    *,
    seed: int = 0,
    progress: bool | None = None,
) -> list[Stats]:
    """Measure several formats, as `stats` does for one.

    Args:
      x: as in `stats`.
      formats: formats or their names; by default every format of `qshard.formats.FORMATS` that supports the shape of
        `x`.
      usage: `ROWWISE` or `COLUMNWISE`.
      seed: seed of stochastic rounding, 64 bits.
      progress: whether to show progress. By default it is shown for work of more than a second, if rich is installed,
        in a terminal or in Jupyter with ipywidgets.

    Returns:
      Statistics in the order of `formats`.

    Errors and sharded arrays as in `stats`.

    >>> [f"{s.format}: {s.bits_per_element}" for s in compare(np.ones((16, 48)), ["FP8_E4M3", "NVFP4"])]
    ['FP8_E4M3: 8.041666666666666', 'NVFP4: 4.541666666666667']
    """
    whole = as_sharded(x, "compare")
    chosen = fitting(whole, usage, "compare")[0] if formats is None else as_formats(formats, "compare")
    return measure(whole, chosen, usage, seed, progress, "compare")


def measure(
    x: ShardedArray, formats: list[Format], usage: Usage, seed: int, progress: bool | None, op: str
) -> list[Stats]:
    """Implement `compare` for a `ShardedArray`."""
    for fmt in formats:  # check all formats before measuring any
        check_shards(plane(fmt, x.shape, usage, op=op), x, op)
    with progress_of(progress, [str(fmt) for fmt in formats], x.size, op) as advance:
        return [stats_of(x, fmt, usage, seed, op, advance) for fmt in formats]


@np.errstate(all="ignore")
def stats_of(
    x: Floats | ShardedArray, fmt: Format, usage: Usage, seed: int, op: str, advance: Callable[[int], None]
) -> Stats:
    """Implement `stats`, and call `advance` with the number of newly processed local elements."""
    from qshard.numerics._rectangles import compare_shards  # late: it needs the extension

    whole = as_sharded(x, op)
    own, own_scales = Sums(), Counter[int]()
    for rectangle in compare_shards(whole, fmt, usage, seed, op):
        own += rectangle.sums(advance)
        own_scales.update(exponent_counts(rectangle.starting_scales))
    total, scales, beyond = Sums(), Counter[int](), 0
    for part, part_scales, part_beyond in whole.gathered((own, own_scales, whole.beyond)):
        total += part
        scales.update(part_scales)
        beyond += part_beyond
    number, worst, size = int(total.counts.sum()), total.worst_block, math.prod(whole.shape)
    where, stored = plane(fmt, whole.shape, usage), source(fmt, usage)

    def share(count: int) -> float:
        return count / size if size else 0.0

    return Stats(
        format=fmt,
        usage=usage,
        shape=whole.shape,
        sqnr_db=decibels(total.signal, total.noise),
        max_relative_error=total.largest if number else math.nan,
        mean_relative_error=float(total.errors.sum()) / number if number else math.nan,
        zeros_made=share(total.zeros_made),
        saturated=share(total.saturated),
        subnormal=share(total.subnormal),
        counted=share(size - total.nonfinite_given - total.nonfinite_made),
        nonfinite_given=share(total.nonfinite_given),
        nonfinite_made=share(total.nonfinite_made),
        worst_block_db=decibels(1.0, worst.ratio) if worst else math.nan,
        worst_block=(worst.block if stored is usage else worst.block[::-1]) if worst else None,
        beyond_float32=share(beyond),
        bits_per_element=share(8 * where.nbytes),
        scale_histogram=dict(sorted(scales.items())),
        error_by_exponent=total.error_by_exponent,
    )


def decibels(signal: float, noise: float) -> float:
    """Return `10 * log10(signal / noise)`: NaN without a signal, infinity without noise."""
    if not signal:
        return math.nan
    return 10 * math.log10(signal / noise) if noise else math.inf


def fitting(x: ShardedArray, usage: Usage, op: str) -> tuple[list[Format], dict[str, str]]:
    """Return the formats that support a plane of `x`, and the reason for each format that does not, by name."""
    plane(FORMATS["FP8_E4M3"], x.shape, usage, op=op)  # supports every shape, so it raises only for a bad usage
    left_out = {}
    for name, fmt in FORMATS.items():
        try:
            check_shards(plane(fmt, x.shape, usage, op=name), x, name)
        except ValueError as error:
            left_out[name] = str(error)
    return [fmt for name, fmt in FORMATS.items() if name not in left_out], left_out


FAR = 6.0  # Limit for outliers, in root mean squares. In a Gaussian, 2 of 10**9 elements are beyond it.


def outlier_share(x: Any) -> float:
    """Compute the share of elements with `|x| > 6 * sqrt(mean(x**2))`. The mean is over finite elements.

    The share is of all elements; 0 for an empty array. Pass an array that this process has in full, as in `stats`.

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
    """Yield the finite elements in cache-sized runs."""
    for first in range(0, flat.size, SIZE):
        part = flat[first : first + SIZE].astype(np.float64)
        finite = np.isfinite(part)
        yield part if finite.all() else part[finite]
