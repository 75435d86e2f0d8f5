"""The page of ops, from the rows and comments of `ffi/ops.def` and the comments above op bodies."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[2]
FIRST_GROUP = "Tensors"
"""Title of the first group of ops.def, whose comment explains the notation instead."""


class Group(NamedTuple):
    """Consecutive rows of ops.def under one comment."""

    title: str
    text: str
    ops: list[str]


def groups() -> tuple[list[str], list[Group]]:
    """Return the lines of the first comment of ops.def, and its groups of rows."""
    text = (REPOSITORY / "ffi" / "ops.def").read_text()
    notation, *rest = re.split(r"\n(?=QSHARD_OP\()", text, maxsplit=1)
    found: list[Group] = [Group(FIRST_GROUP, "", [])]
    for comment, op in re.findall(r"((?:^//.*\n)*)^QSHARD_OP\((\w+),", rest[0], re.MULTILINE):
        if comment:
            said = prose(comment)
            found.append(Group(re.split(r"[.:,]", said)[0], said, []))
        found[-1].ops.append(op)
    return notation.splitlines(), found


def prose(comment: str) -> str:
    """Turn a C++ comment into a paragraph of Markdown, with the symbols of arithmetic escaped."""
    text = " ".join(line.removeprefix("//").strip() for line in comment.splitlines()).strip()
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([*_<\[\]|])", r"\\\1", part) for part in parts)


def bodies() -> dict[str, str]:
    """Return the description of each op: the comment above its body, or above the first of adjacent bodies."""
    found: dict[str, str] = {}
    for path in sorted((REPOSITORY / "ffi" / "ops").rglob("*.cc")):
        comment, together = "", False
        for line in path.read_text().splitlines():
            named = re.match(r"QSHARD_DEFINE_OP\((\w+)\)", line)
            if named:
                found[named[1]] = prose(comment)
                together = True
            elif line.startswith("//"):
                comment = line if together or not comment else f"{comment}\n{line}"
                together = False
            elif not line:
                comment, together = "", False
    return found


def page() -> str:
    """Return the page: a table of all ops, the notation, then each op."""
    from qshard import _ffi

    rows = {name: (operands, attributes) for name, operands, attributes in _ffi.ops()}
    notation, each = groups()
    does = bodies()
    lines = [
        "# Ops",
        "",
        "Each op is an XLA FFI handler, for CPUs and for CUDA: `qshard.jax.ops.<name>` in JAX,",
        "`torch.ops.qshard.<name>` in PyTorch. `qshard.op_table` has these rows as data. Ops on lists, `x[]`,",
        "change in place what they write.",
        "",
        *at_a_glance(each, rows),
        "## Notation",
        "",
        *notation_of(notation),
    ]
    for group in each:
        lines += [f"## {group.title}", "", group.text, ""]
        for op in group.ops:
            lines += [f"### {op}", "", does[op], "", *table_of(*rows[op])]
    return "\n".join(lines)


def at_a_glance(each: list[Group], rows: dict[str, tuple[str, str]]) -> list[str]:
    lines = ["| | op | takes | returns |", "| --- | --- | --- | --- |"]
    for group in each:
        for place, op in enumerate(group.ops):
            takes, gives = ([name for name, _ in side] for side in sides(rows[op][0]))
            title = "" if place else group.title
            lines.append(f"| {title} | [`{op}`](#{op}) | {', '.join(takes)} | {', '.join(gives)} |")
    return [*lines, ""]


def notation_of(comment: list[str]) -> list[str]:
    """Return the first comment of ops.def as paragraphs. A line that begins with a term starts a new one."""
    lines: list[str] = []
    for line in comment:
        text = line.removeprefix("//").strip()
        if text.startswith("QSHARD_OP("):
            lines += ["", f"    {text}", ""]
        elif re.match(r"(?:Operands|Axes|Dtypes|Attributes|A factor)\b", text):
            lines += ["", text]
        else:
            lines.append(text)
    return [*lines, ""]


def sides(operands: str) -> list[list[tuple[str, str]]]:
    """Split a row into operands and results, each a name and its dtype with axes."""
    return [[tuple(part.strip().partition(": ")[::2]) for part in side.split(",")] for side in operands.split("->")]


def table_of(operands: str, attributes: str) -> list[str]:
    lines = ["| | name | is |", "| --- | --- | --- |"]
    for title, side in zip(("takes", "returns"), sides(operands), strict=True):
        for place, (name, what) in enumerate(side):
            lines.append(f"| {'' if place else title} | {code(name)} | {code(what) if what else 'changed in place'} |")
    for place, attribute in enumerate(filter(None, attributes.split(", "))):
        name, _, what = attribute.partition(": ")
        lines.append(f"| {'' if place else 'attributes'} | {code(name)} | {code(what) if what else ''} |")
    return [*lines, ""]


def code(text: str) -> str:
    """Write code in a table cell, with bars escaped."""
    return (
        "<code>"
        + text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;").replace("*", "&#42;")
        + "</code>"
    )
