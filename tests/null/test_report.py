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
    cell = next(
        line for line in text.splitlines() if line.startswith(("| `NVFP4` | Blackwell", "| cast_tensor qshard "))
    )
    (tmp_path / page).write_text(text.replace(cell, cell.replace("1", "7")))
    stale = report(tmp_path, "--check")
    assert stale.returncode != 0
    assert page in stale.stderr
    assert report(tmp_path).returncode == 0
    assert (tmp_path / page).read_text() == text


ORIGIN = {"machine": "NVIDIA H200", "commit": "abc", "versions": "torch 2.11.0", "date": "2026-11-23"}
STEPS = [
    ("bf16", "220.0", "26.00"),
    ("bf16 compiled", "200.0", "25.00"),
    ("torchao compiled", "190.0", "24.00"),
    ("fp8 compiled", "150.0", "20.00"),
    ("fp8 fused", "160.0", "22.00"),
]


def test_steps_in_percent_of_bf16(tmp_path):
    """README has time, memory and recipes beside bf16. docs/results.md has a profile too, and 50 steps."""
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
    readme = (tmp_path / "README.md").read_text()
    assert "**80 % of the step time of compiled bf16:** 160.0 ms" in readme
    assert "| torchao float8, compiled | 190.0 | 95 % | 24.00 | 96 % |" in readme
    assert "| `CurrentScaling`, compiled | 150.0 | 75 % | 20.00 | 80 % |" in readme
    assert "| `CurrentScaling` | Hopper | 73 % | 85 % |" in readme
    assert "| `NVFP4` | Blackwell | - | - |" in readme
    results = (tmp_path / "docs/results.md").read_text()
    assert "| fp8 compiled | 150.0 | 68 | 150.0 | 68 | 20.00 | 77 | 9.0 |" in results
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
