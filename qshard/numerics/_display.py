"""Display of progress and results. Uses rich and pandas if installed; neither is required."""

from __future__ import annotations

import base64
import contextlib
import html
import importlib
import importlib.util
import io
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

Advance = Callable[[int], None]  # callback that receives the number of newly processed elements
Update = Callable[[str, int], None]
"""Callback that receives the name of the current part and the total number of processed elements."""

LONG = 2**26
"""Total number of elements, over all formats, above which progress is shown by default: about one second of work."""
WIDE = 1000  # columns of text that nothing limits
EACH = 0.1  # minimum seconds between two updates of the bar


@contextlib.contextmanager
def progress_of(show: bool | None, names: list[str], size: int, op: str) -> Iterator[Advance]:
    """Show progress over several parts of equal size, and yield a callback that counts elements.

    `show` is True (always), False (never), or None: for long work, in a terminal or Jupyter, if rich is installed.
    """
    total = len(names) * size
    if not total or not (show or (show is None and total >= LONG and importlib.util.find_spec("rich") is not None)):
        yield lambda elements: None
        return
    done = 0
    with progress_bar(total, lines=bool(show), op=op) as update:

        def advance(elements: int) -> None:
            nonlocal done
            done += elements
            i = min(done // size, len(names) - 1)
            update(f"{names[i]}, {i + 1} of {len(names)}", done)

        advance(0)
        yield advance


@contextlib.contextmanager
def progress_bar(total: int, *, lines: bool = False, op: str = "progress") -> Iterator[Update]:
    """Show a rich progress bar on standard error or in Jupyter, yield a callback that moves it, then remove it.

    With `lines`, print the name of each part on its own line where a bar cannot be drawn.
    """
    console = load("rich.console", op).Console(stderr=True)
    # Rich needs ipywidgets to draw in Jupyter.
    can_draw = importlib.util.find_spec("ipywidgets") if console.is_jupyter else console.is_interactive
    if not total or not can_draw:
        yield _print_names() if lines else lambda name, done: None
        return
    rich = load("rich.progress", op)
    columns = [rich.TextColumn("{task.description}", markup=False), rich.BarColumn(), rich.TimeRemainingColumn()]
    name_before, last = "", 0.0
    # Refresh explicitly: rich's own refresh thread would survive an interrupt.
    with rich.Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task("", total=total)

        def update(name: str, done: int) -> None:
            nonlocal name_before, last
            if name != name_before or time.monotonic() - last >= EACH:
                bar.update(task, description=name, completed=done, refresh=True)
                name_before, last = name, time.monotonic()

        yield update


def _print_names() -> Update:
    before = ""

    def update(name: str, done: int) -> None:
        nonlocal before
        if name != before:
            before = name
            print(name, file=sys.stderr, flush=True)

    return update


def load(module: str, op: str, install: str = "'qshard[notebooks]'") -> Any:
    """Import a module of an optional dependency. The ImportError has the command that installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.split(".")[0]
        raise ImportError(f"{op}: {package} is not installed; pip install {install}") from error


def text_as_html(write: Callable[[Console], None]) -> str:
    """Return what `write` prints to a rich console as HTML."""
    # nbconvert renders `pre` in the page's proportional font; aligned columns need a monospaced one.
    style = "white-space:pre;overflow-x:auto;line-height:normal;font-family:monospace"
    # Not as Jupyter, so that rich writes to the file instead of the notebook.
    options: dict[str, Any] = {"record": True, "force_jupyter": False, "highlight": False, "markup": False}
    console: Console = load("rich.console", "report").Console(file=io.StringIO(), width=WIDE, emoji=False, **options)
    write(console)
    return console.export_html(inline_styles=True, code_format=f'<pre style="{style}">{{code}}</pre>')


def figure_as_html(figure: Figure, alt: str) -> str:
    """Return a figure as an HTML image that contains its data."""
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=100)
    image = base64.b64encode(png.getvalue()).decode()
    return f'<img alt="{alt}" style="max-width:100%" src="data:image/png;base64,{image}">'


class Frame:
    """Base class of results with rows: conversion to pandas, and a table in notebooks and in `print`."""

    def records(self) -> list[dict[str, Any]]:
        """Return one dict per row, with column names as keys."""
        raise NotImplementedError

    def to_pandas(self) -> Any:
        """Return the rows as a `pandas.DataFrame`.

        Raises:
          ImportError: pandas is not installed.
        """
        return load("pandas", f"{type(self).__name__}.to_pandas", "pandas").DataFrame(self.records())

    def _cells(self) -> list[list[str]]:
        """Return the names of columns, and then the cells of each row."""
        records = self.records()
        names = list(dict.fromkeys(name for record in records for name in record))
        return [names, *([_cell(record.get(name, "")) for name in names] for record in records)]

    def __str__(self) -> str:
        rows = self._cells()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(map(str.ljust, cells, widths)).rstrip() for cells in rows)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = zip(("th", *("td",) * len(self.records())), self._cells(), strict=True)
        lines = ["".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) for tag, cells in rows]
        return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "-" if math.isnan(value) else f"{value:.4g}"
    return str(value)
