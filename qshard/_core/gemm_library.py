"""cuBLASLt, the library that runs GEMMs on GPUs: where it is, and its versions.

Products use the library that the process has loaded, as PyTorch and JAX load it. Grouped products of experts need a
newer one than PyTorch brings. So they may use a second library, which is loaded by its path beside the first.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from qshard import _ffi

GROUPED_VARIABLE = "QSHARD_CUBLASLT"
"""Environment variable: the file of the cuBLASLt that grouped products use."""
HOW_TO_GET_GROUPED = (
    "pip install 'qshard[cublas]', or with a framework that pins another nvidia-cublas, install nvidia-cublas>=13.5 "
    f"into a folder of its own and set {GROUPED_VARIABLE} to its libcublasLt.so.13"
)


def library_version() -> int:
    """Return the version of the cuBLASLt that products run on, such as 130400 for 13.4.0.

    The library is the one that the process has loaded (PyTorch and JAX load it), else the one that the system's loader
    finds, else the one in NVIDIA's Python packages. The version is 0 if this build has no CUDA kernels.
    """
    if not _ffi.cuda_built:
        return 0
    _ffi.set_gemm_library_paths(_package_files("cu13/lib/libcublasLt.so.13", "cublas/lib/libcublasLt.so.12"))
    return _ffi.gemm_library_version()


def grouped_library_version() -> int:
    """Return the version of the cuBLASLt that grouped products run on, or 0 if none is new enough.

    The library is the file that the environment variable `QSHARD_CUBLASLT` names. Without the variable it is that of
    other products if it is 13.5 or newer, else one in NVIDIA's Python packages. Its grouped layouts are CUDA 13's.

    Raises:
      ValueError: `QSHARD_CUBLASLT` is not a file.
      RuntimeError: the library that `QSHARD_CUBLASLT` names cannot be used.
    """
    if not _ffi.cuda_built:
        return 0
    library_version()  # gives the files of other products, whose library comes first
    required = os.environ.get(GROUPED_VARIABLE)
    if required and not Path(required).is_file():
        raise ValueError(f"{GROUPED_VARIABLE} ({required}) is not a file; set it to a libcublasLt.so.13, or unset it")
    files = [required] if required else _package_files("cu13/lib/libcublasLt.so.13")
    _ffi.set_grouped_gemm_library(files, bool(required))
    return _ffi.grouped_gemm_library_version()


def describe_grouped() -> str:
    """Say which library grouped products use, or how to get one."""
    if not _ffi.cuda_built:
        return "none: this build has no CUDA kernels"
    try:
        version = grouped_library_version()
    except (ValueError, RuntimeError) as error:
        return f"none: {error}"
    if not version:
        return f"none: they need cuBLASLt 13.5 or newer; {HOW_TO_GET_GROUPED}"
    release = ".".join(str(part) for part in (version // 10000, version // 100 % 100, version % 100))
    return f"cuBLASLt {release}, {_ffi.grouped_gemm_library_path()}"


def _package_files(*names: str) -> list[str]:
    folders = getattr(find_spec("nvidia"), "submodule_search_locations", None) or ()
    return [str(path) for name in names for folder in folders if (path := Path(folder, name)).is_file()]
