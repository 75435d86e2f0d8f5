"""Supported framework versions, and the build information for bug reports."""

from __future__ import annotations

import importlib.util
import platform
import re
import sys
from importlib import metadata

try:
    from qshard import _ffi

    _built, _problem = _ffi.build_info, ""
except ImportError as error:  # running from the source folder
    _built, _problem = {}, str(error)

OLDEST = {"jax": "0.10.2", "torch": "2.11"}
"""Oldest supported version of each framework. The extras in pyproject.toml require the same versions."""

__version__ = _built.get("version", "0+source")
"""Version with a local label for the build: 0.1.0+cpu, 0.1.0+cu130."""


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def missing(framework: str, module: str) -> str | None:
    """Return what to install so that `module` runs: its framework, or a newer version of it; None if all is there.

    Frameworks are not imported.

    >>> missing("numpy", "qshard.reference") is None
    True
    """
    if importlib.util.find_spec(framework) is None:
        return f"{module} needs {framework}, which is not installed: pip install 'qshard[{framework}]'"
    found, oldest = _version(framework), OLDEST.get(framework, "0")
    if found is not None and _release(found) < _release(oldest):
        asked = f"'{framework}>={oldest}'"
        return f"{module} needs {framework} {oldest} or newer, and {found} is installed: pip install --upgrade {asked}"
    return None


def _release(version: str) -> tuple[int, ...]:
    """Parse the release numbers of a version, without its pre-release, development or local suffix."""
    return tuple(map(int, re.findall(r"\d+", re.split(r"[^\d.]", version)[0])))


def build_info() -> str:
    """Describe this installation for a bug report: versions, build options, and the CPU kernels in use.

    Frameworks are looked up, not imported.

    >>> print(build_info())
    qshard ...
    Python ...
    """
    if _problem:
        how = _problem
    else:
        cuda = f"CUDA {_built['cuda']} for {_built['cuda_architectures']}" if _built["cuda"] else "no CUDA"
        how = f"{cuda}, CPU kernels for {_ffi.simd()} (of {_built['simd']}), {_built['compiler']}"
    packages = ["numpy", "ml_dtypes", "jax", "jaxlib", "torch"]
    versions = ", ".join(f"{name} {_version(name) or 'absent'}" for name in packages)
    python = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    return f"qshard {__version__}: {how}\n{python}, {versions}\n{sys.modules['qshard'].__path__[0]}"
