"""Import redirection from a source checkout to the installed package.

Python that runs in a checkout finds ./qshard before the installed package, but only the installed package has the
compiled extension and `torch_bridge`. The whole package is replaced, so that modules of two versions never mix.
"""

from __future__ import annotations

import filecmp
import importlib.util
import sys
import warnings
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

_FOLDER = Path(__file__).parent


def hand_over() -> None:
    """Replace this package by the installed one, or register a finder that explains how to install it.

    Call it at the end of `qshard/__init__.py`: the import of the package then returns the entry of `sys.modules`.
    """
    spec = _find_installed()
    if spec is None or spec.loader is None:
        sys.meta_path.append(_InstallHint)
        return
    _warn_of_changes(Path(str(spec.origin)).parent)
    package = importlib.util.module_from_spec(spec)
    for name in [name for name in sys.modules if name == "qshard" or name.startswith("qshard.")]:
        del sys.modules[name]
    sys.modules["qshard"] = package
    spec.loader.exec_module(package)


def _find_installed() -> ModuleSpec | None:
    """Find the first qshard with an extension on the rest of `sys.path`."""
    for entry in sys.path:
        if Path(entry).resolve() != _FOLDER.parent.resolve():
            spec = PathFinder.find_spec("qshard", [entry])
            if spec and PathFinder.find_spec("qshard._ffi", spec.submodule_search_locations):
                return spec
    return None


def _warn_of_changes(installed: Path) -> None:
    """Warn if files of the checkout differ from the installed ones: edits take effect only after installation."""
    pairs = [(_FOLDER, installed), (_FOLDER.parent / "torch_bridge", installed / "torch_bridge")]
    changed = [
        path
        for here, there in pairs
        for path in sorted(here.rglob("*.py"))
        if not (there / path.relative_to(here)).exists()
        or not filecmp.cmp(path, there / path.relative_to(here), shallow=False)
    ]
    if changed:
        warnings.warn(
            f"qshard: the installed package in {installed} is used, but {len(changed)} files of this checkout differ "
            f"from it, such as {changed[0].relative_to(_FOLDER.parent)}; run `pip install .` again, or `pip install -e "
            ".` once",
            stacklevel=4,  # the caller's `import qshard`
        )


class _InstallHint:
    """The last finder on `sys.meta_path`: replaces `No module named` by an error with the remedy."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: ModuleType | None = None) -> None:
        """Raise ImportError for modules that only an installation has."""
        if name not in ("qshard._ffi", "qshard.torch_bridge"):
            return
        if (_FOLDER.parent / "pyproject.toml").exists():
            what = f"is the source folder and is not installed; run `pip install {_FOLDER.parent}`"
        else:
            what = f"was installed for another Python than {sys.executable}; install qshard for this one"
        raise ImportError(f"{name}: {_FOLDER} {what}")
