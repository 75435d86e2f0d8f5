"""Every docstring example is true.

Modules are imported by name: pytest would collect by path and import ./torch_bridge as a top-level package.
"""

import doctest
import importlib
import importlib.util
from pathlib import Path

import pytest

OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def module_names(package: str) -> list[str]:
    """Return the Python modules in the folder of `package`, without importing them."""
    folder = Path(importlib.util.find_spec(package).origin).parent
    names = (path.relative_to(folder).with_suffix("").parts for path in sorted(folder.rglob("*.py")))
    return [".".join([package, *(part for part in name if part != "__init__")]) for name in names]


@pytest.mark.parametrize("name", sorted({*module_names("qshard"), *module_names("qshard.torch_bridge")}))
def test_examples_are_true(name):
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=OPTIONS)
    assert failed == 0  # doctest has printed the output.
