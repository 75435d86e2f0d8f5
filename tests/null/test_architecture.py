"""Names in backticks in ARCHITECTURE.md, CONTRIBUTING.md and docs/dev exist: files, modules, definitions, ops."""

import ast
import fnmatch
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
FOREIGN = {
    "jax": "jax.random jax.eval_shape shard_map",
    "optax": "optax.apply_updates",
    "torch": "DistributedDataParallel .data .grad as_strided dcp.load from_local parallelize_module record_stream "
    "to_local torch.distributed.checkpoint torch.ops.qshard",
    "XLA": "XLA_FFI_CallFrame",
    "Python": "functools.cache",
    "CMake": "CXXFLAGS LDFLAGS",
    "Nsight Compute": "ncu",
    "pytest and Markdown": "slow pycon",
}
"""Names of others, by their owner. They are not looked up."""
SOURCES = (".py", ".pyi", ".def", ".cc", ".h", ".inc", ".cu", ".cuh", ".txt")
TOPS = ("qshard", "torch_bridge", "ffi", "tests", "docs", "benchmarks", "examples", "requirements")
NOT_HERE = re.compile(r"(\.venv|build)(/.*)?|.*SUBJECT.*|[0-9a-f]{7}|_qshard_\w+|_\w+/\w+\._\w+")
"""Products of a build, placeholders, commits, and hidden state, which `test_torch_sources.py` looks up."""


PAGES = [
    REPOSITORY / "ARCHITECTURE.md",
    REPOSITORY / "CONTRIBUTING.md",
    *sorted((REPOSITORY / "docs/dev").glob("*.md")),
]
TEXT = re.sub(
    r"^```.*?^```$",
    "",
    "".join(page.read_text() for page in PAGES),
    flags=re.MULTILINE | re.DOTALL,
)


def names() -> list[str]:
    """Spans of code that are one name or path, also before `()`; not expressions, shapes and single letters."""
    spans = {re.sub(r"\(.*\)$", "", span) for span in re.findall(r"`([^`\n]+)`", TEXT)}
    return sorted(
        span for span in spans if re.fullmatch(r"[\w./*]*\w\w[\w./*]*", span) and not NOT_HERE.fullmatch(span)
    )


@functools.cache
def paths() -> list[str]:
    """Files and folders of the repository; folders end with a slash."""
    found = [path for top in TOPS for path in (REPOSITORY / top).rglob("*")]
    found += [path for path in REPOSITORY.iterdir() if not path.name.startswith(".")]
    return [f"/{path.relative_to(REPOSITORY).as_posix()}{'/' * path.is_dir()}" for path in found]


@functools.cache
def definitions() -> set[str]:
    """Folders and modules; classes, functions, arguments and fields of Python; words of C++ and of ops.def."""
    found = {Path(path).stem for path in paths()}
    for path in (REPOSITORY / path[1:] for path in paths() if path.endswith(SOURCES)):
        if path.suffix in (".py", ".pyi"):
            found.update(_defined(path.stem, ast.parse(path.read_text())))
        else:
            found.update(re.findall(r"\w+", re.sub(r"//.*", "", path.read_text())))
    return found


def _defined(scope: str, tree: ast.AST) -> Iterator[str]:
    """Names that are defined in a module or class, alone and after the name of their scope."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) if node is not tree:
                yield from _defined(name, node)
            case ast.FunctionDef(name=name) | ast.arg(arg=name):
                pass
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                pass
            case _:
                continue
        yield from (name, f"{scope}.{name}")


def exists(name: str) -> bool:
    if "/" in name or name.endswith((*SOURCES, ".md", ".toml")):
        file, _, attribute = name.rpartition(".")
        if f"{file.rpartition('/')[2]}.{attribute}" in definitions():
            return exists(f"{file}.py")
        return any(fnmatch.fnmatchcase(path, f"*/{name}{end}") for path in paths() for end in ("", "/", ".*"))
    if "*" in name:
        return bool(fnmatch.filter(definitions(), name))
    return ".".join(name.removeprefix("qshard.").split(".")[-2:]) in definitions()


@pytest.mark.parametrize("name", names())
def test_names_in_backticks_exist(name):
    assert exists(name) or name in " ".join(FOREIGN.values()).split(), "correct it, or name its owner in FOREIGN"


def test_foreign_names_are_in_use():
    assert set(" ".join(FOREIGN.values()).split()) <= set(names())


@pytest.mark.parametrize(("name", "file"), re.findall(r"`([\w.]+)`,? (?:in |\()`([\w/]+\.\w+)`", TEXT))
def test_a_file_has_the_name_that_the_page_places_in_it(name, file):
    texts = [(REPOSITORY / path[1:]).read_text() for path in paths() if path.endswith(f"/{file}")]
    assert any(re.search(rf"\b{name.rpartition('.')[2]}\b", text) for text in texts)


def test_a_name_that_is_not_there_is_found():
    assert all(map(exists, ("qshard.formats", "Format.kind", "quantize_block*", "ffi/ops/*.cc", "_ops/bind.into")))
    assert not any(map(exists, ("qshard.no_module", "Format.no_field", "no_op*", "ffi/ops/*.py", "_fsdp/bind.into")))
