"""Statistics of the error that a format makes: of one format, of several, and of the share of outliers."""

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
from qshard.numerics._arrays import Whole, check_shards, whole_of
from qshard.numerics._display import progress_of
from qshard.numerics._reductions import LEAST, SIZE, Floats, Sums, as_float, exponent_counts


class Note(enum.StrEnum):
    """Why a row of statistics may not be what it seems."""

    EMPTY = "no error is measured: x has no elements"
    ZEROS = "no error is measured: all elements that count are 0"
    NOTHING_COUNTS = "no error is measured: no element is finite both in x and as stored"
    NONFINITE_GIVEN = "SQNR and errors exclude elements that are infinite or NaN in x"
    NONFINITE_MADE = "SQNR and errors exclude finite elements that became infinite or NaN"
    BEYOND_FLOAT32 = "some of x is outside the range of float32, and became 0 or infinite before it was measured"
    ROTATED = "compared with the rotated tensor, not with x"
    SCALES = "some scales are 0, infinite or NaN, and have no exponent in the histogram"


@dataclass(frozen=True, kw_only=True)
class Stats:
    """What one plane of one format does to `x`, with `value` for what is stored.

    SQNR and relative errors are over the elements that count, whose `x` and `value` are finite; shares are of all
    elements. Where no element that counts is other than 0, there is no error to measure: SQNR and errors are NaN.
    `notes` says what else is to be known before a row is compared with another.

    Attributes:
      format, usage, shape: what was measured. A rotated plane is compared with the rotated tensor.
      sqnr_db: signal to quantization noise, `10 * log10(sum(x**2) / sum((value - x)**2))`; infinity without noise.
      max_relative_error: the largest `|value - x| / |x|` over `x != 0`. A zero that was made counts as 1.
      mean_relative_error: the mean of the same.
      zeros_made: share with `x != 0` and `value == 0`.
      saturated: share that is too large for its scale, beyond what rounding explains: it is stored as the largest
        element although `|x| > (max + step / 2) * scale`, where `step` is the distance to the element before `max`.
        Infinities that are stored so are among them.
      subnormal: share whose code is a subnormal of the element format, which has fewer significant bits.
      counted: share with `x` and `value` finite. `counted + nonfinite_given + nonfinite_made = 1`.
      nonfinite_given: share with `x` infinite or NaN.
      nonfinite_made: share with `x` finite and `value` not, for example because a NaN shares its block.
      worst_block_db: `sqnr_db` of the block that shares a scale and has the least; of the whole, where all shares one.
      worst_block: its row and column in `scale_inv` as a matrix; None where no block has a signal.
      beyond_float32: share that is finite and not 0 in what was given, but infinite or 0 in float32.
      bits_per_element: of data and all scales.
      scale_histogram: `floor(log2(scale))` -> number of blocks; `scale` is all that the elements of the block are
        multiplied by. A scale of 0, infinity or NaN has no exponent and is left out.
      error_by_exponent: `floor(log2(|x|))` -> mean relative error of the elements of that size.
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

    @property
    def notes(self) -> tuple[Note, ...]:
        """What a reader must know before this row is compared with another: in words, `str` of each.

        >>> from qshard.formats import FP8_E4M3
        >>> for note in stats([math.inf, 1.0], FP8_E4M3).notes:
        ...     print(note)
        SQNR and errors do not count elements that are infinite or NaN in x
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
    """Quantize `x` and measure what it costs. `Stats` has the formulas.

    Args:
      x: `[*lead, K]`, an array of NumPy, JAX or PyTorch on any device, whatever has DLPack, or nested lists. All but
        bfloat16 and float16 is rounded to float32 first, and is compared as such.
      fmt: the format, or its name.
      usage: `ROWWISE` or `COLUMNWISE`.
      seed: of stochastic rounding, 64 bits.

    Returns:
      The statistics: the same for any number of threads, of which there are `qshard.num_threads()`. Beside `x` they
      take at most about 2.5 times its memory.

    Raises:
      TypeError: `x` does not hold real numbers.
      ValueError: `fmt` has no such plane of `x`, or `usage` is not one plane; or `x` is cut as said below.

    Sharded arrays of JAX, and torch's DTensor, as of FSDP2: each process measures what it holds, on the host, and
    amaxes, sums and counts are reduced; no element travels to another process. Every process that has a part calls it,
    with the same arguments, and has the result. Counts, scales and maxima are those of the whole array, and sums are
    added in another order, in float64. Cuts may be anywhere, but not within blocks of formats whose scale depends on
    more than amaxes: four over six, and a rotated plane.

    >>> from qshard.formats import FP8_E4M3
    >>> s = stats([448.0, 1.0, 17.0, 0.0009], FP8_E4M3)  # the scale is 1: 17 becomes 16, and 0.0009 becomes 0
    >>> s.zeros_made, s.max_relative_error, round(s.sqnr_db, 2), s.scale_histogram
    (0.25, 1.0, 53.03, {0: 1})

    Sources: those of each format are in `qshard.formats`.
    """
    return measure(whole_of(x, "stats"), [as_format(fmt, "stats")], usage, seed, False, "stats")[0]


def compare(
    x: Any,
    formats: Iterable[FormatLike] | FormatLike | None = None,
    usage: Usage = Usage.ROWWISE,
    *,
    seed: int = 0,
    progress: bool | None = None,
) -> list[Stats]:
    """`stats` of several formats.

    Args:
      x, usage, seed: as for `stats`.
      formats: in this order, each itself or its name; by default, every format of `qshard.formats.FORMATS` that can
        hold `x`.
      progress: whether to show how far it is. By default, if it takes seconds and someone is there to see it: on a
        terminal, and in Jupyter with ipywidgets, if rich is installed.

    Raises:
      TypeError, ValueError: as for `stats`, for formats that were asked for.

    Sharded arrays: as for `stats`.

    >>> [f"{s.format}: {s.bits_per_element}" for s in compare(np.ones((16, 48)), ["FP8_E4M3", "NVFP4"])]
    ['FP8_E4M3: 8.041666666666666', 'NVFP4: 4.541666666666667']
    """
    whole = whole_of(x, "compare")
    chosen = fitting(whole, usage, "compare")[0] if formats is None else as_formats(formats, "compare")
    return measure(whole, chosen, usage, seed, progress, "compare")


def measure(x: Whole, formats: list[Format], usage: Usage, seed: int, progress: bool | None, op: str) -> list[Stats]:
    """`compare` of a `Whole`."""
    for fmt in formats:  # Before any is measured.
        check_shards(plane(fmt, x.shape, usage, op=op), x, op)
    with progress_of(progress, [str(fmt) for fmt in formats], x.size, op) as advance:
        return [stats_of(x, fmt, usage, seed, op, advance) for fmt in formats]


@np.errstate(all="ignore")
def stats_of(x: Floats | Whole, fmt: Format, usage: Usage, seed: int, op: str, advance: Callable[[int], None]) -> Stats:
    """`stats`, which tells `advance` how many elements of this process are done."""
    from qshard.numerics._pieces import compare_shards  # The package can be imported without the extension.

    whole = whole_of(x, op)
    own, own_scales = Sums(), Counter[int]()
    for piece in compare_shards(whole, fmt, usage, seed, op):
        own += piece.sums(advance)
        own_scales.update(exponent_counts(piece.begun))
    total, scales, beyond = Sums(), Counter[int](), 0
    for part, part_scales, part_beyond in whole.gathered((own, own_scales, whole.beyond)):
        total += part
        scales.update(part_scales)
        beyond += part_beyond
    errors, counts = {}, total.counts
    for i in np.flatnonzero(counts).tolist():
        errors[i + LEAST] = float(total.errors[i] / counts[i])
    number, worst, size = int(counts.sum()), total.worst_block, math.prod(whole.shape)
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
        error_by_exponent=errors,
    )


def decibels(signal: float, noise: float) -> float:
    """SQNR: NaN without a signal, infinity without noise."""
    if not signal:
        return math.nan
    return 10 * math.log10(signal / noise) if noise else math.inf


def fitting(x: Whole, usage: Usage, op: str) -> tuple[list[Format], dict[str, str]]:
    """The formats that can hold this plane, and by name why the others cannot."""
    plane(FORMATS["FP8_E4M3"], x.shape, usage, op=op)  # It holds any shape, so this raises if `usage` is not one plane.
    left_out = {}
    for name, fmt in FORMATS.items():
        try:
            check_shards(plane(fmt, x.shape, usage, op=name), x, name)
        except ValueError as error:
            left_out[name] = str(error)
    return [fmt for name, fmt in FORMATS.items() if name not in left_out], left_out


FAR = 6.0
"""Times the root mean square. Of a Gaussian, 2 elements of 10**9 lie beyond."""


def outlier_share(x: Any) -> float:
    """The share of elements with `|x| > 6 * sqrt(mean(x**2))`, of those that are finite.

    Args:
      x: as for `stats`.

    Returns:
      The share of all elements; 0 of none.

    Raises:
      TypeError: `x` does not hold real numbers.

    Sharded arrays: as for `stats`.

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
    """The finite elements, in runs that fit in cache."""
    for first in range(0, flat.size, SIZE):
        part = flat[first : first + SIZE].astype(np.float64)
        finite = np.isfinite(part)
        yield part if finite.all() else part[finite]
