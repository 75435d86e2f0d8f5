"""What a command says that cannot go on: one line."""

from __future__ import annotations

from qshard._cli import USAGE

LONGEST = 100
"""Characters of a name that are shown."""


class Failure(Exception):
    """What is wrong, what was given, what to do: printed as one line, and the end of the process.

    Attributes:
      status: of the process: 1, or 2 if the command was not asked rightly.
    """

    def __init__(self, text: str, status: int = 1) -> None:
        super().__init__(text)
        self.status = status


class Misuse(Failure):
    """A `Failure` of who gave the command: another argument is what helps."""

    def __init__(self, text: str) -> None:
        super().__init__(text, USAGE)


def printable(text: object) -> str:
    r"""Text as one line that no terminal obeys: what is not printable is escaped.

    >>> printable("a\x1b[2Jb\n")
    'a\\x1b[2Jb\\n'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text))


def quote(name: object) -> str:
    """A name for one line of text: printable, and without its middle if it is very long.

    >>> len(quote("x" * 1000))
    100
    """
    text, half = printable(name), (LONGEST - 3) // 2
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3 - half]}...{text[-half:]}"


def count_of(count: int, noun: str) -> str:
    """A number of things.

    >>> count_of(1, "tensor"), count_of(2, "tensor")
    ('1 tensor', '2 tensors')
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"
