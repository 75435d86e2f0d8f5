"""Reports: statistics as a table and plots. rich and matplotlib are imported when a report is drawn."""

from __future__ import annotations

import io
import math
import shutil
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from qshard._core.validation import FormatLike, as_formats
from qshard.formats import Usage
from qshard.numerics._arrays import as_sharded
from qshard.numerics._display import WIDE, figure_as_html, load, text_as_html
from qshard.numerics._plots import report_figure
from qshard.numerics._statistics import Note, Stats, fitting, measure

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table


def report(
    x: Any,
    formats: Iterable[FormatLike] | FormatLike | None = None,
    usage: Usage = Usage.ROWWISE,
    *,
    title: str | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> Report:
    """Measure several formats like `compare`, for display: `print` the report, or end a notebook cell with it.

    Args:
      x: as in `compare`.
      formats: as in `compare`. Default formats that do not support `x` are listed with the reason.
      usage: as in `compare`.
      title: title of the table; by default the shape and dtype of `x`.
      seed: seed of stochastic rounding, 64 bits.
      progress: as in `compare`.

    Returns:
      A report. It is a rich renderable; in Jupyter it shows a table and three plots.

    Raises:
      ImportError: rich is not installed.

    Other errors, and sharded arrays, as in `compare`.

    >>> print(report([[0.1, 0.2, 0.3]], ["FP8_E4M3"], title="three numbers").stats[0].format)
    FP8_E4M3
    """
    load("rich", "report")
    whole = as_sharded(x, "report")
    left_out: dict[str, str] = {}
    if formats is None:
        chosen, left_out = fitting(whole, usage, "report")
    else:
        chosen = as_formats(formats, "report")
    if title is None:
        title = f"{' x '.join(map(str, whole.shape)) or 'one number'}, {whole.dtype.removeprefix('torch.')}"
        title += ", columnwise" if usage is Usage.COLUMNWISE else ""
    rows = measure(whole, chosen, usage, seed, progress, "report")
    return Report(title=title, stats=tuple(rows), left_out=left_out)


@dataclass(frozen=True, kw_only=True, repr=False)
class Report:
    """Statistics of several formats, as a table and plots.

    The printed table is at most as wide as the terminal. In a narrow terminal some columns are omitted, and a line
    below the table names them. Letters beside the SQNR refer to the notes below the table, which are `Stats.notes`.

    Attributes:
      title: title of the table.
      stats: statistics, one row each.
      left_out: name of a format that does not support the tensor -> reason.
    """

    title: str
    stats: tuple[Stats, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield from self._parts(options.max_width, options.ascii_only)

    def __repr__(self) -> str:
        """Return the table in ASCII, as wide as the terminal or `COLUMNS`, else as wide as needed."""
        width = shutil.get_terminal_size((WIDE, 24)).columns
        console = self._console(width, color_system=None)
        console.print(*self._parts(width, ascii_only=True), sep="")
        return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())

    def _repr_html_(self) -> str:
        text = text_as_html(lambda console: console.print(self))
        return text + figure_as_html(self.figure(), "SQNR, errors and scales")

    def _parts(self, width: int, ascii_only: bool) -> Iterator[RenderableType]:
        Text = load("rich.text", "report").Text
        yield Text(self.title, style="bold")
        table, left_out, taken = fit_table(self.stats, width, ascii_only)
        yield table
        lines = [f"left out: {line}" for line in group_refusals(self.left_out)]
        if left_out:
            lines.append(f"not shown at a width of {width}: {', '.join(left_out)}")
        yield footnotes(self.stats, lines, min(width, max(taken, 80)))

    def _console(self, width: int, **options: Any) -> Any:
        # Not as Jupyter, so that rich writes to the file instead of the notebook.
        options = {"file": io.StringIO(), "width": width, "force_jupyter": False, **options}
        return load("rich.console", "report").Console(**options)

    def figure(self) -> Figure:
        """Draw three plots: SQNR, mean relative error by exponent, and the histogram of scales.

        Raises:
          ImportError: matplotlib is not installed.
        """
        return report_figure(self.stats)


class _Column(NamedTuple):
    """A column of the table. Each word of the heading may get its own line.

    Attributes:
      need: priority: in a narrow table, columns of the lowest priority are omitted first. 0: never omitted.
      when: condition on a row; the column is shown if any row meets it. None: always shown.
    """

    heading: str
    cell: Callable[[Stats], str]
    need: int = 0
    when: Callable[[Stats], Any] | None = None


def percent(share: float, digits: int = 2) -> str:
    """Format a share as a percentage.

    >>> percent(0.5), percent(1e-9), percent(math.nan)
    ('50.00%', '<0.01%', '-')
    """
    if math.isnan(share):
        return "-"
    least = 10.0**-digits
    return f"<{least:.{digits}f}%" if 0 < 100 * share < least else f"{share:.{digits}%}"


def _share(share: float) -> str:
    return percent(share) if share else "-"


def one_decimal(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1f}"


def _range(histogram: Mapping[int, int]) -> str:
    if not histogram:
        return "-"
    low, high = min(histogram), max(histogram)
    return f"{low}" if low == high else f"{low} to {high}"


def _letters(rows: Sequence[Stats]) -> dict[Note, str]:
    """Assign a letter to each note, in order of appearance."""
    notes = dict.fromkeys(note for row in rows for note in row.notes)
    return dict(zip(notes, string.ascii_lowercase, strict=False))


def _columns(rows: Sequence[Stats]) -> list[_Column]:
    letters = _letters(rows)
    columns = [
        _Column("format", lambda row: str(row.format)),
        _Column("bits", lambda row: f"{row.bits_per_element:.3f}" if row.bits_per_element else "-", 5),
        _Column("SQNR dB", lambda row: one_decimal(row.sqnr_db)),
        _Column("", lambda row: ",".join(letters[note] for note in row.notes), when=lambda row: row.notes),
        _Column(
            "not counted", lambda row: _share(1 - row.counted), 9, lambda row: row.nonfinite_given or row.nonfinite_made
        ),
        _Column("mean error", lambda row: percent(row.mean_relative_error), 10),
        _Column("max error", lambda row: percent(row.max_relative_error, 1), 1),
        _Column("zeros made", lambda row: _share(row.zeros_made), 8),
        _Column("saturated", lambda row: _share(row.saturated), 7),
        _Column("worst block dB", lambda row: one_decimal(row.worst_block_db), 6, lambda row: row.format.block),
        _Column("subnormal", lambda row: _share(row.subnormal), 2),
        _Column("non-finite made", lambda row: _share(row.nonfinite_made), 3, lambda row: row.nonfinite_made),
        _Column("scale exponents", lambda row: _range(row.scale_histogram), 4),
    ]
    return [column for column in columns if column.when is None or any(map(column.when, rows))]


def fit_table(rows: Sequence[Stats], width: int, ascii_only: bool) -> tuple[Table, list[str], int]:
    """Build a table that fits `width`, and return it with the omitted headings and its width.

    To save width, the gap between columns shrinks first, then names wrap between options, then columns are omitted.
    Names are never truncated.
    """
    columns = _columns(rows)
    left_out: list[str] = []
    for gap in (2, 1):
        table = _table(columns, rows, gap, ascii_only)
        least, most = _widths(table)
        if most <= width:
            return table, left_out, most
    while least > width and any(column.need for column in columns):
        column = min((column for column in columns if column.need), key=lambda column: column.need)
        columns.remove(column)
        left_out.append(column.heading)
        table = _table(columns, rows, 1, ascii_only)
        least, most = _widths(table)
    return table, left_out, min(most, width)


def _table(columns: Sequence[_Column], rows: Sequence[Stats], gap: int, ascii_only: bool) -> Table:
    """Build a rich table that wraps names and nothing else."""
    box = load("rich.box", "report")
    lines = box.Box(str(box.SIMPLE_HEAD).replace("\N{BOX DRAWINGS LIGHT HORIZONTAL}", "-"), ascii=True)
    table: Table = load("rich.table", "report").Table(
        box=lines if ascii_only else box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, gap - 1, 0, 0)
    )
    for i, column in enumerate(columns):
        heading = "\n".join(column.heading.split()) if i else column.heading
        justify: Literal["left", "right"] = "left" if column.heading in ("format", "", "scale exponents") else "right"
        table.add_column(heading, justify=justify, vertical="top", overflow="fold", no_wrap=i > 0)
    Text = load("rich.text", "report").Text
    for row in rows:
        table.add_row(*(Text(column.cell(row)) for column in columns))
    return table


def _widths(table: Table) -> tuple[int, int]:
    """Return the width of a table with wrapped names, and with unwrapped names."""
    console = load("rich.console", "report").Console(width=WIDE, force_jupyter=False)
    measured: tuple[int, int] = load("rich.measure", "report").Measurement.get(console, console.options, table)
    return measured


def footnotes(rows: Sequence[Stats], lines: Sequence[str], width: int) -> RenderableType:
    """Build the text below the table: notes with their letters, then other lines."""
    grid = load("rich.table", "report").Table.grid(padding=(0, 1, 0, 0))
    Text = load("rich.text", "report").Text
    for note, letter in _letters(rows).items():
        grid.add_row(letter, Text(str(note)))
    below = [Text(line) for line in lines]
    group: Any = load("rich.console", "report").Group(*([grid] if grid.rows else []), *below)
    constrained: RenderableType = load("rich.constrain", "report").Constrain(group, width)
    return constrained


def group_refusals(left_out: Mapping[str, str]) -> list[str]:
    """Return one line per reason, listing the formats that do not support the tensor for that reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        why = reason.removeprefix(f"{name}: ").replace(f" of {name};", ";")
        by_reason.setdefault(why, []).append(name)
    return [f"{', '.join(names)}: {why}" for why, names in by_reason.items()]
