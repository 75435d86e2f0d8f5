"""The package as installed: what `import qshard` brings along, and where torch_bridge is found."""

import subprocess
import sys
import tomllib
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
FRAMEWORKS = {"jax", "jaxlib", "torch"}


def python(code: str, directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=directory, capture_output=True, text=True, check=False)


PURE = ["qshard", "qshard.formats", "qshard.layout", "qshard.recipes", "qshard.reference", "qshard.numerics"]
NEED_EXTENSION = ["qshard.op_table"]


@pytest.mark.parametrize("module", PURE + NEED_EXTENSION)
def test_core_imports_no_framework(module, tmp_path):
    if module in NEED_EXTENSION and find_spec("qshard._ffi") is None:
        pytest.skip("the extension is not built")
    result = python(f"import sys, {module}; print(*sys.modules)", tmp_path)
    assert result.returncode == 0, result.stderr
    assert not FRAMEWORKS & set(result.stdout.split())


def test_torch_bridge_is_not_a_top_level_package():
    """From the repository root `import torch_bridge` finds the folder; the error names the module that was meant."""
    result = python("import torch_bridge", REPOSITORY)
    assert result.returncode != 0
    error = result.stderr.strip().splitlines()[-1]
    assert error.startswith("ImportError:")
    assert "import qshard.torch_bridge" in error


def test_frameworks_are_optional():
    needed = [name for name in metadata.requires("qshard") if "extra ==" not in name]
    assert sorted(name.split(">")[0] for name in needed) == ["ml_dtypes", "numpy"]


def test_version_says_what_was_built():
    """0.1.0+cpu or 0.1.0+cu130 from a clone: pip's last line shows it. A wheel of an sdist has no label.

    The version is made before the build, which must agree.
    """
    _ffi = pytest.importorskip("qshard._ffi")
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    base = project["tool"]["dynamic-metadata"][0]["version"]
    label = f"cu{_ffi.build_info['cuda'].replace('.', '')}" if _ffi.cuda_built else "cpu"
    assert metadata.version("qshard") == _ffi.build_info["version"]
    assert metadata.version("qshard") in (base, f"{base}+{label}")
    assert bool(_ffi.build_info["cuda_architectures"]) == _ffi.cuda_built


def test_wheel_has_every_module():
    """A wheel lists the Python files of ./qshard and ./torch_bridge, and no other top-level package."""
    files = [str(file) for file in metadata.files("qshard")]
    if not any(file.startswith("qshard/") and file.endswith(".py") for file in files):
        pytest.skip("an editable install lists no modules; `make bare` runs this on a wheel")
    installed = {file for file in files if file.endswith((".py", "py.typed"))}
    sources = {path.relative_to(REPOSITORY).as_posix() for path in REPOSITORY.glob("qshard/**/*.py")}
    sources |= {f"qshard/{path.relative_to(REPOSITORY).as_posix()}" for path in REPOSITORY.glob("torch_bridge/**/*.py")}
    assert installed == sources | {"qshard/py.typed"}
