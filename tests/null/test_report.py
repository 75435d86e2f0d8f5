"""RESULTS.md and README.md hold the numbers of the rows in benchmarks/results."""

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


@pytest.mark.parametrize("page", ["RESULTS.md", "README.md"])
def test_a_changed_number_is_found_and_written_anew(page, tmp_path):
    shutil.copytree(REPOSITORY / "benchmarks", tmp_path / "benchmarks")
    for name in ("RESULTS.md", "README.md"):
        shutil.copy(REPOSITORY / name, tmp_path)
    text = (tmp_path / page).read_text()
    cell = next(line for line in text.splitlines() if line.startswith(("| cast to E4M3 ", "| cast_tensor qshard ")))
    (tmp_path / page).write_text(text.replace(cell, cell.replace("1", "7")))
    stale = report(tmp_path, "--check")
    assert stale.returncode != 0
    assert page in stale.stderr
    assert report(tmp_path).returncode == 0
    assert (tmp_path / page).read_text() == text
