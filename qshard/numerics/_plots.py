"""Plots of reports, of results with rows, and of trade-offs. matplotlib is imported when a plot is drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from qshard.formats import E3M2, E5M2, FloatScaling, Format, PowerScaling, TwoLevelScaling
from qshard.numerics._display import load

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from qshard.numerics._statistics import Stats

BAR = 0.24  # height of a bar in inches
ENTRIES = 18  # number of legend entries that fit the height of a plot
# Lower limit of the error axis. Smaller errors are of a few elements near the grid, and would compress the plot.
LEAST_ERROR = 1e-3


def report_figure(rows: Sequence[Stats]) -> Figure:
    """Draw SQNR, mean relative error by exponent, and the histogram of scales, with one style per format."""
    # Not pyplot, which would keep the figure alive and select a backend for the process.
    heights = (0.9 + BAR * len(rows), 3.6, 3.6)
    size = (11, sum(heights))
    figure: Figure = load("matplotlib.figure", "report").Figure(figsize=size, layout="constrained")
    bars, errors, scales = figure.subplots(3, 1, height_ratios=heights)
    names, styles = [str(row.format) for row in rows], line_styles([row.format for row in rows])
    _draw_bars(bars, rows, names, styles)
    for row, name, style in zip(rows, names, styles, strict=True):
        line = style | {"label": name}
        blocks = sum(row.scale_histogram.values())
        _plot(errors, row.error_by_exponent, math.nan, line)
        _plot(scales, {e: n / blocks for e, n in row.scale_histogram.items()}, 0.0, line)
    for axes in (errors, scales):
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        if names:
            _add_legend(axes, len(names))
    seen = [error for row in rows for error in row.error_by_exponent.values() if error]
    lowest, highest = min(seen, default=LEAST_ERROR), max(seen, default=1.0)
    # Set the limits first: a logarithmic axis has no limits of its own if all errors are 0.
    errors.set(ylim=(max(0.7 * lowest, LEAST_ERROR), max(1.4 * highest, 10 * LEAST_ERROR)), yscale="log")
    errors.set(title="mean relative error by size of element", xlabel="floor(log2 |x|)")
    scales.set(title="scales", xlabel="floor(log2 scale)", ylabel="share of blocks", ylim=(0, None))
    return figure


def _add_legend(axes: Any, entries: int) -> None:
    style = {"fontsize": "small", "frameon": False, "handlelength": 3.5}  # long enough to show the dashes
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), ncols=-(-entries // ENTRIES), **style)


def _plot(axes: Any, values: Mapping[int, float], absent: float, line: dict[str, Any]) -> None:
    """Draw a line over exponents, with a marker at each exponent in `values` and the value `absent` at the others."""
    there = sorted(values)
    every = list(range(there[0], there[-1] + 1)) if there else []
    axes.plot(every, [values.get(e, absent) for e in every], markevery=[every.index(e) for e in there], **line)


def _draw_bars(bars: Any, rows: Sequence[Stats], names: list[str], styles: list[dict[str, Any]]) -> None:
    decibels = [row.sqnr_db for row in rows]
    patches = bars.barh(range(len(names)), [db if math.isfinite(db) else 0 for db in decibels])
    for bar, style in zip(patches, styles, strict=True):
        bar.set(facecolor=style["color"], hatch=_HATCHES[style["linestyle"]], edgecolor="white")
    labels = ["-" if math.isnan(db) else f"{db:.1f}" for db in decibels]
    noted = ["*" if row.notes else "" for row in rows]
    bars.bar_label(patches, [label + star for label, star in zip(labels, noted, strict=True)], padding=3)
    bars.set_yticks(range(len(names)), names)
    bars.set_ylim(max(len(names), 1) - 0.5, -0.5)
    bars.margins(x=0.1)
    bars.set_axisbelow(True)
    bars.set(title="SQNR in dB" + (" (*: see the notes in the table)" if any(noted) else ""))


_COLORS = {
    (FloatScaling, 8): "#1f77b4",
    (PowerScaling, 8): "#e0700b",
    (PowerScaling, 6): "#2a9a3a",
    (PowerScaling, 4): "#d62757",
    (TwoLevelScaling, 4): "#7a52c7",
}
"""Color of each family of formats: scaling method and code width."""
_TINT = 0.45  # share of white in the color of E5M2 and E3M2, the second element formats of their families
_HATCHES = {"-": "", "--": "//", ":": ".."}
_MARKERS = "os^Dv<>P*X"


def line_styles(formats: Sequence[Format]) -> list[dict[str, Any]]:
    """Return the matplotlib line style of each format.

    The color is the family, lighter for its second element format. The line is solid for one scale per tensor, dashed
    for 1-D blocks and dotted for 2-D blocks. Formats that share both differ in their markers. Lines that coincide stay
    visible because earlier ones are wider.
    """
    styles: list[dict[str, Any]] = []
    for i, fmt in enumerate(formats):
        color = _COLORS[type(fmt.scaling), fmt.element.bits]
        if fmt.element in (E5M2, E3M2):
            color = _lighten(color)
        look = {"color": color, "linestyle": "-" if fmt.per_tensor else ":" if fmt.shares_codes else "--"}
        alike = sum(look.items() <= style.items() for style in styles)
        part = i / max(len(formats) - 1, 1)
        marker = _MARKERS[alike % len(_MARKERS)]
        styles.append({**look, "marker": marker, "linewidth": 3 - 1.5 * part, "markersize": 8 - 4 * part})
    return styles


def _lighten(color: str) -> str:
    channels = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(value + (255 - value) * _TINT):02x}" for value in channels)


def bar_chart(names: Sequence[str], parts: Mapping[str, Sequence[float]]) -> Figure:
    """Draw horizontal bars: a column of axes per part, a row per name."""
    figure: Figure = load("matplotlib.figure", "plot").Figure(
        figsize=(11, 1 + BAR * max(len(names), 1)), layout="constrained"
    )
    columns = figure.subplots(1, len(parts), sharey=True, squeeze=False)[0]
    for axes, (title, values) in zip(columns, parts.items(), strict=True):
        patches = axes.barh(range(len(names)), [value if math.isfinite(value) else 0 for value in values])
        axes.bar_label(patches, ["-" if math.isnan(value) else f"{value:.3g}" for value in values], padding=3)
        axes.margins(x=0.2)
        axes.set(title=title)
    columns[0].set_yticks(range(len(names)), names)
    columns[0].set_ylim(max(len(names), 1) - 0.5, -0.5)
    return figure


def line_chart(lines: Mapping[str, Mapping[int, float]], title: str, below: str) -> Figure:
    """Draw a line per name over integer positions, on a logarithmic axis if all values are positive."""
    figure: Figure = load("matplotlib.figure", "plot").Figure(figsize=(11, 4.5), layout="constrained")
    axes = figure.subplots()
    for i, (name, line) in enumerate(lines.items()):
        style = ("-", "--", ":", "-.")[i // 10 % 4]
        axes.plot(list(line), list(line.values()), label=name, color=f"C{i % 10}", linestyle=style)
    values = [value for line in lines.values() for value in line.values() if math.isfinite(value)]
    if values and min(values) > 0:
        axes.set_yscale("log")
    axes.set(title=title, xlabel=below)
    axes.grid(alpha=0.3)
    if lines:
        _add_legend(axes, len(lines))
    return figure


def tradeoff_chart(
    name: str,
    curve: Sequence[tuple[float, float]],
    dots: Mapping[str, tuple[float, float]],
    ring: tuple[float, float] | None,
) -> Figure:
    """Draw a curve, dots that the legend names, and a ring around the plan."""
    figure: Figure = load("matplotlib.figure", "plot").Figure(figsize=(11, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot([x for x, _ in curve], [y for _, y in curve], label=name, color="#0969da")
    for i, (each, (x, y)) in enumerate(dots.items()):
        axes.plot(x, y, _MARKERS[(i + i // 10) % len(_MARKERS)], color=f"C{i % 10}", linestyle="", label=each)
    if ring is not None:
        axes.plot(*ring, "o", markersize=14, fillstyle="none", color="#1a7f37", label="the plan")
    axes.grid(alpha=0.3)
    _add_legend(axes, len(dots) + 2)
    return figure


def histograms(parts: Mapping[str, Mapping[str, int]]) -> Figure:
    """Draw one histogram per part, one below the other."""
    figure: Figure = load("matplotlib.figure", "plot").Figure(figsize=(11, 3.2 * len(parts)), layout="constrained")
    for axes, (title, counts) in zip(figure.subplots(len(parts), 1, squeeze=False)[:, 0], parts.items(), strict=True):
        axes.bar(range(len(counts)), list(counts.values()))
        step = -(-len(counts) // 32)
        axes.set_xticks(range(0, len(counts), step), list(counts)[::step])
        axes.set(title=title)
    return figure
