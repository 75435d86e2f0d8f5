"""The rules of folders and names: what is private, how large a package is, and that each says what it holds."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
FOLDERS = {"qshard": REPOSITORY / "qshard", "qshard.torch_bridge": REPOSITORY / "torch_bridge"}
pytestmark = pytest.mark.skipif(not FOLDERS["qshard"].is_dir(), reason="the sources are not here")

# Public modules: each has a page in the API reference. All others have a path component that begins with an underscore.
PUBLIC = {*re.findall(r"api/([\w.]+)\.md", (REPOSITORY / "docs/site/mkdocs.yml").read_text())}
# A bare past participle names no thing and no action. Regular ones end in -ed; these are irregular.
IRREGULAR = {
    "made",
    "kept",
    "held",
    "given",
    "taken",
    "shown",
    "drawn",
    "found",
    "known",
    "seen",
    "told",
    "sent",
    "done",
}
NOUNS = {"seed", "need", "feed"}
ALLOWED = {
    "_quantized": "the field's word for arrays and tensors in low precision",
    "_distributed": "the word of torch.distributed",
    "Observed": "public: amaxes that leave the backward pass of JAX",
    "Quantized": "public: the result of the oracle",
}


def modules() -> dict[str, Path]:
    """Every module by its import name; a package is its `__init__`."""
    found = {}
    for name, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            parts = [name, *path.relative_to(folder).with_suffix("").parts]
            if "torch_bridge" in parts[1:]:
                continue  # The link in a checkout.
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


MODULES = modules()
PACKAGES = sorted(name for name, path in MODULES.items() if path.name == "__init__.py")


def test_what_is_public_is_listed_and_the_rest_looks_private():
    looks_public = {name for name in MODULES if not any(part.startswith("_") for part in name.split("."))}
    assert looks_public == PUBLIC


@pytest.mark.parametrize("package", [name for name in PACKAGES if "._" in name])
def test_a_private_package_has_three_to_twelve_modules_and_says_what_lives_there(package):
    inside = [name for name in MODULES if name.rpartition(".")[0] == package]
    assert 3 <= len(inside) <= 12, sorted(inside)
    says = ast.get_docstring(ast.parse(MODULES[package].read_text()))
    assert says
    assert len(re.findall(r"[.](?:\s|$)", says)) >= 2, "two sentences: what lives there, and what does not"


def is_participle(name: str) -> bool:
    word = name.strip("_")
    return word in IRREGULAR or (word.endswith("ed") and "_" not in word and word not in NOUNS and word.islower())


@pytest.mark.parametrize("module", sorted(MODULES))
def test_no_name_is_a_bare_past_participle(module):
    """Of the module itself and of its classes and functions."""
    defined = [
        node.name
        for node in ast.parse(MODULES[module].read_text()).body
        if isinstance(node, (ast.ClassDef, ast.FunctionDef))
    ]
    names = {module.rpartition(".")[2], *defined} - {*ALLOWED}
    assert [name for name in names if is_participle(name.lower())] == []


def test_no_module_imports_a_private_name_of_another():
    known = {*MODULES, "qshard._ffi"}
    found = [
        f"{module}: {alias.name}"
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("qshard")
        for alias in node.names
        if re.match(r"_[a-z]", alias.name) and f"{node.module}.{alias.name}" not in known
    ]
    assert found == []
