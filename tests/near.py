"""Prints the test files nearest to a source file: `python tests/near.py qshard/layout.py`. `make near` runs them.

A test is near a file that it names. It is near a Python module that it imports, directly or through other modules. It
is near a file of `ffi/` if it names an op whose body or kernels include the file; kernel tests are near all of `ffi/`.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
FFI = REPOSITORY / "ffi"
MOST = 6  # test files that are printed
KERNEL_TESTS = "tests/cpu/test_kernels_simd.py"


def near(file: str) -> list[str]:
    """Return test files, the nearest first; none if `file` is not in the repository."""
    path = (REPOSITORY / file).resolve()
    if not (path.is_file() and path.is_relative_to(REPOSITORY)):
        return []
    file = path.relative_to(REPOSITORY).as_posix()
    if file in tests():
        return [file]
    names = {file, f'"{path.name}"'}
    if path.is_relative_to(FFI):
        inside = path.relative_to(FFI).as_posix()
        names |= {"ffi/tests" for test in (FFI / "tests").glob("*.cc") if inside in test.read_text()}
    named = [test for test, text in tests().items() if any(name in text for name in names)]
    if path.is_relative_to(FFI):
        return list(dict.fromkeys([KERNEL_TESTS, *named, *naming(ops_of(inside))]))[:MOST]
    steps, words = importers(file) | dict.fromkeys(named, 1), set(path.stem.split("_"))
    found = [test for test in tests() if test in steps]
    return sorted(found, key=lambda test: (steps[test], -len(words & set(Path(test).stem.split("_")))))[:MOST]


@functools.cache
def tests() -> dict[str, str]:
    """Return the text of each test file; tests of several processes or of GPUs come last."""
    found = sorted(REPOSITORY.glob("tests/*/test_*.py"), key=lambda path: (path.parent.name in ("dist", "gpu"), path))
    return {path.relative_to(REPOSITORY).as_posix(): path.read_text() for path in found}


@functools.cache
def modules() -> dict[str, tuple[str, ast.Module]]:
    """Map import names of the package's and the tests' modules to their path and syntax tree."""
    found = {}
    for top, prefix in (("qshard", "qshard."), ("torch_bridge", "qshard.torch_bridge."), ("tests", "")):
        for path in (REPOSITORY / top).rglob("*.py"):
            inside = ".".join(path.relative_to(REPOSITORY / top).with_suffix("").parts)
            name = f"{prefix}{inside}".removesuffix(".__init__")
            found[name] = (path.relative_to(REPOSITORY).as_posix(), ast.parse(path.read_text()))
    return found


@functools.cache
def imported(module: str) -> dict[str, str]:
    """Map each name that a module imports to its qualified name."""
    found = {}
    for node in ast.walk(modules()[module][1]):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.asname or alias.name: alias.name for alias in node.names}
    return found


def home(name: str) -> str:
    """Return the module that defines a name, following re-exports."""
    module, _, last = name.rpartition(".")
    if name in modules() or module not in modules() or imported(module).get(last, name) == name:
        return name if name in modules() else module
    return home(imported(module)[last])


@functools.cache
def uses(module: str) -> set[str]:
    """Return modules that define what a module imports or reads; `.qshard.` stands for both front ends."""
    names = set(imported(module).values())
    for node in ast.walk(modules()[module][1]):
        match node:
            case ast.Attribute(value=ast.Name(id=first), attr=last) if first in imported(module):
                names.add(f"{imported(module)[first]}.{last}")
            case ast.Attribute(value=ast.Attribute(attr="qshard"), attr=last):
                names |= {f"qshard.jax.{last}", f"qshard.torch_bridge.{last}"}
    return set(map(home, names))


def importers(file: str) -> dict[str, int]:
    """Map tests that use a module to the number of imports between them. Package `__init__`s do not count as links."""
    edge = {name for name, (path, _) in modules().items() if path == file}
    left = {name for name, (path, _) in modules().items() if not path.endswith("__init__.py")} - edge
    found: dict[str, int] = {}
    for step in range(1, len(left)):
        edge = {module for module in left if uses(module) & edge}
        left -= edge
        found |= {modules()[module][0]: step for module in edge if modules()[module][0] in tests()}
    return found


def ops_of(file: str) -> set[str]:
    """Return ops whose body includes a file of `ffi/`, or includes launchers (`kernels/*.h`) of kernels that do."""
    texts = {path.relative_to(FFI).as_posix(): path.read_text() for path in FFI.rglob("*.*") if path.suffix != ".pyc"}
    headers = {name: set(re.findall(r'^#include "(.*)"', text, re.MULTILINE)) for name, text in texts.items()}
    reached, edge = {file}, {file}
    while edge := {name for name in headers if headers[name] & edge} - reached:
        reached |= edge
    launchers = {header for name in reached for header in headers[name] if re.fullmatch(r"kernels/\w+\.h", header)}
    bodies = [text for name, text in texts.items() if name in reached or headers[name] & launchers]
    return set(re.findall(r"^QSHARD_DEFINE_OP\((\w+)\)", "".join(bodies), re.MULTILINE))


def naming(ops: set[str]) -> list[str]:
    """Return tests that name these ops, sorted by the number of ops, descending."""
    counts = {test: len(ops & set(re.findall(r"\w+", text))) for test, text in tests().items()}
    return sorted(filter(counts.get, counts), key=counts.get, reverse=True)


if __name__ == "__main__":
    found = near(sys.argv[1] if len(sys.argv) > 1 else "")
    sys.exit("near: no test is near to FILE; pass the path of a source from the root") if not found else print(*found)
