"""A report as one page of HTML that needs nothing else."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence

from qshard._cli.curve import svg
from qshard._cli.errors import printable
from qshard._cli.findings import HARM, RANKING, Findings, decibels, draws, level, outputs, title
from qshard._cli.layers import Layer
from qshard._core import environment
from qshard.numerics._tables import percent, unplaced

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
HEADS = (
    "format",
    "bits",
    "SQNR dB",
    "mean error",
    "max error",
    "zeros made",
    "saturated",
    "subnormal",
    "worst block dB",
    "at",
)


def page(findings: Findings) -> str:
    """The whole page. Names in it are text, whatever they hold."""
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
        yield f"<h2>Bytes against {HARM}</h2>"
        yield svg(findings)
        yield "<p class=small>The line: each layer in a format of its own, so that no mix of its bytes has less noise. "
        yield f"Dots: one format for all layers that it fits.{' The ring: what is recommended.' if chosen else ''} "
        yield "What keeps all numbers has no noise, and is not on it.</p>"
    if chosen is not None:
        yield f"<h2>For {findings.budget:g} bytes an element</h2>"
        yield f"<p>{chosen.point.bytes_per_element:.3f} bytes an element, {level(chosen.point.harm)}.</p>"
        rows = [(name, each.name, f"{each.nbytes:.0f}", decibels(each.harm)) for name, each in chosen.choices.items()]
        yield _table(("layer", "format", "bytes", "noise dB"), rows)
    if findings.ranking:
        yield f"<h2>{_text(findings.ranked_by)}: {RANKING}</h2>"
        yield _table(("layer", "noise dB"), [(layer.entry.name, decibels(harm)) for layer, harm in findings.ranking])
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
        numbers = [f"{each.bits_per_element:.3f}", _number(each.sqnr_db), *errors, *shares]
        rows.append((name, *numbers, _number(each.worst_block_db), where))
    if rows:
        yield _table(HEADS, rows)
    notes = dict.fromkeys(f"{row.stats.format}: {note}" for row in layer.rows for note in row.stats.notes)
    lines = [
        *notes,
        *draws(layer),
        *outputs(layer),
        *layer.remarks,
        *(f"left out: {line}" for line in unplaced(layer.left_out)),
    ]
    for line in lines:
        yield f"<p class=small>{_text(line)}</p>"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{_text(each)}</th>" for each in heads)
    body = "\n".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>\n{body}</table></div>'


def _text(value: object) -> str:
    return html.escape(printable(value)) or "(no name)"


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1f}"
