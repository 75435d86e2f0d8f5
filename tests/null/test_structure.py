"""The structure of a format is asked for in few places: all other code asks for what follows from it."""

import ast
import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]

# What a format is made of. Other properties of `Format`, `PlaneLayout` and `OperandSpec` say what follows from it.
STRUCTURE = {
    *("block", "codes_per_byte", "scale_dtype", "stored_scale_dtype"),
    *("scaling", "eps", "four_over_six", "global_scale", "pow2", "scale_max", "scale_rounding"),
    *("hadamard", "turns_columns", "whole_blocks"),
}
METHODS = {"Scaling", "FloatScaling", "PowerScaling", "TwoLevelScaling"}
CALLS = {"block_of", "stored_block"}
OWNERS = {"qshard/formats.py", "qshard/layout.py", "qshard/_core/quantize_steps.py"}


def is_structure(node: ast.expr, names: set[str]) -> bool:
    """Whether an expression is a part of a format, a part of that part, or a variable that holds one."""
    while isinstance(node, ast.Subscript | ast.NamedExpr):
        node = node.value
    if isinstance(node, ast.Attribute):
        return node.attr in STRUCTURE
    if isinstance(node, ast.Call):
        function = node.func
        return getattr(function, "attr", getattr(function, "id", None)) in CALLS
    return isinstance(node, ast.Name) and node.id in names


def tested(node: ast.AST) -> list[ast.expr]:
    """The expressions whose value, alone or compared, decides about something at this node."""
    match node:
        case ast.Compare():
            return [node.left, *node.comparators]
        case ast.BoolOp():
            return node.values
        case ast.UnaryOp(op=ast.Not()):
            return [node.operand]
        case ast.If() | ast.IfExp() | ast.While():
            return [node.test]
        case ast.comprehension():
            return node.ifs
        case ast.Match():
            return [node.subject]
        case ast.Call(func=ast.Name(id="isinstance"), args=[_, kinds]):
            return [each for each in ast.walk(kinds) if isinstance(each, ast.Name) and each.id in METHODS]
        case ast.Call(func=ast.Name(id="bool"), args=[value]):
            return [value]
    return []


def branches(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """The function and the line of each branch on the structure of a format. An `assert` is none."""

    def visit(node: ast.AST, function: str, names: set[str]) -> Iterator[tuple[str, int]]:
        if isinstance(node, ast.Assert):
            return
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            function = f"{function}.{node.name}".lstrip(".")
            names = set(names)
            for each in ast.walk(node):
                if isinstance(each, ast.Assign) and len(each.targets) == 1:
                    names |= held(each.targets[0], each.value, names)
        if any(is_structure(each, names) or getattr(each, "id", None) in METHODS for each in tested(node)):
            yield function, node.lineno if hasattr(node, "lineno") else node.ifs[0].lineno
        for child in ast.iter_child_nodes(node):
            yield from visit(child, function, names)

    def held(target: ast.expr, value: ast.expr, names: set[str]) -> set[str]:
        """The variables to which an assignment gives a part of a format."""
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = zip(target.elts, value.elts, strict=False)
            return set().union(*(held(*pair, names) for pair in pairs))
        return {target.id} if isinstance(target, ast.Name) and is_structure(value, names) else set()

    yield from visit(tree, "", set())


def found() -> Counter:
    every = itertools.chain((REPOSITORY / "qshard").rglob("*.py"), (REPOSITORY / "torch_bridge").rglob("*.py"))
    counts: Counter = Counter()
    for path in every:
        name = path.relative_to(REPOSITORY).as_posix()
        if name in OWNERS or name.startswith(("qshard/reference/", "qshard/torch_bridge/")):
            continue  # The reference states formats a second time, on purpose.
        counts.update(f"{name}: {function}" for function, _ in branches(ast.parse(path.read_text())))
    return counts
