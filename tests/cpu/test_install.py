"""Builds of the real sources by CMake and by pip."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

pytestmark = pytest.mark.slow
pytest.importorskip("nanobind")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_architectures(tmp_path):
    """For Blackwell, kernels that convert to FP4 target the family, which alone has the instruction."""
    settings = ["-DQSHARD_CUDA=ON", "-DQSHARD_CUDA_ARCHITECTURES=90-real;100-virtual"]
    options = [f"-DPython_EXECUTABLE={sys.executable}", *settings]
    done = subprocess.run(
        ["cmake", "-S", REPOSITORY / "ffi", "-B", tmp_path, *options], capture_output=True, text=True, check=True
    )
    assert "kernels for 90-real;100-virtual (FP4: 90-real;100f-virtual)" in done.stdout


@pytest.mark.timeout(1200)
def test_a_second_install_compiles_what_changed(tmp_path):
    """pip builds in a new isolated environment each time, with nanobind under a new path."""
    source = tmp_path / "source"
    shutil.copytree(REPOSITORY, source, ignore=shutil.ignore_patterns(".*", "build", "__pycache__"))
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)

    def install() -> list[str]:
        """Install, and return the lines of compiled files."""
        command = [tmp_path / "env/bin/python", "-m", "pip", "install", "-v", "--no-deps", source]
        environ = {**os.environ, "QSHARD_CUDA": "OFF", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert done.returncode == 0, done.stdout
        assert "+cpu" in done.stdout.splitlines()[-1]
        return [line for line in done.stdout.splitlines() if "Building CXX object" in line]

    assert len(install()) > 20
    assert install() == []
    edited = source / "ffi/host/rows.cc"
    edited.write_text(edited.read_text() + "\n")
    (line,) = install()
    assert line.endswith("/rows.cc.o")
