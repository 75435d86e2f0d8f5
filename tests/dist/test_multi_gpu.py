"""benchmarks/multi_gpu.sh: shares of the time limit, rows that stay, parts that are skipped, and real ranks on CPUs."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "multi_gpu.sh"
# In the place of Python: has all packages, and writes a row and its process id. A step of torch then never ends.
PROGRAM = """#!/usr/bin/env bash
if [ "$1" = -c ]; then exit 0; fi
out=${@: -1}
echo "$*" > "$out.csv"
case $1 in bench_step_torch.py) sleep 1000 & echo $! > "$out.pid"; wait ;; esac
"""


def run(tmp_path, *arguments, **environment):
    variables = {"RESULTS": str(tmp_path), "CACHE": str(tmp_path / "cache"), "PYTHON": sys.executable, **environment}
    command = [str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=300)


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_slow_part_is_stopped_and_its_rows_stay(tmp_path):
    """Two ranks of torch and, beside them, one: both are stopped with all their processes, and JAX still runs."""
    program = tmp_path / "python"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    given = {"PYTHON": str(program), "CPU_RANKS": "4"}
    found = run(tmp_path, 9, "torch-few", "tensor-parallel-few", "jax", **given)
    assert found.returncode == 1, found.stderr
    stopped = sorted(line.split(" after ")[0] for line in found.stderr.splitlines())
    assert stopped == [f"multi_gpu: torch_{n} was stopped" for n in (1, 2)]
    assert "torch_1 on GPUs 0, " in found.stdout
    assert "torch_2 on GPUs 1,2, " in found.stdout
    for name in ("torch_1", "torch_2", "tensor_parallel_2", "jax_4"):
        assert "--model tiny" in (tmp_path / f"scaling_{name}.csv").read_text()
    for n in (1, 2):
        child = Path("/proc", (tmp_path / f"scaling_torch_{n}.pid").read_text().strip(), "status")
        assert not child.exists() or "State:\tZ" in child.read_text()


def test_what_it_cannot_run(tmp_path):
    """A part that is not there, no GPU, a package that is not installed, and too few GPUs."""
    found = run(tmp_path, 5, "torch", "tocrh", CPU_RANKS="2")
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.startswith("multi_gpu: no part tocrh; parts are: collectives torch jax ")
    found = run(tmp_path, 5, PATH="/usr/bin:/bin", CPU_RANKS="")
    assert found.returncode == 1
    assert found.stderr == "multi_gpu: no GPU; CPU_RANKS=2 tries it on CPUs\n"
    bare = tmp_path / "python"
    bare.write_text(f'#!/usr/bin/env bash\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    found = run(tmp_path, 5, "jax", CPU_RANKS="2", PYTHON=str(bare))
    assert (found.returncode, found.stdout) == (0, "multi_gpu: skipped jax: jax is not installed\n")
    found = run(tmp_path, 5, "mesh", CPU_RANKS="2")
    assert (found.returncode, found.stdout) == (0, "multi_gpu: skipped mesh: too few GPUs\n")


@pytest.mark.slow
def test_ranks_on_cpus(tmp_path):
    """Real collectives of two ranks, with rows of each case."""
    found = run(tmp_path, 280, "collectives", CPU_RANKS="2")
    assert found.returncode == 0, found.stderr
    rows = rows_of(tmp_path / "scaling_collectives_2.csv")
    assert {row["kind"] for row in rows} == {"all-gather", "reduce-scatter", "all-to-all"}
    assert all(float(row["ms"]) > 0 and row["ranks"] == "2" for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["torch", "tensor-parallel", "mesh", "experts", "large", "torch-few"])
def test_parts_of_torch(tmp_path, part):
    kinds = {"TORCH_KINDS": "bf16,fp8,nvfp4", "LARGE_KINDS": "bf16,fp8 fused zero", "TENSOR_KINDS": "bf16,fp8 codes"}
    found = run(tmp_path, 280, part, CPU_RANKS="4", **kinds)
    assert found.returncode == 0, found.stderr
    files = {
        "torch-few": ["torch_1", "torch_2"],
        "tensor-parallel": ["tensor_parallel_4"],
        "mesh": ["mesh_2x2"],
        "large": ["torch_8b_4"],
    }
    for name in files.get(part, [f"{part}_4"]):
        rows = rows_of(tmp_path / f"scaling_{name}.csv")
        assert len(rows) > 1
        assert all(float(row["ms"]) > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["jax", "tensor-parallel-jax", "experts-jax", "large-jax"])
def test_parts_of_jax(tmp_path, part):
    pytest.importorskip("optax")
    kinds = {"JAX_KINDS": "bf16,nvfp4", "TENSOR_JAX_KINDS": "bf16,fp8", "LARGE_JAX_KINDS": "fp8"}
    found = run(tmp_path, 280, part, CPU_RANKS="2", **kinds)
    assert found.returncode == 0, found.stderr
    (file,) = tmp_path.glob("scaling_*.csv")
    assert all(float(row["ms"]) > 0 for row in rows_of(file))


@pytest.mark.slow
def test_the_limit_stops_real_ranks(tmp_path):
    """Rows of the cases that were measured stay."""
    found = run(tmp_path, 120, "torch", CPU_RANKS="2", TORCH_KINDS=",".join(["bf16"] * 500))
    assert found.returncode == 1
    assert "multi_gpu: torch_2 was stopped after 120 s" in found.stderr
    assert 0 < len(rows_of(tmp_path / "scaling_torch_2.csv")) < 500
