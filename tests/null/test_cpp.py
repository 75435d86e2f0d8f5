"""Tests in C++, of `ffi/tests`: compiled here with the sanitizers that the compiler has."""

import shutil
import subprocess
from pathlib import Path

import pytest

from support.pairs import each_value

FFI = Path(__file__).parents[2] / "ffi"
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


def compile_program(folder, sources, *options):
    """Returns the program, or None if the compiler lacks an option."""
    program = folder / "program"
    flags = ["-std=c++17", "-O1", "-g1", "-Wall", "-Wextra", "-Werror", "-pthread", *options]
    includes = [f"-I{FFI}", "-isystem", FFI / "third_party"]
    trial = folder / "trial.cc"
    trial.write_text("int main() {}\n")
    if subprocess.run([COMPILER, *flags, trial, "-o", program], capture_output=True, check=False).returncode:
        return None
    command = [COMPILER, *flags, *includes, *(FFI / source for source in sources), "-o", program]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return program


SOURCES = {
    "parallel_for": ["tests/parallel_for_test.cc", "host/thread_pool.cc"],
    "lru_cache": ["tests/lru_cache_test.cc"],
    "group_tiles": ["tests/group_tiles_test.cc"],
}


@each_value(sources=SOURCES, sanitizers=["thread", "address,undefined"])
def test_programs(sources, sanitizers, tmp_path):
    program = compile_program(tmp_path, sources, f"-fsanitize={sanitizers}")
    if program is None:
        pytest.skip(f"the compiler has no -fsanitize={sanitizers}")
    run = subprocess.run([program], capture_output=True, text=True, check=False, timeout=120)
    assert (run.returncode, run.stdout) == (0, "passed\n"), run.stderr


def test_a_bad_row_is_an_error_when_rows_are_parsed(tmp_path):
    """The module parses all rows at import, and nanobind turns exceptions into ImportError."""
    (tmp_path / "ops.def").write_text('QSHARD_OP(bad, "x: float *batch k", "")\n')
    program = compile_program(tmp_path, ["tests/rows_test.cc", "schema/pattern.cc"], f"-I{tmp_path}")
    run = subprocess.run([program], capture_output=True, text=True, check=False)
    assert run.returncode == 0
    assert run.stdout == 2 * "ops.def: bad: operands and results are not two sides\n"
