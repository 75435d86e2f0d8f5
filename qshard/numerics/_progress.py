"""How far a measurement is, for whom waits for it."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

Advance = Callable[[int], None]
Update = Callable[[str, int], None]
"""Shows what is in work, and how many elements are done."""

LONG = 2**26
"""Elements of all formats together, from which on it takes a second or more."""
EACH = 0.1
"""Seconds between two updates that a reader sees."""


@contextlib.contextmanager
def progress_of(show: bool | None, names: list[str], size: int, op: str) -> Iterator[Advance]:
    """Shows which of several things, of `size` elements each, is in work. What it yields is told of elements done.

    Args:
      show: whether to; None for yes if it takes long, rich is there, and so is a terminal or Jupyter.
      op: names the caller in errors.
    """
    total = len(names) * size
    shown = None
    if total and (show or (show is None and total >= LONG and importlib.util.find_spec("rich") is not None)):
        shown = display(load("rich.console", op).Console(stderr=True), total, lines=bool(show))
    if shown is None:
        yield lambda elements: None
        return
    done = 0
    with shown as update:

        def advance(elements: int) -> None:
            nonlocal done
            done += elements
            i = min(done // size, len(names) - 1)
            update(f"{names[i]}, {i + 1} of {len(names)}", done)

        advance(0)
        yield advance


def display(console: Any, total: int, lines: bool) -> contextlib.AbstractContextManager[Update] | None:
    """What shows how far a total is, as the console can; None if it cannot, and `lines` are not wanted."""
    if console.is_jupyter:
        return _in_jupyter(total)
    if console.is_terminal and not console.is_dumb_terminal:
        return _on_terminal(console, total)
    return _in_lines() if lines else None


@contextlib.contextmanager
def _on_terminal(console: Any, total: int) -> Iterator[Update]:
    rich = load("rich.progress", "progress")
    columns = [rich.TextColumn("{task.description}", markup=False), rich.BarColumn(), rich.TimeRemainingColumn()]
    # Refreshed here, since rich's own thread would outlive an interrupt.
    with rich.Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task("", total=total)

        def update(what: str, done: int) -> None:
            bar.update(task, description=what, completed=done)
            bar.refresh()

        yield _seldom(update)


@contextlib.contextmanager
def _in_jupyter(total: int) -> Iterator[Update]:
    """One line of text that changes. rich would need ipywidgets."""
    handle = load("IPython.display", "progress").display({"text/plain": ""}, raw=True, display_id=True)
    try:
        yield _seldom(lambda what, done: handle.update({"text/plain": f"{what}, {done / total:.0%}"}, raw=True))
    finally:
        handle.update({"text/plain": ""}, raw=True)


@contextlib.contextmanager
def _in_lines() -> Iterator[Update]:
    """A line for each, where lines cannot change."""
    shown = ""

    def update(what: str, done: int) -> None:
        nonlocal shown
        if what != shown:
            shown = what
            print(what, file=sys.stderr, flush=True)

    yield update


def _seldom(update: Update) -> Update:
    """`update` for a reader: when something else is in work, and else every `EACH` seconds."""
    before, last = "", 0.0

    def at_times(what: str, done: int) -> None:
        nonlocal before, last
        if what != before or time.monotonic() - last >= EACH:
            update(what, done)
            before, last = what, time.monotonic()

    return at_times


def load(module: str, op: str, install: str = "'qshard[notebooks]'") -> Any:
    """A module of the extra, or another that is needed here alone; else an error that says how to get it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.split(".")[0]
        raise ImportError(f"{op}: {package} is not installed; pip install {install}") from error
