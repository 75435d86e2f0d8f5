"""Code that torch.compile traces uses only Python that the oldest supported PyTorch traces."""

import ast
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]

TRACED = ("_core", "_experts", "_fsdp", "_losses", "_moe", "_nn", "_ops", "_quantized")
ENUMS = {"Product", "Role", "Usage"}
# A constructor runs before a model is compiled.
CONSTRUCTORS = {"__init__", "__post_init__"}


def iterations_over_enums(node: ast.AST, function: str = "") -> Iterator[str]:
    """Yield the function around each loop and comprehension over an enum."""
    if isinstance(node, ast.FunctionDef):
        function = node.name
    of_enum = isinstance(node, ast.For | ast.comprehension) and isinstance(node.iter, ast.Name)
    if of_enum and node.iter.id in ENUMS and function and function not in CONSTRUCTORS:
        yield function
    for child in ast.iter_child_nodes(node):
        yield from iterations_over_enums(child, function)


def test_loops_over_enums():
    """Dynamo of torch 2.11 breaks the graph there on Python 3.12; a loop over a tuple of the members does not."""
    folders = [REPOSITORY / top / name for top in ("qshard", "torch_bridge") for name in TRACED]
    files = [REPOSITORY / "qshard" / "recipes.py", *(path for folder in folders for path in folder.rglob("*.py"))]
    assert len(files) > 50
    found = {
        f"{path.relative_to(REPOSITORY)}: {function}"
        for path in files
        for function in iterations_over_enums(ast.parse(path.read_text()))
    }
    assert found == set()


def test_loops_are_found():
    code = "def f(x):\n    for role in Role: pass\n    return [u for u in Usage], [r for r in ROLES], [*map(str, x)]"
    assert [*iterations_over_enums(ast.parse(code))] == ["f", "f"]
    assert not [*iterations_over_enums(ast.parse("ROLES = [r for r in Role]"))]
