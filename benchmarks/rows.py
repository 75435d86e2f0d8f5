"""Result rows as CSV files: measurements with machine, commit, versions and date."""

from __future__ import annotations

import csv
import datetime
import importlib.metadata
import os
import pathlib
import platform
import subprocess
import sys

RESULTS = pathlib.Path(__file__).parent / "results"


def cpu_name() -> str:
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def commit() -> str:
    """Return the short hash of the checked-out commit, with `+` if the working tree differs.

    A copy without git, such as on a GPU machine, takes it from QSHARD_COMMIT, or returns `unknown`.
    """
    if "QSHARD_COMMIT" in os.environ:
        return os.environ["QSHARD_COMMIT"]
    git = ["git", "-C", str(RESULTS.parent)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    if head.returncode:
        return "unknown"
    dirty = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True).stdout.strip()
    return head.stdout.strip() + ("+" if dirty else "")


def versions(*packages: str) -> str:
    found = []
    for name in packages:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def write(name: str, machine: str, rows: list[dict[str, object]], quiet: bool = False) -> pathlib.Path:
    """Write `results/<name>.csv`, with machine, commit, versions and date in each row. Print a table unless `quiet`."""
    common = {
        "machine": machine,
        "commit": commit(),
        "versions": versions("qshard", "torch", "jax", "torchao", "transformer_engine"),
        "date": datetime.date.today().isoformat(),
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *common], lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, **common} for row in rows)
    if quiet:
        return path
    columns = list(rows[0])
    table = [columns, *[[str(row[column]) for column in columns] for row in rows]]
    widths = [max(len(line[i]) for line in table) for i in range(len(columns))]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    print(f"-> {path}", file=sys.stderr)
    return path
