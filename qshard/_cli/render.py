"""Rendering of reports and conversions: text for a terminal or a file, and a self-contained HTML page."""

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
from qshard._cli.errors import count_of, printable, quote
from qshard._cli.layers import Layer
from qshard._cli.report import QUALITY, RANKING, Findings, decibels, draws, level, mix, outputs, title
from qshard._core import environment
from qshard._plans.allocation import AS_THEY_ARE, MOST_FORMATS, Point
from qshard.formats import Usage
from qshard.numerics._report import WIDE, Report, group_refusals, one_decimal, percent

POINTS = 16  # maximum points of the curve in text
BAR = 40
NAMED = 3  # maximum tensors that are listed by name for one reason
PLAN_HINT = "--budget 0.8 --plan plan.json plans a format per layer for 0.8 bytes per element; qshard convert reads it"
HTML_HINT = "--html report.html plots the trade-off"

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1000px; margin: 2em auto; padding: 0 1em; color: #1b1f24 }
h1 { font-size: 1.4em; overflow-wrap: anywhere } h2 { font-size: 1.15em; margin-top: 2em }
h3 { font-size: 1em; margin: 1.6em 0 .3em; overflow-wrap: anywhere }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9em }
td, th { padding: 2px 10px 2px 0; text-align: right; vertical-align: bottom }
td + td { white-space: nowrap } td:first-child, th:first-child { text-align: left; overflow-wrap: anywhere }
th { border-bottom: 1px solid #8b949e } .small, footer { color: #57606a; font-size: .85em }
svg { max-width: 100%; font: 12px system-ui, sans-serif; fill: #1b1f24 }
.grid { stroke: #d0d7de } .curve { fill: none; stroke: #0969da; stroke-width: 2 }
.lead { stroke: #8b949e } svg text { paint-order: stroke; stroke: #fff; stroke-width: 4px; stroke-linejoin: round }
.uniform { fill: #bc4c00 } .chosen { fill: none; stroke: #1a7f37; stroke-width: 3 }
.wide { overflow-x: auto }
"""
HEADS = ["format", "bits", "SQNR dB", "mean error", "max error", "zeros made", "saturated", "subnormal"]
HEADS += ["worst block dB", "at"]

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 28, 52
TICKS = 6  # approximate number of ticks on an axis
LINE = 15  # distance between two lines of text
LETTER = 7.0  # approximate width of a letter
DROP = 4  # distance from the middle of a line of text to its baseline
DOT = 4
STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


def console() -> Console:
    """Return a console as wide as the terminal. Without a terminal, lines are not wrapped."""
    width = shutil.get_terminal_size((WIDE, 24)).columns
    return Console(width=width, highlight=False, markup=False, emoji=False)


def print_text(findings: Findings, plan: Path | None = None) -> None:
    """Print a report: a summary, a table per layer, the ranking and the trade-off. `plan` is the file of the plan."""
    out = console()
    _print_summary(out, findings, plan)
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


def _print_summary(out: Console, findings: Findings, plan: Path | None) -> None:
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


def page(findings: Findings) -> str:
    """Return the HTML page. Names are escaped."""
    return "\n".join(_parts(findings))


def _parts(findings: Findings) -> Iterator[str]:
    name = _text(findings.checkpoint.path)
    yield '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{name}</title><style>{STYLE}</style></head><body>"
    yield f"<h1>{name}</h1>"
    for note in findings.checkpoint.notes:
        yield f"<p>{_text(note)}</p>"
    chosen = findings.recommendation
    if findings.ranking:
        yield f"<h2>Bytes against {QUALITY}</h2>"
        yield svg(findings)
        yield f"<p class=small>Line: the best plan of each size, with at most {MOST_FORMATS} formats. Dots: one format "
        yield f"for all layers that it supports.{' Ring: the recommendation.' if chosen else ''} Exact choices are not "
        yield "shown.</p>"
    if chosen is not None:
        yield f"<h2>For {findings.budget:g} bytes per element</h2>"
        yield f"<p>{_text(_in_short(chosen.point))}.</p>"
        rows = [(name, each.name, f"{each.nbytes:.0f}", decibels(each.harm)) for name, each in chosen.choices.items()]
        yield _table(("layer", "format", "bytes", "SQNR dB"), rows)
    if findings.ranking:
        yield f"<h2>{_text(findings.ranked_by)}: {RANKING}</h2>"
        yield _table(("layer", "SQNR dB"), [(layer.entry.name, decibels(harm)) for layer, harm in findings.ranking])
    yield "<h2>Layers</h2>"
    for layer in findings.layers:
        yield from _layer(layer)
    if findings.left_out:
        yield "<h2>Left out</h2>"
        yield _table(("tensor", "why"), list(findings.left_out.items()))
    yield f"<footer><p>{_text(environment.build_info().splitlines()[0])}</p></footer></body></html>"


def _layer(layer: Layer) -> Iterator[str]:
    yield f"<h3>{_text(layer.entry.name)}</h3><p class=small>{title(layer)}</p>"
    rows = []
    for each in (row.stats for row in layer.rows):
        where = "-" if each.worst_block is None else ", ".join(map(str, each.worst_block))
        shares = [percent(part) if part else "-" for part in (each.zeros_made, each.saturated, each.subnormal)]
        errors = [percent(each.mean_relative_error), percent(each.max_relative_error, 1)]
        name = f"{each.format}{'' if each.format.transposes else f', {str(each.usage.name).lower()}'}"
        numbers = [f"{each.bits_per_element:.3f}", one_decimal(each.sqnr_db), *errors, *shares]
        rows.append((name, *numbers, one_decimal(each.worst_block_db), where))
    if rows:
        yield _table(HEADS, rows)
    notes = dict.fromkeys(f"{row.stats.format}: {note}" for row in layer.rows for note in row.stats.notes)
    left_out = (f"left out: {line}" for line in group_refusals(layer.left_out))
    for line in (*notes, *draws(layer), *outputs(layer), *layer.remarks, *left_out):
        yield f"<p class=small>{_text(line)}</p>"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{_text(each)}</th>" for each in heads)
    body = "\n".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>\n{body}</table></div>'


def _text(value: object) -> str:
    return html.escape(printable(value)) or "(no name)"


def svg(findings: Findings) -> str:
    """Draw SQNR in dB over bytes per element as SVG.

    The trade-off is a curve, one format for all layers is a dot, and the recommendation is a ring. Exact points are
    left out.
    """
    curve = [point for point in findings.tradeoff.curve if point.harm]
    uniform = {name: point for name, point in findings.tradeoff.uniform.items() if point.harm}
    chosen = findings.recommendation.point if findings.recommendation else None
    every = [*curve, *uniform.values()]
    if not every:
        return "<p>No choice has any noise, so there is no curve.</p>"
    return "\n".join(_svg_lines(every, curve, uniform, chosen if chosen and chosen.harm else None))


def _svg_lines(
    every: Sequence[Point], curve: Sequence[Point], uniform: dict[str, Point], chosen: Point | None
) -> Iterator[str]:
    across = ticks([point.bytes_per_element for point in every])
    up = ticks([_level(point) for point in every])

    def place(nbytes: float, level: float) -> tuple[float, float]:
        x = (nbytes - across[0]) / (across[-1] - across[0])
        y = (level - up[0]) / (up[-1] - up[0])
        return LEFT + x * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - y * (HEIGHT - TOP - BOTTOM)

    def at(point: Point) -> tuple[float, float]:
        return place(point.bytes_per_element, _level(point))

    yield f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="bytes per element against SQNR">'
    for value in across:
        x, _ = place(value, up[0])
        yield f'<line class="grid" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}"/>'
        yield f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + LINE + 3}" text-anchor="middle">{value:g}</text>'
    for value in up:
        _, y = place(across[0], value)
        yield f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>'
        yield f'<text x="{LEFT - 8}" y="{y + DROP:.1f}" text-anchor="end">{value:g}</text>'
    yield f'<text x="{WIDTH / 2}" y="{HEIGHT - 10}" text-anchor="middle">bytes per element</text>'
    yield f'<text x="{LEFT}" y="{TOP - 12}">dB, {html.escape(QUALITY)}</text>'
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(at, curve))
    yield f'<polyline class="curve" points="{path}"/>'
    # Dots block labels, too.
    taken = [(x - DOT, x + DOT, y + DROP) for x, y in map(at, uniform.values())]
    words = []
    for name, point in sorted(uniform.items(), key=lambda each: at(each[1])[1]):
        x, y = at(point)
        lead, text = _label(name, x, y, taken)
        yield lead
        what = f"{html.escape(name)}: {point.bytes_per_element:.3f} bytes, {_level(point):.1f} dB"
        words += [f'<circle class="uniform" cx="{x:.1f}" cy="{y:.1f}" r="{DOT}"><title>{what}</title></circle>', text]
    yield from words  # labels are drawn above leader lines
    if chosen is not None:
        x, y = at(chosen)
        yield f'<circle class="chosen" cx="{x:.1f}" cy="{y:.1f}" r="8"><title>the recommendation</title></circle>'
    yield "</svg>"


def _label(name: str, x: float, y: float, taken: list[tuple[float, float, float]]) -> tuple[str, str]:
    """Place a label beside its dot, and return its leader line (empty if it is close) and its text.

    The label is on the side with space, at the height nearest to the dot that other labels leave free.
    """
    width = LETTER * len(name)
    right = x + 2 * DOT + width < WIDTH - RIGHT
    edge = x + 2 * DOT if right else x - 2 * DOT
    start = edge if right else edge - width
    beside = y + DROP
    near = [other for begin, end, other in taken if start < end and begin < start + width]
    free = [row for row in _rows(beside) if all(abs(row - other) >= LINE for other in near)]
    row = min(free, key=lambda row: abs(row - beside), default=beside)
    taken.append((start, start + width, row))
    line = f'<line class="lead" x1="{x:.1f}" y1="{y:.1f}" x2="{edge:.1f}" y2="{row - DROP:.1f}"/>'
    text = f'<text x="{edge:.1f}" y="{row:.1f}" text-anchor="{"start" if right else "end"}">{html.escape(name)}</text>'
    return line if row != beside else "", text


def _rows(row: float) -> list[float]:
    """Return the possible heights of a label: beside its dot, and all others in the picture."""
    return [row + i for i in range(-HEIGHT, HEIGHT) if TOP + LINE <= row + i <= HEIGHT - BOTTOM - DROP or not i]


def _level(point: Point) -> float:
    return -10 * math.log10(point.harm)


def ticks(values: Sequence[float]) -> list[float]:
    """Return round numbers around some values, at least two.

    >>> ticks([0.53, 2.0]), ticks([3.0])
    ([0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0], [3.0, 4.0])
    """
    low, high = min(values), max(values)
    rough = (high - low) / TICKS or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(each for each in STEPS if each * power >= rough * (1 - 1e-9)) * power
    first = math.floor(low / step + 1e-9)
    last = max(math.ceil(high / step - 1e-9), first + 1)
    return [round(i * step, 12) for i in range(first, last + 1)]
