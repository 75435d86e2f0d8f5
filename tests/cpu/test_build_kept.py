"""A build takes what was kept if nothing has changed that it depends on, and only then: CMake on the real sources.

Whatever lies under a key is taken, so a file of that name stands in for a module, and nothing is compiled here.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
NOTHING = "Built before: nothing to compile"

pytest.importorskip("nanobind")


class Tree:
    """A copy of the C++ sources, and a folder for what is kept."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ffi, self.kept = folder, folder / "ffi", folder / "kept"
        shutil.copytree(REPOSITORY / "ffi", self.ffi, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(REPOSITORY / "pyproject.toml", folder)
        self.kept.mkdir()

    def configure(self, *options: str, build: Path | None = None, **environ: str) -> str:
        """What CMake says, in a build folder that is new, as pip's is. It leaves there what it would keep."""
        with tempfile.TemporaryDirectory(dir=self.folder) as new:
            self.build = build or Path(new)
            command = [
                "cmake",
                "-G",
                "Unix Makefiles",
                "-S",
                self.ffi,
                "-B",
                self.build,
                f"-DPython_EXECUTABLE={sys.executable}",
            ]
            settings = [f"-DQSHARD_KEPT={self.kept}", "-DQSHARD_CUDA=OFF", *options]
            path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
            done = subprocess.run(
                [*command, *settings], env={**os.environ, "PATH": path, **environ}, capture_output=True, text=True
            )
            assert done.returncode == 0, done.stderr
            return done.stdout

    def keep(self, *options: str, **environ: str) -> None:
        """Puts a file in place of the module that these options would build."""
        assert NOTHING not in self.configure(*options, build=self.folder / "once", **environ)
        rules = (self.folder / "once/CMakeFiles/_ffi.dir/build.make").read_text()
        name = next(word for word in rules.split() if Path(word).name.startswith("_ffi-"))
        (self.kept / Path(name).name).write_bytes(b"")
        shutil.rmtree(self.folder / "once")


@pytest.fixture
def tree(tmp_path) -> Tree:
    return Tree(tmp_path)


def compiler(tree: Tree, version: str) -> dict[str, str]:
    """A compiler that can be updated in its place."""
    path = tree.folder / "c++"
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo {version} && exit\nexec c++ "$@"\n')
    path.chmod(0o755)
    return {"CXX": str(path)}


def test_a_build_takes_what_is_kept_until_something_changes(tree):
    old = compiler(tree, "1.0")
    tree.keep(**old)
    assert NOTHING in tree.configure(**old), "the same build, in another folder"
    assert NOTHING not in tree.configure(**old, CXXFLAGS="-O2")
    assert NOTHING not in tree.configure(**old, LDFLAGS="-static-libgcc")
    assert NOTHING not in tree.configure("-DCMAKE_BUILD_TYPE=Debug", **old)
    header = tree.ffi / "kernels/cpu/simd/rows.h"
    text = header.read_text()
    header.write_text(text + "\n")
    assert NOTHING not in tree.configure(**old)
    header.write_text(text)
    assert NOTHING in tree.configure(**old), "what changed was changed back"
    assert NOTHING not in tree.configure(**compiler(tree, "2.0"))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_a_build_of_other_architectures_is_another_build(tree):
    cuda = "-DQSHARD_CUDA=ON"
    tree.keep(cuda)
    assert NOTHING in tree.configure(cuda)
    assert "kernels for 90a (FP4: 90a)" in (other := tree.configure(cuda, "-DQSHARD_CUDA_ARCHITECTURES=90a"))
    assert NOTHING not in other
    # Of Blackwell, kernels that convert to FP4 take the family, which alone has the instruction.
    blackwell = tree.configure(cuda, "-DQSHARD_CUDA_ARCHITECTURES=90-real;100-virtual")
    assert "kernels for 90-real;100-virtual (FP4: 90-real;100f-virtual)" in blackwell
    assert NOTHING not in tree.configure(), "and without CUDA there is another"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_second_install_compiles_nothing(tree, tmp_path):
    """pip, in an isolated environment each time."""
    source = tmp_path / "source"
    shutil.copytree(REPOSITORY, source, ignore=shutil.ignore_patterns(".*", "build", "__pycache__"))
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)

    def install() -> str:
        command = [tmp_path / "env/bin/python", "-m", "pip", "install", "-v", "--no-deps", source]
        environ = {**os.environ, "QSHARD_CUDA": "OFF", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert done.returncode == 0, done.stdout
        return done.stdout

    first, second = install(), install()
    assert first.count("Building CXX object") > 20
    assert "Building CXX object" not in second
    assert NOTHING in second
    assert "+cpu" in first.splitlines()[-1]
    (module,) = (tmp_path / "env").glob("lib/*/site-packages/qshard/_ffi.*.so")
    (kept,) = (source / "build/kept").glob("_ffi-*")
    assert module.read_bytes() == kept.read_bytes()

    # What no kernel reads does not compile a kernel.
    edited = source / "ffi/host/rows.cc"
    edited.write_text(edited.read_text() + "\n")
    third = install()
    assert "host/rows.cc.o" in third
    assert "kernels" not in "".join(line for line in third.splitlines() if "Building CXX object" in line)
