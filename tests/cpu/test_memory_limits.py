"""Ops under failing allocations: right results or one clear error, and no write outside results."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "support" / "limited_calls.py"
# malloc must not serve from memory that it kept: the limit would not be reached.
TIGHT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
# Ops that allocate scratch, and one without scratch.
SOME = ["rms_norm", "rms_norm_grad", "gemm", "adam", "cast_slices", "transpose"]
pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or "asan" in os.environ.get("LD_PRELOAD", ""),
    reason="no limit on the address space, or a sanitizer, which takes terabytes of it",
)


def run(*arguments, **environment):
    command = [sys.executable, "-P", str(SCRIPT), *arguments]
    run = subprocess.run(
        command, env={**os.environ, **environment}, text=True, capture_output=True, check=False, timeout=280
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout.split()


@pytest.mark.slow
@pytest.mark.parametrize("draws", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_torch(draws):
    """Every op, with 1, 2 and 4 threads."""
    right, failed = map(int, run("address", "torch", str(draws), **TIGHT))
    assert right > 300
    assert failed > 4


@pytest.mark.parametrize("threads", ["4", *(pytest.param(n, marks=pytest.mark.slow) for n in "12")])
def test_jax(threads):
    right, failed = map(int, run("address", "jax", "2", *SOME, NPROC=threads, **TIGHT))
    assert right > 30
    assert failed > 0


@pytest.mark.slow
@pytest.mark.parametrize("threads", ["1", "2", "4"])
def test_jax_with_every_op(threads):
    right, _ = map(int, run("address", "jax", "2", NPROC=threads, **TIGHT))
    assert right > 300


def test_each_allocation_of_the_extension_may_fail(tmp_path):
    """Of every op, one after the other, with 1, 2 and 4 threads: in kernels, the binder, the pool and the host."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    library = str(tmp_path / "failing_new.so")
    source = str(ROOT / "ffi" / "tests" / "failing_new.cc")
    subprocess.run([compiler, "-std=c++17", "-O1", "-shared", "-fPIC", source, "-o", library, "-ldl"], check=True)
    (failed,) = map(int, run("new", library, LD_PRELOAD=library))
    if failed == 0:
        pytest.skip("this build of the extension has an allocator of its own")
    assert failed > 50
