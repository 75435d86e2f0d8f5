"""Names of tensors and files as text in errors. Files of others may have any names."""

from __future__ import annotations

LONGEST = 100  # maximum length of a displayed name


def printable(text: object) -> str:
    r"""Return text as one line that is safe on a terminal: nonprintable characters are escaped.

    >>> printable("a\x1b[2Jb\n")
    'a\\x1b[2Jb\\n'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text))


def quote(name: object) -> str:
    """Return a name as printable text. If it is very long, its middle is replaced by dots.

    >>> len(quote("x" * 1000))
    100
    """
    text, half = printable(name), (LONGEST - 3) // 2
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3 - half]}...{text[-half:]}"


def count_of(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
