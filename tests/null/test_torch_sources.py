"""Rules that the sources of the PyTorch front end keep: private names of torch, how calls run, and hidden state."""

import ast
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "torch_bridge"
TREES = {str(path.relative_to(FOLDER)): ast.parse(path.read_text()) for path in sorted(FOLDER.rglob("*.py"))}
INTERNALS, EAGER = "_torch_internals.py", "_ops/eager.py"

# Private by name, and yet for everyone: registries of nn.Module, which its subclasses share; operators, which the
# dispatcher knows by their schemas; methods of named tuples; a function of Python's own; and the method that experts of
# transformers override.
MODULE = {"_parameters", "_buffers", "_modules", "_forward_pre_hooks", "_non_persistent_buffers_set"}
OPERATORS = {
    *("_foreach_copy_", "_foreach_zero_", "_to_copy", "_pin_memory", "_unsafe_view", "_assert_async"),
    *("_grouped_mm", "_scaled_grouped_mm", "_c10d_functional"),
}
OTHERS = {"_asdict", "_replace", "_fields", "_slotnames", "_apply_gate"}


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def names_defined(tree):
    """Functions, classes, and attributes of classes and of `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        if isinstance(node, ast.ClassDef):
            for statement in node.body:
                targets = getattr(statement, "targets", [getattr(statement, "target", None)])
                yield from (target.id for target in targets if isinstance(target, ast.Name))
                if isinstance(statement, ast.Assign) and "__slots__" in ast.unparse(statement.targets[0]):
                    yield from ast.literal_eval(statement.value)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from [node.attr] * (ast.unparse(node.value) == "self")


def private_names(tree, own):
    """Private names that a module takes from elsewhere: attributes that nobody here defines, and imports of torch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from ((node.lineno, name) for name in node.module.split(".") if is_private(name))
            yield from ((node.lineno, alias.name) for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.Import):
            names = [name for alias in node.names for name in alias.name.split(".") if alias.name.startswith("torch")]
            yield from ((node.lineno, name) for name in names if is_private(name))


def test_private_names_of_torch_are_in_one_module():
    own = {name for file, tree in TREES.items() if file != INTERNALS for name in names_defined(tree)}
    allowed = own | MODULE | OPERATORS | OTHERS
    found = {file: list(private_names(tree, allowed)) for file, tree in TREES.items()}
    assert len(found.pop(INTERNALS)) > 30
    assert {file: names for file, names in found.items() if names} == {}


@pytest.mark.parametrize("name", ["is_compiling", "is_current_stream_capturing"])
def test_one_module_asks_torch_how_a_call_runs(name):
    found = {
        file
        for file, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr == name
        or isinstance(node, ast.ImportFrom)
        and node.module.startswith("torch")
        and name in [a.name for a in node.names]
    }
    # `as_constant` is a workaround for Dynamo, and stands below the module that decides.
    assert found - {INTERNALS} == {EAGER}


def states(file, tree):
    """What modules remember: in threads, contexts, weak tables and lists that begin empty."""
    local = {
        node.name for node in tree.body if isinstance(node, ast.ClassDef) and "threading.local" in ast.unparse(node)
    }
    kinds = "|".join(["threading.local", r"weakref\.Weak\w+", "ContextVar.*", "set", "dict", "list", *local])
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            value = ast.unparse(node.value)
            if re.fullmatch(rf"({kinds})\(.*\)|\[\]|\{{\}}", value) and (
                value[-2:] in ("()", "[]", "{}") or "Var" in value
            ):
                yield f"{file.removesuffix('.py')}.{ast.unparse(target)}"
    assert not any(isinstance(node, ast.Global) for node in ast.walk(tree))


def test_hidden_state_is_listed():
    text = (REPOSITORY / "docs/dev/eager.md").read_text().split("## Hidden state", 1)[1].split("\n## ")[0]
    rows = {
        name
        for line in text.splitlines()
        if line.startswith("| `")
        for name in re.findall("`([^`]+)`", line.split("|")[1])
    }
    strings = [node.value for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    attributes = {each for each in strings if isinstance(each, str) and re.fullmatch(r"_qshard_\w+", each)}
    found = {state for file, tree in TREES.items() for state in states(file, tree)}
    assert rows == attributes | found


FACTORIES = {"empty", "zeros", "ones", "full", "rand", "randn", "empty_strided"}


def test_new_float_tensors_have_a_dtype():
    """Programs may set another default dtype, such as bfloat16. Tensors on meta are read for their strides only."""
    found = {
        f"{file}:{node.lineno}"
        for file, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {f"torch.{name}" for name in FACTORIES}
        if not any(each.arg == "dtype" for each in node.keywords) and "device='meta'" not in ast.unparse(node)
    }
    assert not found
