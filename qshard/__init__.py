"""Quantization of sharded weights to FP8, MXFP8, MXFP6, MXFP4 and NVFP4, with the same bits in JAX, PyTorch and NumPy.

`qshard.formats` defines number formats; `qshard.recipes` assigns a format to each tensor of a layer. A format and a
recipe may share a name (`NVFP4`), so refer to both through their modules. Submodules are imported on first use. Only
`qshard.jax` imports jax, and only `qshard.torch_bridge` imports torch.

>>> import qshard
>>> qshard.formats.MXFP8_E4M3.block
(1, 32)
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qshard import formats as formats
    from qshard import gemm_dispatch as gemm_dispatch
    from qshard import jax as jax
    from qshard import layout as layout
    from qshard import numerics as numerics
    from qshard import op_table as op_table
    from qshard import recipes as recipes
    from qshard import reference as reference
    from qshard import torch_bridge as torch_bridge
    from qshard._core.environment import __version__ as __version__
    from qshard._core.environment import build_info as build_info
    from qshard.formats import Usage as Usage
    from qshard.recipes import Role as Role

__all__ = ["Role", "Usage", "__version__", "build_info", "formats", "num_threads", "recipes", "set_num_threads"]

# Front ends with the framework that each needs, other submodules, and the submodule that defines each lazy name.
_NEEDS = {"jax": "jax", "torch_bridge": "torch"}
_MODULES = {"formats", "gemm_dispatch", "layout", "numerics", "op_table", "recipes", "reference"}
_HOMES = {"Role": "recipes", "Usage": "formats", "__version__": "_core.environment", "build_info": "_core.environment"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(f"qshard.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    if name in _MODULES or name in _NEEDS:
        return importlib.import_module(f"qshard.{name}")  # the import also binds the attribute
    raise AttributeError(f"module 'qshard' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List public names; front ends only if their framework is installed, because tools import every listed name."""
    front_ends = {name for name, framework in _NEEDS.items() if importlib.util.find_spec(framework)}
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__, *_MODULES, *front_ends})


def num_threads() -> int:
    """Return the number of threads that a CPU kernel may use outside JAX, including the calling thread.

    The first of these that applies: the value passed to `set_num_threads`; `torch.get_num_threads()`, for calls on
    torch tensors; `OMP_NUM_THREADS`; the available cores (CPU affinity and container quota) divided by
    `LOCAL_WORLD_SIZE`. Inside JAX, kernels run on XLA's own thread pool.

    >>> import qshard
    >>> qshard.num_threads() >= 1
    True
    """
    from qshard import _ffi

    return _ffi.num_threads()


def set_num_threads(n: int) -> None:
    """Set the number of threads that a CPU kernel may use outside JAX, independently of torch's setting.

    Args:
      n: number of threads, at least 1. Takes effect with the next call.

    Raises:
      ValueError: `n` is not positive.
    """
    from qshard import _ffi

    _ffi.set_num_threads(n)


if importlib.util.find_spec("qshard._ffi") is None:
    # This is the source folder, found before the installed package.
    from qshard import _checkout

    _checkout.hand_over()
