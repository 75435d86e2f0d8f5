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
