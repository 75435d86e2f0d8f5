"""A report on a terminal, or in a file of text."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from qshard._cli.choose import Point
from qshard._cli.errors import counted, shown
from qshard._cli.findings import HARM, RANKING, Findings, decibels, draws, level, outputs, title
from qshard._cli.layers import Layer
from qshard._cli.quantizing import Conversion
from qshard.formats import Format, Usage
from qshard.numerics._reports import WIDE, Report

POINTS = 16
"""Of the curve, in text."""
BAR = 40
NAMED = 3
"""Tensors that are left out for one reason, by name."""
HINT = (
    "--budget 0.8 recommends a format for each layer, of 0.8 bytes an element in all; --html FILE draws the trade-off"
)


def console() -> Console:
    """Standard output: as wide as the terminal, and no line is broken where there is none."""
    width = shutil.get_terminal_size((WIDE, 24)).columns
    return Console(width=width, highlight=False, markup=False, emoji=False)


def print_text(findings: Findings) -> None:
    """Everything, the tables of layers first, so that what matters most is what is seen last."""
    out = console()
    for layer in findings.layers:
        for report in _reports(layer):
            out.print(report)
        for line in (*draws(layer), *outputs(layer), *layer.remarks):
            out.print(Text(line))
        out.print()
    for why, names in findings.grouped.items():
        out.print(Text(_grouped("left out", why, names)))
    for note in findings.checkpoint.notes:
        out.print(Text(note))
    if not findings.ranking:
        return
    out.print()
    out.print(Text(f"{findings.ranked_by}: {RANKING}", style="bold"))
    out.print(
        table(["layer", "noise dB"], [[shown(layer.entry.name), decibels(harm)] for layer, harm in findings.ranking])
    )
    out.print()
    _print_curve(out, findings)
    _print_recommendation(out, findings)


def _reports(layer: Layer) -> Iterator[Report]:
    """One for each plane that was measured."""
    name = f"{shown(layer.entry.name)}: {title(layer)}"
    usages = list(dict.fromkeys(row.stats.usage for row in layer.rows)) or [Usage.ROWWISE]
    for usage in usages:
        stats = tuple(row.stats for row in layer.rows if row.stats.usage is usage)
        plane = "" if usage is Usage.ROWWISE else ", columnwise"
        yield Report(title=name + plane, stats=stats, left_out=layer.left_out if usage is usages[0] else {})


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Text, the first column to the left, the others to the right."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for i, head in enumerate(heads):
        made.add_column(head, justify="right" if i else "left", overflow="fold")
    for row in rows:
        made.add_row(*map(Text, row))
    return made


def _print_curve(out: Console, findings: Findings) -> None:
    curve, uniform = findings.tradeoff.curve, findings.tradeoff.uniform
    points = [("each layer its own", point) for point in _some(curve)] + list(uniform.items())
    points.sort(key=lambda each: each[1].bytes_per_element)
    levels = [10 * math.log10(point.harm) for _, point in points if point.harm]
    low, high = min(levels, default=0.0), max(levels, default=0.0)
    rows = []
    for name, point in points:
        part = (10 * math.log10(point.harm) - low) / ((high - low) or 1) if point.harm else 0.0
        rows.append([name, f"{point.bytes_per_element:.3f}", decibels(point.harm), "#" * round(1 + (BAR - 1) * part)])
        rows[-1][-1] = rows[-1][-1].ljust(BAR) if point.harm else " " * BAR
    out.print(Text(f"bytes an element against dB of {HARM}", style="bold"))
    out.print(table(["formats", "bytes", "noise dB", "more noise, longer bar".ljust(BAR)], rows))


def _some(curve: Sequence[Point]) -> list[Point]:
    """Of many points those that are spread evenly in bytes, with both ends."""
    if len(curve) <= POINTS:
        return list(curve)
    first, last = curve[0].bytes_per_element, curve[-1].bytes_per_element
    wanted = [first + (last - first) * i / (POINTS - 1) for i in range(POINTS)]
    near = [min(curve, key=lambda point: abs(point.bytes_per_element - size)) for size in wanted]
    return list(dict.fromkeys(near))


def _print_recommendation(out: Console, findings: Findings) -> None:
    chosen = findings.recommendation
    if findings.budget is None:
        out.print()
        out.print(Text(HINT))
    if chosen is None:
        return
    out.print()
    point = chosen.point
    what = f"{point.bytes_per_element:.3f}, {level(point.harm)}"
    out.print(Text(f"for {findings.budget:g} bytes an element: {what}", style="bold"))
    rows = [
        [shown(name), choice.name, f"{choice.nbytes:.0f}", decibels(choice.harm)]
        for name, choice in chosen.choices.items()
    ]
    out.print(table(["layer", "format", "bytes", "noise dB"], rows))


def print_conversion(out: Path, fmt: Format, done: Conversion) -> None:
    """What `qshard convert` has done."""
    to = console()
    by_reason: dict[str, list[str]] = {}
    for name, why in done.kept.items():
        by_reason.setdefault(why, []).append(name)
    for why, names in by_reason.items():
        to.print(Text(_grouped("kept", why, names)))
    for line in done.remarks:
        to.print(Text(line))
    before, after = done.nbytes
    what = f"{counted(len(done.quantized), 'tensor')} in {fmt}, {len(done.kept)} as they were"
    to.print(Text(f"{shown(out)}: {what}; {before} bytes became {after}; read back bit for bit"))


def _grouped(what: str, why: str, names: Sequence[str]) -> str:
    some = ", ".join(map(shown, names[:NAMED])) + (", ..." if len(names) > NAMED else "")
    return f"{what} ({why}): {len(names)}: {some}"
