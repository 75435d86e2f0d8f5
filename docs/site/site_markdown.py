"""Pages as Python-Markdown wants them: what belongs to an item of a list is indented by 4; GitHub takes less."""

from __future__ import annotations

import re

INDENT = 4
"""Spaces before what belongs to an item."""

_ITEM = re.compile(r"^([-*]|\d+\.) +(?=\S)")
_FENCE = re.compile(r"^(```+)")


def with_indented_lists(text: str) -> str:
    """Markdown in which lines that belong to an item of a list, and in it to an item of a list, are indented by 4."""
    found: list[str] = []
    lines = text.splitlines()
    fence = ""
    at = 0
    while at < len(lines):
        opened = _FENCE.match(lines[at])
        if opened and not fence:
            fence = opened[1]
        elif fence and lines[at].rstrip() == fence:
            fence = ""
        item = None if fence else _ITEM.match(lines[at])
        if not item:
            found.append(lines[at])
            at += 1
            continue
        width = item.end()
        end = _end_of_item(lines, at, width)
        inside = [line[width:] if line[:width].isspace() else line for line in lines[at + 1 : end]]
        head, *rest = with_indented_lists("\n".join([lines[at][width:], *inside])).split("\n")
        found.append(item[0] + head)
        found += [" " * INDENT + line if line.strip() else "" for line in rest]
        at = end
    return "\n".join(found) + ("\n" if text.endswith("\n") else "")


def _end_of_item(lines: list[str], at: int, width: int) -> int:
    """The line after the last of an item: what is not indented as it is ends it after an empty line, or as an item."""
    end = at + 1
    for index in range(at + 1, len(lines)):
        line = lines[index]
        if not line.strip():
            continue
        within = line[:width].isspace()
        lazy = index == end and not re.match(r"([-*#|>]|\d+\.|```|<)", line)
        if not within and not lazy:
            break
        end = index + 1
    return end
