"""Pages of the API: the public names of each module, found in its source, for mkdocstrings to fill in.

Nothing is imported. A name that a package takes from another module is shown as defined there, under its public name.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]

MODULES = [
    "qshard",
    "qshard.formats",
    "qshard.recipes",
    "qshard.layout",
    "qshard.op_table",
    "qshard.gemm_dispatch",
    "qshard.reference",
    "qshard.numerics",
    "qshard.jax",
    "qshard.jax.linen",
    "qshard.jax.nnx",
    "qshard.jax.ops",
    "qshard.jax.policies",
    "qshard.torch_bridge",
    "qshard.torch_bridge.tensor_parallel",
]
"""Those that have a page."""


def source_of(module: str) -> Path | None:
    """The file of a module; torch_bridge is part of qshard only once it is installed."""
    parts = module.removeprefix("qshard.").split(".") if module.startswith("qshard.torch_bridge") else module.split(".")
    base = REPOSITORY.joinpath(*parts)
    return next((path for path in (base / "__init__.py", base.with_suffix(".py")) if path.is_file()), None)


@functools.cache
def tree_of(module: str) -> ast.Module:
    path = source_of(module)
    assert path is not None, module
    return ast.parse(path.read_text())


def public_names(module: str) -> list[str]:
    """`__all__`; of a module without, what it defines and does not mark as its own by an underscore."""
    defined = definitions(module)
    if "__all__" in defined:
        listed = ast.literal_eval(defined["__all__"].value)
        return sorted(listed, key=lambda name: (name.lower(), name))
    return [name for name in defined if not name.startswith("_")]


def definitions(module: str) -> dict[str, ast.stmt]:
    """What a module defines at its top level, by name, in its order."""
    found: dict[str, ast.stmt] = {}
    for statement in tree_of(module).body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            found[statement.name] = statement
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            found |= {target.id: statement for target in targets if isinstance(target, ast.Name)}
    return found


def home_of(module: str, name: str) -> str:
    """The path of the definition of a public name: through imports, also those for type checkers alone.

    Raises:
      LookupError: the module neither defines nor imports it.
    """
    if name in definitions(module):
        return f"{module}.{name}"
    for statement in ast.walk(tree_of(module)):
        if isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            for alias in statement.names:
                if (alias.asname or alias.name) == name:
                    inside = f"{statement.module}.{alias.name}"
                    return inside if source_of(inside) else home_of(statement.module, alias.name)
    raise LookupError(f"{module} has no {name}; correct its __all__")


def page(module: str) -> str:
    """The page of a module: its docstring, then each public name; of what another page has, the link to it."""
    names = {name: home_of(module, name) for name in public_names(module)}
    inner = sorted({*(home for home in names.values() if source_of(home)), *children(module)})
    links = [f"[`{home}`]({home}.md)" for home in inner if home in MODULES]
    blocks = [f"# {module}", directive(module, members="false", show_root_heading="false", show_root_toc_entry="false")]
    if links:
        blocks.append("Modules with pages of their own: " + ", ".join(links) + ".")
    for name, home in names.items():
        if home in inner:
            continue
        owner = page_of(home)
        if owner == module:
            blocks.append(directive(home, heading=f"{module}.{name}"))
        else:
            heading = f'## {module}.{name} {{ data-toc-label="{name}" }}'
            blocks.append(f"{heading}\n\nThe same as [`{owner}.{name}`]({owner}.md#{home}).")
    return "\n\n".join(blocks) + "\n"


@functools.cache
def page_of(home: str) -> str:
    """The module whose page shows what is defined at `home`: the one that defines it, or the first one that has it."""
    inside, _, name = home.rpartition(".")
    every = [inside] * (inside in MODULES) + [module for module in MODULES if name in public_names(module)]
    return next(module for module in every if home_of(module, name) == home)


def children(module: str) -> list[str]:
    return [other for other in MODULES if other.rpartition(".")[0] == module]


def directive(path: str, **options: str) -> str:
    lines = [f"        {name}: {value}" for name, value in options.items()]
    return "\n".join([f"::: {path}", "    options:", *lines])
