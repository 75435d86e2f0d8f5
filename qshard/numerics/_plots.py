"""The plots of a report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from qshard.numerics._measures import Stats
from qshard.numerics._progress import load

if TYPE_CHECKING:
    from matplotlib.figure import Figure


ENTRIES = 18
"""How many lines of a legend are as high as its plot."""
LEAST_ERROR = 1e-3
"""Smaller ones are of a few elements that happen to be on the grid, and would press all others together."""


def draw(rows: Sequence[Stats]) -> Figure:
    """SQNR, relative error by size of element, histogram of scales; each format in one style throughout."""
    # Not pyplot, which would keep the figure alive and choose a backend for the whole process.
    heights = (0.9 + 0.24 * len(rows), 3.6, 3.6)
    size = (11, sum(heights))
    figure: Figure = load("matplotlib.figure", "report").Figure(figsize=size, layout="constrained")
    bars, errors, scales = figure.subplots(3, 1, height_ratios=heights)
    names, styles = [str(row.format) for row in rows], [_style(i, len(rows)) for i in range(len(rows))]
    _draw_bars(bars, rows, names, styles)
    for row, name, style in zip(rows, names, styles, strict=True):
        line = {key: value for key, value in style.items() if key != "hatch"} | {"label": name}
        blocks = sum(row.scale_histogram.values())
        _plot(errors, row.error_by_exponent, math.nan, line)
        _plot(scales, {e: n / blocks for e, n in row.scale_histogram.items()}, 0.0, line)
    for axes in (errors, scales):
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        if names:
            columns = -(-len(names) // ENTRIES)
            axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), ncols=columns, fontsize="small", frameon=False)
    seen = [error for row in rows for error in row.error_by_exponent.values() if error]
    lowest, highest = min(seen, default=LEAST_ERROR), max(seen, default=1.0)
    # Limits first: a logarithm has none of its own where all errors are 0.
    errors.set(ylim=(max(0.7 * lowest, LEAST_ERROR), max(1.4 * highest, 10 * LEAST_ERROR)), yscale="log")
    errors.set(title="mean relative error by size of element", xlabel="floor(log2 |x|)")
    scales.set(title="scales", xlabel="floor(log2 scale)", ylabel="share of blocks", ylim=(0, None))
    return figure


def _plot(axes: Any, values: Mapping[int, float], absent: float, line: dict[str, Any]) -> None:
    """A line over exponents, with a marker at each that is there. What is `absent` between them is no slope."""
    there = sorted(values)
    every = list(range(there[0], there[-1] + 1)) if there else []
    axes.plot(every, [values.get(e, absent) for e in every], markevery=[every.index(e) for e in there], **line)


def _draw_bars(bars: Any, rows: Sequence[Stats], names: list[str], styles: list[dict[str, Any]]) -> None:
    decibels = [row.sqnr_db for row in rows]
    drawn = bars.barh(range(len(names)), [db if math.isfinite(db) else 0 for db in decibels])
    for bar, style in zip(drawn, styles, strict=True):
        bar.set(facecolor=style["color"], hatch=style["hatch"], edgecolor="white")
    labels = ["-" if math.isnan(db) else f"{db:.1f}" for db in decibels]
    noted = ["*" if row.notes else "" for row in rows]
    bars.bar_label(drawn, [label + star for label, star in zip(labels, noted, strict=True)], padding=3)
    bars.set_yticks(range(len(names)), names)
    bars.set_ylim(max(len(names), 1) - 0.5, -0.5)
    bars.margins(x=0.1)
    bars.set_axisbelow(True)
    bars.set(title="SQNR in dB" + (" (*: see the notes in the table)" if any(noted) else ""))


def _style(i: int, count: int) -> dict[str, Any]:
    """Ten colors, then the same with other lines. Of lines that lie on each other the first is the widest."""
    part = i / max(count - 1, 1)
    return {
        "linewidth": 3 - 2 * part,
        "markersize": 8 - 4 * part,
        "color": f"C{i % 10}",
        "linestyle": ("-", "--", ":", "-.")[i // 10 % 4],
        "marker": "os^Dv<>P*X"[(i + i // 10 * 3) % 10],
        "hatch": ("", "//", "..", "xx")[i // 10 % 4],
    }
