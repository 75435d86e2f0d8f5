"""Notebooks without Jupyter: cells are Python and import names that qshard has. `make notebooks` runs them."""

import ast
import importlib
import json

import pytest

from support.pages import REPOSITORY

NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_import_names_that_exist(path):
    cells = json.loads(path.read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    imported = {}
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "qshard":
            imported.setdefault(node.module, set()).update(alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            imported.update({alias.name: set() for alias in node.names if alias.name.split(".")[0] == "qshard"})
    assert imported
    for module, names in imported.items():
        for name in names:
            if not hasattr(importlib.import_module(module), name):
                importlib.import_module(f"{module}.{name}")
