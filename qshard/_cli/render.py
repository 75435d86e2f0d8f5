"""Rendering of reports and conversions: text for a terminal or a file, and the same text as a page with a plot."""

from __future__ import annotations

import collections
import html
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from qshard._cli.conversion import Conversion
from qshard._cli.report import QUALITY, RANKING, Findings, decibels, draws, level, mix, outputs, title
from qshard._files.names import count_of, quote
from qshard._plans.allocation import AS_THEY_ARE, MOST_FORMATS, Point
from qshard._plans.layer import Layer
from qshard.formats import Usage
from qshard.numerics._display import WIDE, figure_as_html, text_as_html
from qshard.numerics._plots import tradeoff_chart
from qshard.numerics._report import Report

POINTS = 16  # maximum points of the curve in text
BAR = 40
NAMED = 3  # maximum tensors that are listed by name for one reason
PLAN_HINT = "--budget 0.8 --plan plan.json plans a format per layer for 0.8 bytes per element; qshard convert reads it"
HTML_HINT = "--html report.html plots the trade-off"


def console() -> Console:
    """Return a console as wide as the terminal. Without a terminal, lines are not wrapped."""
    width = shutil.get_terminal_size((WIDE, 24)).columns
    return Console(width=width, highlight=False, markup=False, emoji=False)


def print_report(out: Console, findings: Findings, plan: Path | None, *, has_page: bool) -> None:
    """Print a report: a summary, a table per layer, the ranking and the trade-off.

    `plan` is the file of the plan; `has_page` says that a page is written too.
    """
    _print_summary(out, findings, plan, has_page)
    for layer in findings.layers:
        for report in _reports(layer):
            out.print(report)
        for line in (*draws(layer), *outputs(layer), *layer.remarks):
            out.print(Text(line))
        out.print()
    _print_reasons(out, "left out", findings.left_out)
    for note in findings.checkpoint.notes:
        out.print(Text(note))
    if not findings.ranking:
        return
    out.print()
    out.print(Text(f"{findings.ranked_by}: {RANKING}", style="bold"))
    out.print(
        table(["layer", "SQNR dB"], [[quote(layer.entry.name), decibels(harm)] for layer, harm in findings.ranking])
    )
    out.print()
    _print_curve(out, findings)
    _print_plan(out, findings)


def _print_summary(out: Console, findings: Findings, plan: Path | None, has_page: bool) -> None:
    """Print the size of the checkpoint, one line per format, the recommendation, and what else a report can do."""
    layers, uniform, chosen = findings.layers, findings.tradeoff.uniform, findings.recommendation
    elements, nbytes = (sum(getattr(layer.entry, name) for layer in layers) for name in ("elements", "nbytes"))
    what = f"{count_of(len(layers), 'layer')}, {elements} elements, {nbytes} bytes"
    out.print(Text(f"{quote(findings.checkpoint.path)}: {what}", style="bold"))
    rows = []
    for name, point in sorted(uniform.items(), key=lambda each: (each[1].bytes_per_element, each[1].harm)):
        fits = sum(name in layer.choices for layer in layers) if name != AS_THEY_ARE else len(layers)
        share = "all" if fits == len(layers) else f"{fits} of {len(layers)}"
        rows.append([name, f"{point.bytes_per_element:.3f}", decibels(point.harm), share])
    out.print(table(["format of all layers that it fits", "bytes per element", "SQNR dB", "fits"], rows))
    if chosen is not None:
        out.print(Text(f"plan for {findings.budget:g} bytes per element: {_in_short(chosen.point)}"))
    if chosen is not None and plan is not None:
        out.print(Text(f"qshard convert {quote(findings.checkpoint.path)} OUT --plan {quote(plan)} carries it out"))
    else:
        out.print(Text(PLAN_HINT))
    if not has_page:
        out.print(Text(HTML_HINT))
    out.print()


def _in_short(point: Point) -> str:
    return f"{mix(point.formats)}; {point.bytes_per_element:.3f} bytes per element, {level(point.harm)}"


def _reports(layer: Layer) -> Iterator[Report]:
    name = f"{quote(layer.entry.name)}: {title(layer)}"
    usages = list(dict.fromkeys(row.stats.usage for row in layer.rows)) or [Usage.ROWWISE]
    for usage in usages:
        stats = tuple(row.stats for row in layer.rows if row.stats.usage is usage)
        plane = "" if usage is Usage.ROWWISE else ", columnwise"
        yield Report(title=name + plane, stats=stats, left_out=layer.left_out if usage is usages[0] else {})


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Build a table of text with a left-aligned first column and right-aligned others."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for i, head in enumerate(heads):
        made.add_column(head, justify="right" if i else "left", overflow="fold")
    for row in rows:
        made.add_row(*map(Text, row))
    return made


def _print_curve(out: Console, findings: Findings) -> None:
    points = _some(findings.tradeoff.curve)
    levels = [_level(point) for point in points if point.harm]
    low, high = min(levels, default=0.0), max(levels, default=0.0)
    rows = []
    for point in points:
        part = (_level(point) - low) / ((high - low) or 1) if point.harm else 1.0
        bar = "#" * round(1 + (BAR - 1) * part)
        rows.append([mix(point.formats), f"{point.bytes_per_element:.3f}", decibels(point.harm), bar.ljust(BAR)])
    out.print(Text(f"the best plan of each size: {QUALITY}", style="bold"))
    heads = ["formats, and their numbers of layers", "bytes per element", "SQNR dB", "better, longer bar".ljust(BAR)]
    out.print(table(heads, rows))


def _some(curve: Sequence[Point]) -> list[Point]:
    """Return at most `POINTS` points, evenly spaced in bytes, including both ends."""
    if len(curve) <= POINTS:
        return list(curve)
    first, last = curve[0].bytes_per_element, curve[-1].bytes_per_element
    wanted = [first + (last - first) * i / (POINTS - 1) for i in range(POINTS)]
    near = [min(range(len(curve)), key=lambda i: abs(curve[i].bytes_per_element - size)) for size in wanted]
    return [curve[i] for i in dict.fromkeys(near)]


def _print_plan(out: Console, findings: Findings) -> None:
    chosen = findings.recommendation
    if chosen is None:
        return
    out.print()
    out.print(Text(f"plan for {findings.budget:g} bytes per element: {_in_short(chosen.point)}", style="bold"))
    rows = [
        [quote(name), choice.name, f"{choice.nbytes:.0f}", decibels(choice.harm)]
        for name, choice in chosen.choices.items()
    ]
    out.print(table(["layer", "format", "bytes", "SQNR dB"], rows))


def print_conversion(out: Path, done: Conversion) -> None:
    """Print the tensors of a conversion to `out`."""
    to = console()
    _print_reasons(to, "kept", done.kept)
    for line in done.remarks:
        to.print(Text(line))
    if again := done.requantized:
        many = f"{count_of(len(again), 'weight')} had codes of other formats, such as {quote(again[0])}"
        to.print(Text(f"{many}: quantized again from the values of these codes"))
    before, after = done.nbytes
    counts = collections.Counter(str(what.format) for what in done.quantized.values())
    what = ", ".join(f"{count_of(count, 'tensor')} in {name}" for name, count in counts.most_common())
    what = f"{what}, {len(done.kept)} unchanged; {before} bytes became {after}; read back bit for bit"
    to.print(Text(f"{quote(out)}: {what}"))


def _print_reasons(out: Console, what: str, reasons: Mapping[str, str]) -> None:
    """Print a line per reason with the first tensors that it applies to."""
    by_reason: dict[str, list[str]] = {}
    for name, why in reasons.items():
        by_reason.setdefault(why, []).append(name)
    for why, names in by_reason.items():
        some = ", ".join(map(quote, names[:NAMED])) + (", ..." if len(names) > NAMED else "")
        out.print(Text(f"{what} ({why}): {len(names)}: {some}"))


def page(findings: Findings, plan: Path | None) -> str:
    """Return the report as an HTML page that loads nothing: the trade-off as a picture, then the text."""
    picture = _plot_curve(findings)
    text = text_as_html(lambda out: print_report(out, findings, plan, has_page=True))
    head = f'<meta charset="utf-8"><title>{html.escape(quote(findings.checkpoint.path))}</title>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{picture}{text}</body></html>'


def _plot_curve(findings: Findings) -> str:
    """Plot SQNR in dB over bytes per element, without exact points. Empty if all points are exact."""
    chosen = findings.recommendation.point if findings.recommendation else None
    curve = [_place(point) for point in findings.tradeoff.curve if point.harm]
    uniform = {name: _place(point) for name, point in findings.tradeoff.uniform.items() if point.harm}
    if not curve and not uniform:
        return ""
    best = f"best plan of each size, of at most {MOST_FORMATS} formats"
    figure = tradeoff_chart(best, curve, uniform, _place(chosen) if chosen and chosen.harm else None)
    figure.axes[0].set(xlabel="bytes per element", ylabel="dB", title=QUALITY)
    return figure_as_html(figure, "bytes per element against SQNR")


def _place(point: Point) -> tuple[float, float]:
    return point.bytes_per_element, _level(point)


def _level(point: Point) -> float:
    return -10 * math.log10(point.harm)
