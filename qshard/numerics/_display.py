"""Display of progress and of results. rich and pandas are used where they are installed; nothing here needs them."""

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

Advance = Callable[[int], None]
"""Is told of elements as they are done."""
Update = Callable[[str, int], None]
"""Shows the name of the current part, and how many elements are done."""

LONG = 2**26
"""Elements of all formats together, from which on it takes a second or more."""
EACH = 0.1
"""Seconds between two updates that a reader sees."""


@contextlib.contextmanager
def progress_of(show: bool | None, names: list[str], size: int, op: str) -> Iterator[Advance]:
    """Progress over several parts of `size` elements each. Yields a function that takes the number of new elements.

    Args:
      show: True for always; None for long work where rich is installed, on a terminal or in Jupyter.
      op: names the caller in errors.
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
    """A bar of rich on standard error or in Jupyter, which goes when all is done.

    Args:
      total: elements.
      lines: print the name of each part in a line of its own where no bar can be shown. Else nothing is shown there.
      op: names the caller in errors.
    """
    console = load("rich.console", op).Console(stderr=True)
    # In Jupyter rich draws with ipywidgets.
    can_draw = importlib.util.find_spec("ipywidgets") if console.is_jupyter else console.is_interactive
    if not total or not can_draw:
        yield _print_names() if lines else lambda name, done: None
        return
    rich = load("rich.progress", op)
    columns = [rich.TextColumn("{task.description}", markup=False), rich.BarColumn(), rich.TimeRemainingColumn()]
    name_before, last = "", 0.0
    # Refreshed here, since rich's own thread would outlive an interrupt.
    with rich.Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task("", total=total)

        def update(name: str, done: int) -> None:
            nonlocal name_before, last
            if name != name_before or time.monotonic() - last >= EACH:
                bar.update(task, description=name, completed=done, refresh=True)
                name_before, last = name, time.monotonic()

        yield update


def _print_names() -> Update:
    """Prints the name of each part once."""
    before = ""

    def update(name: str, done: int) -> None:
        nonlocal before
        if name != before:
            before = name
            print(name, file=sys.stderr, flush=True)

    return update


def load(module: str, op: str, install: str = "'qshard[notebooks]'") -> Any:
    """Imports a module of the extra `notebooks`, or of another package.

    Raises:
      ImportError: it is not installed; the error says how to get it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.split(".")[0]
        raise ImportError(f"{op}: {package} is not installed; pip install {install}") from error


class Frame:
    """A result that is rows, for pandas and for notebooks."""

    def records(self) -> list[dict[str, Any]]:
        """A dict for each row, with the names of its columns."""
        raise NotImplementedError

    def to_pandas(self) -> Any:
        """The rows as a `pandas.DataFrame`.

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
