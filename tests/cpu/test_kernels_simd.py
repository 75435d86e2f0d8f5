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


@pytest.mark.parametrize("target", ["scalar", "avx2", "avx512"])
def test_bits_are_those_of_the_reference(target):
    if target not in _ffi.simd_targets():
        pytest.skip(f"this machine has {_ffi.simd_targets()}")
    run = python(str(Path(__file__).with_name("kernel_bits.py")), simd=target)
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
