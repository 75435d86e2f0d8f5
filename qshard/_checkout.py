"""A checkout's ./qshard stands before the installed package, for whoever runs Python there: it hands over to that.

Only what is installed has the compiled extension, and has torch_bridge inside. The package is handed over whole, so
that no module of the checkout meets one of another version.
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
    """Puts the installed qshard in the place of this one; where there is none, says so to who needs it.

    Called at the end of this package's import, which then gives what `sys.modules` has.
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
    """The first qshard with an extension on the rest of the path."""
    for entry in sys.path:
        if Path(entry).resolve() != _FOLDER.parent.resolve():
            spec = PathFinder.find_spec("qshard", [entry])
            if spec and PathFinder.find_spec("qshard._ffi", spec.submodule_search_locations):
                return spec
    return None


def _warn_of_changes(installed: Path) -> None:
    """An edit in a checkout does nothing until it is installed; nobody should have to find that out."""
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
            stacklevel=4,  # whoever imports qshard
        )


class _InstallHint:
    """The last finder: in place of `No module named`, one line that says what is missing."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: ModuleType | None = None) -> None:
        if name not in ("qshard._ffi", "qshard.torch_bridge"):
            return
        if (_FOLDER.parent / "pyproject.toml").exists():
            what = f"is the source folder and is not installed; run `pip install {_FOLDER.parent}`"
        else:
            what = f"was installed for another Python than {sys.executable}; install qshard for this one"
        raise ImportError(f"{name}: {_FOLDER} {what}")
