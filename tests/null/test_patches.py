"""Tests replace no function, method or constant of qshard. They pass arguments, use contexts and observe results."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FILES = sorted(TESTS.rglob("*.py"))
BUILT_IN = {"setattr", "delattr"}
METHODS = BUILT_IN | {"setitem", "delitem", "object", "dict"}  # of pytest's monkeypatch and of unittest.mock


def root(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def targets(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the objects whose attributes or items a node replaces."""
    if isinstance(node, ast.Assign | ast.AugAssign | ast.Delete):
        for target in [node.target] if isinstance(node, ast.AugAssign) else node.targets:
            if isinstance(target, ast.Attribute | ast.Subscript):
                yield target.value
    elif isinstance(node, ast.Call) and node.args:
        is_method = isinstance(node.func, ast.Attribute) and node.func.attr in METHODS
        if is_method or (isinstance(node.func, ast.Name) and node.func.id in BUILT_IN):
            yield node.args[0]


def patches(text: str) -> list[int]:
    """Return the lines that replace something of a module, class or function imported from qshard, or name a target."""
    tree, imported, lines = ast.parse(text), set(), []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "qshard":
            imported |= {each.asname or each.name for each in node.names}
        elif isinstance(node, ast.Import):
            imported |= {each.asname or "qshard" for each in node.names if each.name.partition(".")[0] == "qshard"}
    for node in ast.walk(tree):
        for target in targets(node):
            if root(target) in imported or (isinstance(target, ast.Constant) and "qshard." in str(target.value)):
                lines.append(node.lineno)
    return sorted(lines)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(TESTS)))
def test_nothing_of_qshard_is_replaced(path):
    assert patches(path.read_text()) == []


@pytest.mark.parametrize(
    "line",
    [
        "gemm.LARGE = 0",
        "gemm.Operand.rows = None",
        "del gemm.LARGE",
        "gemm.CACHE['x'] = 1",
        "monkeypatch.setattr(gemm, 'LARGE', 0)",
        "setattr(gemm.Operand, 'rows', 0)",
        "monkeypatch.setattr('qshard.gemm.LARGE', 0)",
        "with mock.patch.object(gemm, 'LARGE', 0): pass",
    ],
)
def test_what_is_found(line):
    assert patches(f"from qshard.torch_bridge._quantized import gemm\n{line}") == [2]
    assert patches(f"import gemm\n{line}".replace("qshard.", "other.")) == []
