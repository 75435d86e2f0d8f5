"""docs/results.md and README.md hold the numbers of the rows in benchmarks/results."""

import csv
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def report(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = repository / "benchmarks" / "report.py"
    return subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, check=False)


def test_numbers_are_those_of_the_rows():
    result = report(REPOSITORY, "--check")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("page", ["docs/results.md", "README.md"])
def test_a_changed_number_is_found_and_written_anew(page, tmp_path):
    shutil.copytree(REPOSITORY / "benchmarks", tmp_path / "benchmarks")
    for name in ("docs/results.md", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    text = (tmp_path / page).read_text()
    cell = next(line for line in text.splitlines() if line.startswith(("| cast to E4M3 ", "| cast_tensor qshard ")))
    (tmp_path / page).write_text(text.replace(cell, cell.replace("1", "7")))
    stale = report(tmp_path, "--check")
    assert stale.returncode != 0
    assert page in stale.stderr
    assert report(tmp_path).returncode == 0
    assert (tmp_path / page).read_text() == text


ORIGIN = {"machine": "NVIDIA H200", "commit": "abc", "versions": "torch 2.11.0", "date": "2026-11-23"}
STEPS = [("bf16", "200.0", "25.00"), ("fp8 compiled bf16-states", "150.0", "20.00"), ("te-block", "190.0", "30.00")]


def test_steps_in_percent_of_bf16(tmp_path):
    """README's section of speed begins with them. docs/results.md has a profile too, and 50 steps."""
    shutil.copytree(REPOSITORY / "benchmarks", tmp_path / "benchmarks")
    for name in ("docs/results.md", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    steps = [
        {"kind": kind, "ranks": 2, "ms": ms, "running_ms": ms, "peak_GiB": peak, "first_s": "9.0"}
        for kind, ms, peak in STEPS
    ]
    parts = ["step", *part_names()]
    profile = [{"kind": "bf16", **{name: f"{i}.5" for i, name in enumerate(parts)}}]
    flat = {"first_ms": "200.1", "last_ms": "200.2", "first_peak_GiB": "25.00", "last_peak_GiB": "25.00"}
    files = {"": steps, "_profile": profile, "_flat": [{"kind": "bf16", **flat, "grown_bytes": 0}]}
    for name, lines in files.items():
        with (tmp_path / "benchmarks" / "results" / f"step_torch{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, [*lines[0], *ORIGIN])
            writer.writeheader()
            writer.writerows({**line, **ORIGIN} for line in lines)
    assert report(tmp_path).returncode == 0
    speed = (tmp_path / "README.md").read_text().partition("## Speed\n\n<!-- rows: step_torch -->\n")[2]
    assert "| bf16 | 200.0 | 100 | 200.0 | 100 | 25.00 | 100 |" in speed
    assert "| fp8, current scaling, compiled, Adam's states in bf16 | 150.0 | 75 | 150.0 | 75 | 20.00 | 80 |" in speed
    assert "| TransformerEngine, blocks of 128 | 190.0 | 95 | 190.0 | 95 | 30.00 | 120 |" in speed
    results = (tmp_path / "docs/results.md").read_text()
    assert "| fp8 compiled bf16-states | 150.0 | 75 | 150.0 | 75 | 20.00 | 80 | 9.0 |" in results
    assert f"| kind | {' | '.join(parts)} |" in results
    assert "| bf16 | 200.1 | 200.2 | 25.00 | 25.00 | 0 |" in results
    assert report(tmp_path, "--check").returncode == 0


def part_names() -> list[str]:
    """Of a profile, from `step_profile.py`."""
    code = "import step_profile; print('\\n'.join(step_profile.NAMES))"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY / "benchmarks", capture_output=True, text=True, check=True
    )
    return found.stdout.splitlines()
