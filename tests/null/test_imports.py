"""Imports: from a checkout, without a framework, with one that is too old; what is imported late; versions."""

import ast
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import qshard
from qshard._core.environment import OLDEST

REPOSITORY = Path(__file__).parents[2]
EXTENSION = find_spec("qshard._ffi")
FRONT_ENDS = {"qshard.jax": "jax", "qshard.torch_bridge": "torch"}
needs_extension = pytest.mark.skipif(EXTENSION is None, reason="the extension is not built")


def python(code: str, directory: Path, *path: Path, flags: tuple[str, ...] = ("-S", "-c")) -> str:
    """Runs `code` in a directory, with nothing on the path but that and `path`; what it prints, or its last line."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *flags, code]
    result = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    return (result.stderr.splitlines() or [""])[-1] if result.returncode else result.stdout + result.stderr


@pytest.fixture
def libraries(tmp_path):
    """Make a folder with qshard's dependencies, without qshard or a framework."""
    folder = tmp_path / "libraries"
    folder.mkdir()
    for module in (np, ml_dtypes):
        package = Path(module.__file__).parent
        for path in (package, package.with_name(f"{package.name}.libs")):
            if path.exists():
                (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture
def checkout(tmp_path):
    """A folder with the sources."""
    folder = tmp_path / "checkout"
    ignore = shutil.ignore_patterns("*.so", "__pycache__", "torch_bridge")
    shutil.copytree(REPOSITORY / "qshard", folder / "qshard", ignore=ignore)
    shutil.copytree(REPOSITORY / "torch_bridge", folder / "torch_bridge", ignore=ignore)
    shutil.copy(REPOSITORY / "pyproject.toml", folder)
    return folder


@pytest.fixture
def site(tmp_path):
    """A folder with an installed package."""
    if EXTENSION is None:
        pytest.skip("the extension is not built")
    package = tmp_path / "site" / "qshard"
    ignore = shutil.ignore_patterns("*.so", "__pycache__", "torch_bridge")
    shutil.copytree(REPOSITORY / "qshard", package, ignore=ignore)
    shutil.copytree(REPOSITORY / "torch_bridge", package / "torch_bridge", ignore=ignore)
    shutil.copy(EXTENSION.origin, package)
    return package.parent


LOADED = "print(*[m.__file__ for name, m in sys.modules.items() if name.split('.')[0] == 'qshard'], sep='\\n')"
USES = {
    "import": "import sys, qshard.op_table",
    "from": "import sys; from qshard import op_table",
    "late": "import sys, qshard; qshard.op_table.table()",
    "names": "import sys; from qshard import Usage, Role, num_threads; num_threads()",
}


@pytest.mark.parametrize("use", USES)
def test_a_checkout_hands_over_to_what_is_installed(use, checkout, site, libraries):
    """No module comes from the checkout, so versions never mix."""
    loaded = python(f"{USES[use]}\n{LOADED}", checkout, site, libraries).splitlines()
    assert str(site / "qshard" / "__init__.py") in loaded
    assert any(Path(name).suffix == ".so" for name in loaded)
    assert [name for name in loaded if not name.startswith(f"{site}{os.sep}")] == []


def test_an_installed_package_may_be_of_another_version(checkout, site, libraries):
    """Nothing of the checkout runs after the hand-over, not even the end of its own `__init__`."""
    (site / "qshard" / "__init__.py").write_text("version = 'another'\n")
    out = python("import qshard; print(qshard.version, hasattr(qshard, 'num_threads'))", checkout, site, libraries)
    assert out.splitlines()[0] == "another False"


def test_edits_that_are_not_installed_are_told(checkout, site, libraries):
    told = python("import qshard", checkout, site, libraries)
    assert told == ""
    for name in ("qshard/op_table.py", "torch_bridge/_nn/linear.py"):
        with (checkout / name).open("a") as file:
            file.write("# edited\n")
    told = python("import qshard", checkout, site, libraries)
    assert "<string>:1: UserWarning: qshard: the installed package in" in told
    assert (
        " is used, but 2 files of this checkout differ from it, such as qshard/op_table.py; run `pip install .` again"
        in told
    )


PURE = ["qshard", "qshard.formats", "qshard.layout", "qshard.recipes", "qshard.reference", "qshard._core.environment"]
COMPILED = {
    "import qshard.op_table": "_ffi",
    "from qshard import op_table": "_ffi",
    "import qshard; qshard.num_threads()": "_ffi",
    "import qshard.torch_bridge": "torch_bridge",
    "from qshard import torch_bridge": "torch_bridge",
    "import qshard; qshard.torch_bridge": "torch_bridge",
}


def test_a_checkout_alone_has_the_pure_modules(checkout, libraries):
    assert python(f"import {', '.join(PURE)}; print(qshard.Usage.BOTH)", checkout, libraries).startswith("Usage.BOTH")


@pytest.mark.parametrize("code", COMPILED)
def test_a_checkout_alone_says_so(code, checkout, libraries):
    error = python(code, checkout, libraries)
    assert error == (
        f"ImportError: qshard.{COMPILED[code]}: {checkout / 'qshard'} is the source folder and is not installed; "
        f"run `pip install {checkout}`"
    )


def test_an_installation_of_another_python_says_so(checkout, libraries):
    (checkout / "pyproject.toml").unlink()
    error = python("import qshard.op_table", checkout, libraries)
    assert error.endswith(f"was installed for another Python than {sys.executable}; install qshard for this one")


@needs_extension
@pytest.mark.parametrize("flags", [("-c",), ("-m",)], ids=" ".join)
def test_this_checkout_works_as_it_is_installed(flags):
    """In the repository, with this environment: `make bare` hands over to a wheel, other runs to what they have."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    code = "import qshard.op_table; print(len(qshard.op_table.table()) > 9)" if flags == ("-c",) else "qshard.op_table"
    result = subprocess.run(
        [sys.executable, *flags, code], cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == ("True\n" if flags == ("-c",) else "")


@pytest.mark.parametrize("module", FRONT_ENDS)
@pytest.mark.parametrize("statement", ["import {0}", "import qshard; {0}"])
def test_a_framework_that_is_absent(statement, module, site, libraries, tmp_path):
    error = python(statement.format(module), tmp_path, site, libraries)
    name = FRONT_ENDS[module]
    assert error == f"ImportError: {module} needs {name}, which is not installed: pip install 'qshard[{name}]'"


@pytest.mark.parametrize(("module", "found"), [("qshard.jax", "0.9.2"), ("qshard.torch_bridge", "2.10.0+cpu")])
def test_a_framework_that_is_too_old(module, found, site, libraries, tmp_path):
    """The version comes from metadata: an old framework is not imported."""
    name = FRONT_ENDS[module]
    (libraries / name).mkdir()
    (libraries / name / "__init__.py").write_text("raise AssertionError('imported')\n")
    (libraries / f"{name}-{found}.dist-info").mkdir()
    (libraries / f"{name}-{found}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {found}\n")
    error = python(f"import {module}", tmp_path, site, libraries)
    assert error == (
        f"ImportError: {module} needs {name} {OLDEST[name]} or newer, and {found} is installed: "
        f"pip install --upgrade '{name}>={OLDEST[name]}'"
    )


def test_every_module_is_found_late():
    """The source folder, what `qshard.name` finds, and what type checkers are told: one list."""
    files = {path.stem for path in (REPOSITORY / "qshard").glob("[!_]*") if path.suffix in ("", ".py")}
    assert files - {"py"} | {"torch_bridge"} == qshard._MODULES | set(qshard._NEEDS)
    tree = ast.parse((REPOSITORY / "qshard" / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    told = {(node.module, alias.asname) for node in block.body for alias in node.names}
    late = {("qshard", name) for name in qshard._MODULES | set(qshard._NEEDS)}
    assert told == late | {(f"qshard.{home}", name) for name, home in qshard._HOMES.items()}
    with pytest.raises(AttributeError, match="module 'qshard' has no attribute 'fromats'"):
        _ = qshard.fromats


def test_late_modules(site, libraries, tmp_path):
    """`import qshard` imports almost nothing; listed modules load on first use."""
    alone = "import sys, qshard; print(sorted({'numpy', 'qshard.formats', 'jax', 'torch'} & set(sys.modules)))"
    assert python(alone, tmp_path, site, libraries) == "[]\n"
    listed = "import qshard; print([type(getattr(qshard, name)).__name__ for name in dir(qshard)].count('module') > 6)"
    assert python(listed, tmp_path, site, libraries) == "True\n"
    assert python("import qshard; print('jax' in dir(qshard))", tmp_path, site, libraries) == "False\n"
    (libraries / "jax.py").touch()
    assert python("import qshard; print('jax' in dir(qshard))", tmp_path, site, libraries) == "True\n"


@needs_extension
def test_build_info():
    """One place that says all: it names the build, the machine and the frameworks, and imports none of them."""
    code = "import sys, qshard; print(qshard.build_info()); assert not {'jax', 'torch'} & set(sys.modules)"
    lines = python(code, REPOSITORY / "tests", flags=("-c",)).splitlines()
    assert re.fullmatch(
        r"qshard \d+\.\d+\.\d+\S*: (CUDA \d+\.\d+ for .+|no CUDA), CPU kernels for (scalar|avx2|avx512) .+", lines[0]
    )
    assert re.fullmatch(r"Python 3\.\d+\.\d+, \w+ \w+, numpy .+, jax .+, torch .+", lines[1])
    assert Path(lines[2]).name == "qshard"
