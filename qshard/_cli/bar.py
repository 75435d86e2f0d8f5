"""How far a command is, on a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console

from qshard.numerics._progress import Update, display


@contextlib.contextmanager
def bar(total: int) -> Iterator[Update]:
    """Shows, where standard error is a terminal, what is in work, and how much of `total` is done."""
    shown = display(Console(stderr=True), total, lines=False) if total else None
    if shown is None:
        yield lambda what, done: None
        return
    with shown as update:
        yield update
