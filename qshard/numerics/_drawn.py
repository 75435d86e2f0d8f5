"""Plots of results that are rows: bars and lines. matplotlib is imported when one is drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from qshard.numerics._plots import ENTRIES
from qshard.numerics._progress import load

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BAR = 0.24
"""Inches."""


def bars_of(names: Sequence[str], parts: Mapping[str, Sequence[float]]) -> Figure:
    """Bars beside each other: for each part a column of bars, for each name a row."""
    figure: Figure = load("matplotlib.figure", "plot").Figure(
        figsize=(11, 1 + BAR * max(len(names), 1)), layout="constrained"
    )
    columns = figure.subplots(1, len(parts), sharey=True, squeeze=False)[0]
    for axes, (title, values) in zip(columns, parts.items(), strict=True):
        drawn = axes.barh(range(len(names)), [value if math.isfinite(value) else 0 for value in values])
        axes.bar_label(drawn, ["-" if math.isnan(value) else f"{value:.3g}" for value in values], padding=3)
        axes.margins(x=0.2)
        axes.set(title=title)
    columns[0].set_yticks(range(len(names)), names)
    columns[0].set_ylim(max(len(names), 1) - 0.5, -0.5)
    return figure


def lines_of(lines: Mapping[str, Mapping[int, float]], title: str, below: str) -> Figure:
    """A line for each name, over whole numbers; on a logarithmic axis where all values allow it."""
    figure: Figure = load("matplotlib.figure", "plot").Figure(figsize=(11, 4.5), layout="constrained")
    axes = figure.subplots()
    for i, (name, line) in enumerate(lines.items()):
        axes.plot(list(line), list(line.values()), label=name, color=f"C{i % 10}", linestyle="-" if i < 10 else "--")
    values = [value for line in lines.values() for value in line.values() if math.isfinite(value)]
    if values and min(values) > 0:
        axes.set_yscale("log")
    axes.set(title=title, xlabel=below)
    axes.grid(alpha=0.3)
    if lines:
        columns = -(-len(lines) // ENTRIES)
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), ncols=columns, fontsize="small", frameon=False)
    return figure


def columns_of(parts: Mapping[str, Mapping[str, int]]) -> Figure:
    """Histograms below each other."""
    figure: Figure = load("matplotlib.figure", "plot").Figure(figsize=(11, 3.2 * len(parts)), layout="constrained")
    for axes, (title, counts) in zip(figure.subplots(len(parts), 1, squeeze=False)[:, 0], parts.items(), strict=True):
        axes.bar(range(len(counts)), list(counts.values()))
        step = -(-len(counts) // 32)
        axes.set_xticks(range(0, len(counts), step), list(counts)[::step])
        axes.set(title=title)
    return figure
