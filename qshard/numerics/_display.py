"""Display of progress and results. Uses rich and pandas if installed; neither is required."""

from __future__ import annotations

import contextlib
import html
import importlib
import importlib.util
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

Advance = Callable[[int], None]  # callback that receives the number of newly processed elements
Update = Callable[[str, int], None]
"""Callback that receives the name of the current part and the total number of processed elements."""

LONG = 2**26
"""Total number of elements, over all formats, above which progress is shown by default: about one second of work."""
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


class Frame:
    """Base class of results with rows: conversion to pandas, and an HTML table in notebooks."""

    def records(self) -> list[dict[str, Any]]:
        """Return one dict per row, with column names as keys."""
        raise NotImplementedError

    def to_pandas(self) -> Any:
        """Return the rows as a `pandas.DataFrame`.

        Raises:
          ImportError: pandas is not installed.
        """
        return load("pandas", f"{type(self).__name__}.to_pandas", "pandas").DataFrame(self.records())

    def _repr_html_(self) -> str:
        records = self.records()
        names = list(dict.fromkeys(name for record in records for name in record))
        rows = [("th", names), *(("td", [_cell(record.get(name, "")) for name in names]) for record in records)]
        lines = ["".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) for tag, cells in rows]
        return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "-" if math.isnan(value) else f"{value:.4g}"
    return str(value)
