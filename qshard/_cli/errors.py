"""Failures of commands, each reported in one line."""

from __future__ import annotations

from qshard._cli import USAGE


class Failure(Exception):
    """A failure that ends the process with exit status `status`. Its line names problem, argument and remedy."""

    def __init__(self, text: str, status: int = 1) -> None:
        super().__init__(text)
        self.status = status


class Misuse(Failure):
    """A `Failure` caused by the arguments: calling the command differently resolves it."""

    def __init__(self, text: str) -> None:
        super().__init__(text, USAGE)
