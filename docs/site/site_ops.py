"""The page of ops: the rows of `ffi/ops.def`, as the extension has them, and the comments on rows and on bodies."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[2]
FIRST_GROUP = "Tensors"
"""Of ops.def's first group, whose comment is the notation of all."""


class Group(NamedTuple):
    """Rows of ops.def that follow one comment."""

    title: str
    text: str
    ops: list[str]


def groups() -> tuple[list[str], list[Group]]:
    """The lines of ops.def's first comment, and its groups: a comment and the rows up to the next."""
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
    """A comment of C++ as a paragraph, in which arithmetic is no markup."""
    text = " ".join(line.removeprefix("//").strip() for line in comment.splitlines()).strip()
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([*_<\[\]|])", r"\\\1", part) for part in parts)


def bodies() -> dict[str, str]:
    """What each op does: the comment above its body, or above the first of the bodies that stand together."""
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
    """The page: the notation, all ops at a glance, then each."""
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
    lines = ["| | op | takes | gives |", "| --- | --- | --- | --- |"]
    for group in each:
        for place, op in enumerate(group.ops):
            takes, gives = ([name for name, _ in side] for side in sides(rows[op][0]))
            title = "" if place else group.title
            lines.append(f"| {title} | [`{op}`](#{op}) | {', '.join(takes)} | {', '.join(gives)} |")
    return [*lines, ""]


def notation_of(comment: list[str]) -> list[str]:
    """The first comment of ops.def, of which a line that opens with a word and a colon begins a paragraph."""
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
    """Operands and results of a row, each as its name and the rest, which is its dtype and axes."""
    return [[tuple(part.strip().partition(": ")[::2]) for part in side.split(",")] for side in operands.split("->")]


def table_of(operands: str, attributes: str) -> list[str]:
    lines = ["| | name | is |", "| --- | --- | --- |"]
    for title, side in zip(("takes", "gives"), sides(operands), strict=True):
        for place, (name, what) in enumerate(side):
            lines.append(f"| {'' if place else title} | {code(name)} | {code(what) if what else 'changed in place'} |")
    for place, attribute in enumerate(filter(None, attributes.split(", "))):
        name, _, what = attribute.partition(": ")
        lines.append(f"| {'' if place else 'attributes'} | {code(name)} | {code(what) if what else ''} |")
    return [*lines, ""]


def code(text: str) -> str:
    """Code in a cell of a table, where a bar must not end the cell."""
    return (
        "<code>"
        + text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;").replace("*", "&#42;")
        + "</code>"
    )
