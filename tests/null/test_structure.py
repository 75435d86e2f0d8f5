"""Code branches on the structure of formats in a few listed places; elsewhere it uses derived properties."""

import ast
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]

# What a format is made of. Other properties of `Format` and `PlaneLayout` say what follows from it.
STRUCTURE = {"block", "codes_per_byte", "hadamard", "scale_dtype", "stored_scale_dtype", "scaling"}
STRUCTURE |= {"four_over_six", "global_scale", "pow2", "scale_rounding", "transposes_columns", "whole_blocks"}
METHODS = {"Scaling", "FloatScaling", "PowerScaling", "TwoLevelScaling"}
CALLS = {"block_of", "block_shape", "stored_block"}
# The reference states the formats a second time, on purpose.
OWNERS = ("qshard/formats.py", "qshard/layout.py", "qshard/_core/quantize_steps.py", "qshard/reference/")

ALLOWED = {
    # What cuBLAS multiplies: a table of formats and hardware.
    "qshard/gemm_dispatch.py: kind_of": 5,
    "qshard/gemm_dispatch.py: grouped_kind_of": 2,
    # Attributes of ops on slices, which say that there are no blocks, and no amaxes of tensors or rows.
    "qshard/_core/flat_shards.py: SliceBatch.attributes": 1,
    "qshard/_core/flat_shards.py: _amaxes": 1,
    # Compares the high word of an index on the device with the codes in a byte.
    "qshard/jax/_optim/cast_master.py: join_pieces": 1,
}


def is_structure(node: ast.expr, names: set[str]) -> bool:
    """Return whether an expression is a part of a format, directly or nested, or a variable with such a part."""
    while isinstance(node, ast.Subscript | ast.NamedExpr):
        node = node.value
    if isinstance(node, ast.Attribute):
        return node.attr in STRUCTURE
    if isinstance(node, ast.Call):
        function = node.func
        return getattr(function, "attr", getattr(function, "id", None)) in CALLS
    return isinstance(node, ast.Name) and node.id in names


def decisive(node: ast.AST) -> list[ast.expr]:
    """Return the expressions that a node branches on, alone or in comparisons."""
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


def held(target: ast.expr, value: ast.expr, names: set[str]) -> set[str]:
    """Return the variables that an assignment sets to a part of a format."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        pairs = zip(target.elts, value.elts, strict=False)
        return set().union(*(held(*pair, names) for pair in pairs))
    if not is_structure(value, names):
        return set()
    return {each.id for each in ast.walk(target) if isinstance(each, ast.Name)}


def branches(node: ast.AST, function: str = "", names: frozenset[str] = frozenset()) -> Iterator[str]:
    """The function around each branch on the structure of a format. An `assert` is no branch."""
    if isinstance(node, ast.Assert):
        return
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        function = f"{function}.{node.name}".lstrip(".")
        for each in ast.walk(node):
            if isinstance(each, ast.Assign) and len(each.targets) == 1:
                names |= held(each.targets[0], each.value, names)
            elif isinstance(each, ast.NamedExpr | ast.AnnAssign) and each.value is not None:
                names |= held(each.target, each.value, names)
    if any(is_structure(each, names) or getattr(each, "id", None) in METHODS for each in decisive(node)):
        yield function
    for child in ast.iter_child_nodes(node):
        yield from branches(child, function, names)


def test_few_branches_on_the_structure_of_formats():
    """Instead of extending the list, add a derived property to the format."""
    found: Counter = Counter()
    for path in sorted(path for folder in ("qshard", "torch_bridge") for path in (REPOSITORY / folder).rglob("*.py")):
        name = path.relative_to(REPOSITORY).as_posix()
        if not name.startswith((*OWNERS, "qshard/torch_bridge/")):  # A link, in a checkout.
            found.update(f"{name}: {function}" for function in branches(ast.parse(path.read_text())))
    assert dict(found) == ALLOWED
    assert sum(ALLOWED.values()) <= 10


def test_what_is_a_branch():
    code = """
        def f(fmt, where, x):
            block, n = fmt.block, 2
            rows, cols = where.format.block_of(x)
            if block is None:                                       # 1
                return fmt.scaling.global_scale or "none"           # 2
            assert block is not None
            size = block[0] * rows
            y = [each for each in x if each.scaling]                # 3
            z = 1 if isinstance(fmt.scaling, FloatScaling) else 2   # 4
            while fmt.block[0] == 1 and not fmt.hadamard:           # 5, 6
                size += cols % n
            if cols > 1 or size > 1 or fmt.per_tensor:              # 7
                return fmt.element.codes_per_byte * z
    """
    assert Counter(branches(ast.parse(textwrap.dedent(code)))) == {"f": 7}
