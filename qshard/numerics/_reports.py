"""Statistics to look at: a table and plots. rich and matplotlib are imported only when they are drawn."""

from __future__ import annotations

import base64
import io
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from qshard._core.validation import FormatLike, as_formats
from qshard.formats import Usage
from qshard.numerics._arrays import whole_of
from qshard.numerics._measures import Stats, fitting, measured
from qshard.numerics._plots import draw
from qshard.numerics._progress import load
from qshard.numerics._tables import footnotes, table, unplaced

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console, ConsoleOptions, RenderableType

WIDE = 1000


def report(
    x: Any,
    formats: Iterable[FormatLike] | FormatLike | None = None,
    usage: Usage = Usage.ROWWISE,
    *,
    title: str | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> Report:
    """`compare`, to be looked at: `print` it, or leave it as the last line of a notebook cell.

    Args:
      x, formats, usage, seed, progress: as for `compare`.
      title: by default, the shape and dtype of `x`.

    Returns:
      A report, which is a rich renderable and has a table and three plots in Jupyter.

    Raises:
      ImportError: rich is not installed.
      TypeError, ValueError: as for `stats`, for formats that were asked for.

    Sharded arrays: as for `stats`.

    >>> print(report([[0.1, 0.2, 0.3]], ["FP8_E4M3"], title="three numbers").stats[0].format)
    FP8_E4M3
    """
    load("rich", "report")
    whole = whole_of(x, "report")
    left_out: dict[str, str] = {}
    if formats is None:
        chosen, left_out = fitting(whole, usage, "report")
    else:
        chosen = as_formats(formats, "report")
    if title is None:
        title = f"{' x '.join(map(str, whole.shape)) or 'one number'}, {whole.dtype.removeprefix('torch.')}"
        title += ", columnwise" if usage is Usage.COLUMNWISE else ""
    rows = measured(whole, chosen, usage, seed, progress, "report")
    return Report(title=title, stats=tuple(rows), left_out=left_out)


@dataclass(frozen=True, kw_only=True, repr=False)
class Report:
    """What `report` returns.

    Printed, the table is as wide as the terminal at most: where it is narrow, columns are left out, and a line below
    says which. Letters beside SQNR are of the notes below, those of `Stats.notes`.

    Attributes:
      title: above the table.
      stats: a row each.
      left_out: name of each format that cannot hold the tensor -> why.
    """

    title: str
    stats: tuple[Stats, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield from self._parts(options.max_width, options.ascii_only)

    def __repr__(self) -> str:
        """The table in ASCII, as wide as the terminal or COLUMNS say; elsewhere as wide as it needs."""
        width = shutil.get_terminal_size((WIDE, 24)).columns
        console = self._console(width, color_system=None)
        console.print(*self._parts(width, ascii_only=True), sep="")
        return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())

    def _repr_html_(self) -> str:
        # nbconvert gives `pre` the proportional font of the page; columns need a monospace one.
        style = "white-space:pre;overflow-x:auto;line-height:normal;font-family:monospace"
        page = f'<pre style="{style}">{{code}}</pre>'
        console = self._console(WIDE, record=True)
        console.print(self)
        text = console.export_html(inline_styles=True, code_format=page)
        png = io.BytesIO()
        self.figure().savefig(png, format="png", dpi=100)
        image = base64.b64encode(png.getvalue()).decode()
        alt = "SQNR, errors and scales"
        return f'{text}<img alt="{alt}" style="max-width:100%" src="data:image/png;base64,{image}">'

    def _parts(self, width: int, ascii_only: bool) -> Iterator[RenderableType]:
        Text = load("rich.text", "report").Text
        yield Text(self.title, style="bold")
        rows, left_out, taken = table(self.stats, width, ascii_only)
        yield rows
        lines = [f"left out: {line}" for line in unplaced(self.left_out)]
        if left_out:
            lines.append(f"not shown at a width of {width}: {', '.join(left_out)}")
        yield footnotes(self.stats, lines, min(width, max(taken, 80)))

    def _console(self, width: int, **options: Any) -> Any:
        # Jupyter is told apart so that rich prints into the file, not into the notebook.
        options = {"file": io.StringIO(), "width": width, "force_jupyter": False, **options}
        return load("rich.console", "report").Console(**options)

    def figure(self) -> Figure:
        """Three plots: SQNR, relative error by size of element, histogram of scales.

        Raises:
          ImportError: matplotlib is not installed.
        """
        return draw(self.stats)
