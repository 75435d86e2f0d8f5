"""Docstrings as griffe and Markdown want them: doctests as code, an entry for each argument, results as prose."""

from __future__ import annotations

import inspect
import re

SECTIONS = ("Args:", "Attributes:")
RETURNS = "Returns:"
NAMED = re.compile(r"^(\w+(?:, \w+)*):(?= )")
ENTRY = 2
"""Spaces before the name of an argument."""
SHARED = re.compile(rf"^ {{{ENTRY}}}(\w+(?:, \w+)+): (.*)$")


def as_markdown(text: str) -> str:
    return "\n".join(_fenced(_told(_apart(inspect.cleandoc(text).splitlines()))))


def _fenced(lines: list[str]) -> list[str]:
    """A doctest goes on to the next empty line."""
    found, open_at = [], None
    for line in [*lines, ""]:
        indent = line[: len(line) - len(line.lstrip())]
        if open_at is None and line.lstrip().startswith(">>> "):
            open_at = indent
            found.append(f"{indent}```pycon")
        elif open_at is not None and not line.strip():
            found.append(f"{open_at}```")
            open_at = None
        found.append(line)
    return found[:-1]


def _told(lines: list[str]) -> list[str]:
    """What is returned is prose, of which griffe would take all before a colon as a type; or entries, a list."""
    found, within = [], False
    for line in lines:
        if line.strip() and not line.startswith(" "):
            within = line == RETURNS
            found += [f"**{RETURNS}**", ""] if within else [line]
        elif within:
            found.append(NAMED.sub(r"- `\1`:", line[ENTRY:]))
        else:
            found.append(line)
    return found


def _apart(lines: list[str]) -> list[str]:
    """`a, b: text` as `a: text`, and after it `b: see a.`"""
    found: list[str] = []
    later: list[str] = []
    within = False
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if not line.strip() or indent <= ENTRY:  # The entry before has ended.
            found += later
            later = []
        if line.strip() and not indent:
            within = line in SECTIONS
        shared = SHARED.match(line) if within else None
        if shared:
            first, *others = shared[1].split(", ")
            later = [f"{' ' * ENTRY}{other}: see `{first}`." for other in others]
            line = f"{' ' * ENTRY}{first}: {shared[2]}"
        found.append(line)
    return found + later
