"""The CPU kernels give the reference's bits on every SIMD target that the machine has: scalar == AVX2 == AVX-512."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

_ffi = pytest.importorskip("qshard._ffi")


def python(*args: str, simd: str) -> subprocess.CompletedProcess[str]:
    """The target is chosen when the extension is loaded, so each needs a process of its own."""
    env = {**os.environ, "QSHARD_SIMD": simd}
    return subprocess.run([sys.executable, "-P", *args], env=env, text=True, capture_output=True, check=False)


# All targets are compiled from one source. `make test` gives each another part of the calls, a quarter of them in
# all, and `make slow` gives all to each.
@pytest.mark.parametrize("target", ["scalar", "avx2", "avx512"])
@pytest.mark.parametrize("calls", ["a part", pytest.param("all", marks=pytest.mark.slow)])
def test_bits_are_those_of_the_reference(target, calls):
    targets = _ffi.simd_targets()
    if target not in targets:
        pytest.skip(f"this machine has {targets}")
    part, parts = (4 * targets.index(target), 4 * len(targets)) if calls == "a part" else (0, 1)
    run = python(str(Path(__file__).with_name("kernel_bits.py")), "--part", str(part), str(parts), simd=target)
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"SIMD target {target}" in run.stdout


def test_unknown_target_is_an_import_error():
    run = python("-c", "import qshard._ffi", simd="avx1024")
    assert run.returncode != 0
    targets = ", ".join(_ffi.simd_targets())
    assert run.stderr.splitlines()[-1] == (
        f"ImportError: QSHARD_SIMD (avx1024) is not a SIMD target of this machine ({targets}); "
        "set it to one of them, or unset it"
    )


def test_unset_means_the_best_target():
    run = python("-c", "import qshard._ffi as f; print(f.simd())", simd="")
    assert run.stdout.strip() == _ffi.simd_targets()[-1], run.stderr
