"""Supported framework versions, the build information for bug reports, and cuBLASLt: where it is, and its versions.

Products use the cuBLASLt that the process has loaded, as PyTorch and JAX load it. Grouped products of experts need a
newer one than PyTorch brings. So they may use a second library, which is loaded by its path beside the first.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

try:
    from qshard import _ffi

    _built, _problem = _ffi.build_info, ""
except ImportError as error:  # running from the source folder
    _built, _problem = {}, str(error)

OLDEST = {"jax": "0.10.2", "torch": "2.11"}
"""Oldest supported version of each framework. The extras in pyproject.toml require the same versions."""

GROUPED_VARIABLE = "QSHARD_CUBLASLT"
"""Environment variable: the file of the cuBLASLt that grouped products use."""
HOW_TO_GET_GROUPED = (
    "pip install 'qshard[cublas]', or with a framework that pins another nvidia-cublas, install nvidia-cublas>=13.5 "
    f"into a folder of its own and set {GROUPED_VARIABLE} to its libcublasLt.so.13"
)

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


# --- cuBLASLt ---


def library_version() -> int:
    """Return the version of the cuBLASLt that products run on, such as 130400 for 13.4.0.

    The library is the one that the process has loaded (PyTorch and JAX load it), else the one that the system's loader
    finds, else the one in NVIDIA's Python packages. The version is 0 if this build has no CUDA kernels.
    """
    if not _ffi.cuda_built:
        return 0
    names = "cu13/lib/libcublasLt.so.13", "cublas/lib/libcublasLt.so.12"
    _ffi.set_gemm_library_paths(package_files(package_folders(), *names))
    return _ffi.gemm_library_version()


def grouped_library_version() -> int:
    """Return the version of the cuBLASLt that grouped products run on, or 0 if none is new enough.

    The library is the file that the environment variable `QSHARD_CUBLASLT` names. Without the variable, grouped
    products use the library of other products if it is 13.5 or newer, else one in NVIDIA's Python packages.

    Raises:
      ValueError: `QSHARD_CUBLASLT` is not a file.
      RuntimeError: the library that `QSHARD_CUBLASLT` names cannot be used.
    """
    if not _ffi.cuda_built:
        return 0
    library_version()  # the library of other products comes first
    _ffi.set_grouped_gemm_library(*grouped_library_files(os.environ, package_folders()))
    return _ffi.grouped_gemm_library_version()


def grouped_library_files(environ: Mapping[str, str], folders: Iterable[str]) -> tuple[list[str], bool]:
    """Return the files of `grouped_library_version`, and whether the environment requires the only one."""
    required = environ.get(GROUPED_VARIABLE)
    if required and not Path(required).is_file():
        raise ValueError(f"{GROUPED_VARIABLE} ({required}) is not a file; set it to a libcublasLt.so.13, or unset it")
    return [required] if required else package_files(folders, "cu13/lib/libcublasLt.so.13"), bool(required)


def describe_grouped() -> str:
    """Say which library grouped products use, or how to get one."""
    if not _ffi.cuda_built:
        return "none: this build has no CUDA kernels"
    try:
        version = grouped_library_version()
    except (ValueError, RuntimeError) as error:
        return f"none: {error}"
    return describe_library(version, _ffi.grouped_gemm_library_path() if version else "")


def describe_library(version: int, path: str) -> str:
    """Describe a library for grouped products; version 0: how to get one.

    >>> describe_library(130802, "/lib/libcublasLt.so.13")
    'cuBLASLt 13.8.2, /lib/libcublasLt.so.13'
    """
    if not version:
        return f"none: they need cuBLASLt 13.5 or newer; {HOW_TO_GET_GROUPED}"
    release = ".".join(str(part) for part in (version // 10000, version // 100 % 100, version % 100))
    return f"cuBLASLt {release}, {path}"


def package_folders() -> list[str]:
    """Return the folders of NVIDIA's Python packages."""
    return [*(getattr(importlib.util.find_spec("nvidia"), "submodule_search_locations", None) or ())]


def package_files(folders: Iterable[str], *names: str) -> list[str]:
    """Return the files with these names below the folders."""
    return [str(path) for name in names for folder in folders if (path := Path(folder, name)).is_file()]
