"""Markdown tables of the rows in `results/`."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence

from rows import RESULTS
from targets import Row

Rows = list[dict[str, str]]
Tables = dict[str, Rows]  # by file name


def read() -> Tables:
    found = {}
    for path in sorted(RESULTS.glob("*.csv")):
        with path.open(newline="") as file:
            found[path.stem] = list(csv.DictReader(file))
    return found


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = ["---"] * len(header)
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *lines))


def replace_block(text: str, page: str, block: str, made: str) -> str:
    """Return the text of `page` with `made` between `<!-- rows: block -->` and `<!-- end -->`."""
    begin, end = f"<!-- rows: {block} -->", "<!-- end -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise SystemExit(f"{page} has no {begin} ... {end}; add it where the numbers belong")
    return f"{before}{begin}\n{made}\n{end}{after}"


def origin(rows: Rows) -> str:
    """Describe the origin of a file's rows: machine, versions, commit and date, and the rows of other commits."""
    first = rows[0]
    later: dict[str, list[str]] = {}
    for row in rows:
        if row["commit"] != first["commit"]:
            names = [row["recipe"], row["kind"]] if "recipe" in row and "kind" in row else [next(iter(row.values()))]
            later.setdefault(row["commit"], []).append(" ".join(names))
    others = "".join(f", of a run of its own at {commit}: {', '.join(names)}" for commit, names in later.items())
    return f"{first['machine']}; {first['versions']}; commit {first['commit']}{others}; {first['date']}."


def number(row: Row | None, column: str) -> str:
    return (row or {}).get(column, "") or "-"
