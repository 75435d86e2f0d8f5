"""The table of a report: columns that fit, and what is to be known of its rows in words below."""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from qshard.numerics._measures import Note, Stats
from qshard.numerics._progress import load

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


class _Column(NamedTuple):
    """One column.

    Attributes:
      heading: its words; each may have a line of its own.
      cell: what it says of a row.
      need: what is left out first where there is no room: the smallest. 0 for a column that always stays.
      when: only if any row has this; None for always.
    """

    heading: str
    cell: Callable[[Stats], str]
    need: int = 0
    when: Callable[[Stats], Any] | None = None


def percent(share: float, digits: int = 2) -> str:
    """A share in a table.

    >>> percent(0.5), percent(1e-9), percent(math.nan)
    ('50.00%', '<0.01%', '-')
    """
    if math.isnan(share):
        return "-"
    least = 10.0**-digits
    return f"<{least:.{digits}f}%" if 0 < 100 * share < least else f"{share:.{digits}%}"


def _share(share: float) -> str:
    return percent(share) if share else "-"


def _decibels(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1f}"


def _range(histogram: Mapping[int, int]) -> str:
    if not histogram:
        return "-"
    low, high = min(histogram), max(histogram)
    return f"{low}" if low == high else f"{low} to {high}"


def _letters(rows: Sequence[Stats]) -> dict[Note, str]:
    """A letter for each note of any row, in the order in which they come."""
    notes = dict.fromkeys(note for row in rows for note in row.notes)
    return dict(zip(notes, string.ascii_lowercase, strict=False))


def _columns(rows: Sequence[Stats]) -> list[_Column]:
    letters = _letters(rows)
    columns = [
        _Column("format", lambda row: str(row.format)),
        _Column("bits", lambda row: f"{row.bits_per_element:.3f}" if row.bits_per_element else "-", 5),
        _Column("SQNR dB", lambda row: _decibels(row.sqnr_db)),
        _Column("", lambda row: ",".join(letters[note] for note in row.notes), when=lambda row: row.notes),
        _Column(
            "not counted", lambda row: _share(1 - row.counted), 9, lambda row: row.nonfinite_given or row.nonfinite_made
        ),
        _Column("mean error", lambda row: percent(row.mean_relative_error), 10),
        _Column("max error", lambda row: percent(row.max_relative_error, 1), 1),
        _Column("zeros made", lambda row: _share(row.zeros_made), 8),
        _Column("saturated", lambda row: _share(row.saturated), 7),
        _Column("worst block dB", lambda row: _decibels(row.worst_block_db), 6, lambda row: row.format.block),
        _Column("subnormal", lambda row: _share(row.subnormal), 2),
        _Column("non-finite made", lambda row: _share(row.nonfinite_made), 3, lambda row: row.nonfinite_made),
        _Column("scale exponents", lambda row: _range(row.scale_histogram), 4),
    ]
    return [column for column in columns if column.when is None or any(map(column.when, rows))]


def table(rows: Sequence[Stats], width: int, ascii_only: bool) -> tuple[Table, list[str], int]:
    """The table, the headings of the columns for which there is no room, and how wide it is.

    What gives way to a narrow width, in turn: the space between columns; names in one line, which then break between
    options; columns. No name is ever cut.
    """
    columns, left_out = _columns(rows), []
    for gap, in_one_line in ((2, True), (1, True), (1, False)):
        taken = _taken(columns, rows, gap, in_one_line)
        if taken <= width:
            break
    while taken > width and any(column.need for column in columns):
        column = min((column for column in columns if column.need), key=lambda column: column.need)
        columns.remove(column)
        left_out.append(column.heading)
        taken = _taken(columns, rows, gap, in_one_line)

    box = load("rich.box", "report")
    rule = "-" if ascii_only else "\N{BOX DRAWINGS LIGHT HORIZONTAL}"
    lines = ["    ", "    ", f" {rule * 2} ", *["    "] * 5]
    made: Table = load("rich.table", "report").Table(
        box=box.Box("\n".join(lines) + "\n", ascii=ascii_only),
        show_edge=False,
        pad_edge=False,
        padding=(0, gap - 1, 0, 0),
    )
    for i, column in enumerate(columns):
        text = column.heading in ("format", "", "scale exponents")
        size = None if i == 0 else _width(column, rows)
        made.add_column(
            "\n".join(column.heading.split()) if size else column.heading,
            justify="left" if text else "right",
            vertical="top",
            overflow="fold",
            min_width=size,
        )
    Text = load("rich.text", "report").Text
    for row in rows:
        made.add_row(*(Text(column.cell(row)) for column in columns))
    return made, left_out, taken


def _taken(columns: Sequence[_Column], rows: Sequence[Stats], gap: int, in_one_line: bool) -> int:
    names = [str(row.format) for row in rows]
    parts = names if in_one_line else [part for name in names for part in name.split(" ")]
    first = max(map(len, ["format", *parts]))
    return first + sum(gap + _width(column, rows) for column in columns[1:])


def _width(column: _Column, rows: Sequence[Stats]) -> int:
    return max(map(len, [*column.heading.split(), *(column.cell(row) for row in rows)]))


def footnotes(rows: Sequence[Stats], lines: Sequence[str], width: int) -> RenderableType:
    """Notes with their letters, then other lines."""
    grid = load("rich.table", "report").Table.grid(padding=(0, 1, 0, 0))
    Text = load("rich.text", "report").Text
    for note, letter in _letters(rows).items():
        grid.add_row(letter, Text(str(note)))
    below = [Text(line) for line in lines]
    group: Any = load("rich.console", "report").Group(*([grid] if grid.rows else []), *below)
    constrained: RenderableType = load("rich.constrain", "report").Constrain(group, width)
    return constrained


def unplaced(left_out: Mapping[str, str]) -> list[str]:
    """Formats that cannot hold the tensor, those of one reason in a line."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        why = reason.removeprefix(f"{name}: ").replace(f" of {name};", ";")
        by_reason.setdefault(why, []).append(name)
    return [f"{', '.join(names)}: {why}" for why, names in by_reason.items()]
