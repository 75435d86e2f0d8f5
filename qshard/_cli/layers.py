"""What formats do to the layers of a checkpoint, one tensor in memory at a time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from qshard._cli.activations import Activations
from qshard._cli.bar import bar
from qshard._cli.checkpoint import Entry
from qshard._cli.errors import shown
from qshard.formats import Format, Usage
from qshard.layout import Shape, plane
from qshard.numerics._measures import Floats, Note, Stats, as_float, stats_of
from qshard.numerics._outliers import outlier_share
from qshard.numerics._outputs import output_noise

OP = "qshard report"


@dataclass(frozen=True)
class Row:
    """One plane of a layer in one format.

    Attributes:
      stats: of one draw; where the format rounds stochastically, the means over all.
      draws: the SQNR of each draw, where it does.
      output: `output_noise` with the activations of the layer, the mean over draws; None if there are none.
    """

    stats: Stats
    draws: tuple[float, ...] = ()
    output: float | None = None

    @property
    def harm(self) -> float | None:
        """Noise for signal: of the output, if activations are there, else `harm_of`."""
        known = harm_of(self.stats)
        return known if known is None or self.output is None else self.output


@dataclass(frozen=True)
class Choice:
    """A way to store a layer.

    Attributes:
      name: of the format, or of the dtype that it has.
      nbytes: of codes and scales of all planes that are asked for.
      harm: noise for signal, that of the worse plane: of the product with white activations, or with those that were
        given, the relative variance.
        None where some of it is not known, as finite numbers became NaN or infinite.
    """

    name: str
    nbytes: int
    harm: float | None


@dataclass(frozen=True)
class Layer:
    """A tensor and its rows.

    Attributes:
      outliers: `outlier_share`.
      left_out: name of each format that does not fit -> why.
      remarks: what else is to be known of it.
      usage: the planes that are asked for.
    """

    entry: Entry
    outliers: float
    rows: tuple[Row, ...]
    left_out: dict[str, str]
    remarks: tuple[str, ...]
    usage: Usage

    @property
    def choices(self) -> dict[str, Choice]:
        """By name: the formats that were measured in what is asked for, and its own dtype, which costs no harm."""
        by_format: dict[str, list[Row]] = {}
        for row in self.rows:
            if row.stats.usage in self.usage.planes:
                by_format.setdefault(str(row.stats.format), []).append(row)
        found = {self.entry.dtype: Choice(self.entry.dtype, self.entry.nbytes, 0.0)}
        for name, rows in by_format.items():
            harms = [row.harm for row in rows]
            known = [harm for harm in harms if harm is not None]
            nbytes = sum(round(row.stats.bits_per_element * self.entry.elements / 8) for row in rows)
            found[name] = Choice(name, nbytes, max(known) if len(known) == len(harms) else None)
        return found


def harm_of(stats: Stats) -> float | None:
    """Noise for signal: `10**(-sqnr_db / 10)`; None where it is not known."""
    if stats.nonfinite_made or Note.NOTHING_COUNTS in stats.notes:
        return None
    return 0.0 if math.isnan(stats.sqnr_db) else 10 ** (-stats.sqnr_db / 10)


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked of each layer.

    Attributes:
      formats: all of them, those with options that were asked for too.
      usage: one plane or both. Of a format whose planes hold the same numbers one is measured; of one that is rotated
        the columnwise plane always, as the other is not.
      draws: how often a stochastic format is measured, from `seed` up.
      activations: what layers are given, if it is known.
    """

    formats: tuple[Format, ...]
    usage: Usage
    draws: int
    seed: int
    activations: Activations | None = None

    def planes(self, shape: Shape) -> tuple[list[tuple[Format, Usage]], dict[str, str]]:
        """What is measured of a layer of a shape, and by name why the other formats are not."""
        found, left_out = [], {}
        for fmt in self.formats:
            usages = self.usage.planes[:1] if fmt.transposes else self.usage.planes
            if fmt.hadamard and self.usage is Usage.ROWWISE:
                usages = (Usage.COLUMNWISE,)
            try:
                for usage in usages:
                    plane(fmt, shape, usage, op=str(fmt))
            except ValueError as error:
                left_out[str(fmt)] = str(error)
                continue
            found += [(fmt, usage) for usage in usages]
        return found, left_out

    def least_bytes(self, entry: Entry) -> float:
        """Of the smallest way to store a layer, known without its numbers."""
        sizes: dict[str, float] = {entry.dtype: float(entry.nbytes)}
        for fmt, usage in self.planes(entry.shape)[0]:
            if usage not in self.usage.planes:
                continue
            where = plane(fmt, entry.shape, usage)
            scales = math.prod(where.scale_shape) * (4 if fmt.stored_scale_dtype == "float32" else 1)
            whole = 0 if where.global_scale_shape is None else 4 * math.prod(where.global_scale_shape)
            before = sizes.get(str(fmt), 0.0)
            sizes[str(fmt)] = before + math.prod(where.data_shape) + scales + whole
        return min(sizes.values())


def measured(entries: list[Entry], question: Question, remarks: Mapping[str, str]) -> list[Layer]:
    """The rows of every layer.

    Args:
      remarks: name of a layer -> a remark about it.
    """
    draws = question.draws
    total = sum(entry.elements * (draws if fmt.stochastic else 1) for entry in entries for fmt in question.formats)
    found, done = [], 0
    with bar(total) as update:
        for i, entry in enumerate(entries):
            what = f"{i + 1} of {len(entries)}: {shown(entry.name)}"
            end = done + sum(entry.elements * (draws if fmt.stochastic else 1) for fmt in question.formats)
            update(what, done)

            def advance(elements: int, what: str = what, end: int = end) -> None:
                nonlocal done
                done = min(done + elements, end)
                update(what, done)

            known = [remarks[entry.name]] if entry.name in remarks else []
            found.append(_layer(entry, question, known, advance))
            done = end  # Of formats that it is not measured in, too.
    return found


def _layer(entry: Entry, question: Question, known: list[str], advance: Any) -> Layer:
    x = as_float(entry.read(), OP)
    planes, left_out = question.planes(entry.shape)
    given = question.activations.of(entry.name) if question.activations else None
    rows = tuple(_row(x, fmt, usage, question, given, advance) for fmt, usage in planes)
    remarks = list(known)
    if question.activations is not None and given is None:
        remarks.append("no activations: its harm is that with white ones")
    if any(row.output is not None and math.isnan(row.output) for row in rows):
        rows = tuple(dataclasses.replace(row, output=None) for row in rows)
        remarks.append("its activations give no signal, or are not finite: its harm is that with white ones")
    return Layer(entry, outlier_share(x.array), rows, left_out, tuple(remarks), question.usage)


def _row(x: Floats, fmt: Format, usage: Usage, question: Question, given: Any, advance: Any) -> Row:
    seeds = range(question.seed, question.seed + (question.draws if fmt.stochastic else 1))
    drawn = [stats_of(x, fmt, usage, seed, OP, advance) for seed in seeds]
    output = None
    if given is not None and (fmt.transposes or usage is Usage.ROWWISE):  # Others are for gradients.
        output = float(np.mean([output_noise(given, x.array, fmt, seed=seed) for seed in seeds]))
    if not fmt.stochastic:
        return Row(drawn[0], output=output)
    return Row(_mean(drawn), tuple(stats.sqnr_db for stats in drawn), output)


def _mean(drawn: list[Stats]) -> Stats:
    """The means of numbers; the worst block and the histograms are those of the first draw."""
    first = drawn[0]
    means: dict[str, Any] = {}
    for field in dataclasses.fields(Stats):
        values = [getattr(stats, field.name) for stats in drawn]
        if field.name != "worst_block_db" and all(isinstance(value, float) for value in values):
            means[field.name] = float(np.mean(values)) if math.inf not in values else values[0]
    return dataclasses.replace(first, **means)
