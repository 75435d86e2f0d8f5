"""qshard: sharded weights in FP8, MXFP8, MXFP6, MXFP4 and NVFP4, the same bits in JAX, PyTorch and NumPy.

`qshard.formats` names how numbers are stored, `qshard.recipes` which format each role takes. Some names,
`NVFP4` for one, are those of a format and of a recipe, so use them through their modules. A module is imported when it
is first used: `import qshard` imports neither jax nor torch, `qshard.jax` imports jax.

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

# Modules, and the modules of names, that are imported when they are first used.
_NEEDS = {"jax": "jax", "torch_bridge": "torch"}
_MODULES = {"formats", "gemm_dispatch", "layout", "numerics", "op_table", "recipes", "reference"}
_HOMES = {"Role": "recipes", "Usage": "formats", "__version__": "_core.environment", "build_info": "_core.environment"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(f"qshard.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    if name in _MODULES or name in _NEEDS:
        return importlib.import_module(f"qshard.{name}")  # which also makes it an attribute
    raise AttributeError(f"module 'qshard' has no attribute {name!r}")


def __dir__() -> list[str]:
    """What there is; of the front ends, those whose framework is installed, as tools look at all that is listed."""
    front_ends = {name for name, framework in _NEEDS.items() if importlib.util.find_spec(framework)}
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__, *_MODULES, *front_ends})


def num_threads() -> int:
    """How many threads a CPU kernel may use outside JAX, the caller's included.

    It is what `set_num_threads` was given; else, of calls on torch tensors, `torch.get_num_threads()`; else
    `OMP_NUM_THREADS`; else the cores that affinity and the quota of a container leave, shared by the `LOCAL_WORLD_SIZE`
    ranks of a host. JAX lends kernels the threads of its own pool.
    """
    from qshard import _ffi

    return _ffi.num_threads()


def set_num_threads(n: int) -> None:
    """Sets how many threads a CPU kernel may use outside JAX, whatever torch uses.

    Args:
      n: 1 or more. Takes effect for the next call.

    Raises:
      ValueError: n is not positive.
    """
    from qshard import _ffi

    _ffi.set_num_threads(n)


if (
    importlib.util.find_spec("qshard._ffi") is None
):  # the source folder, which Python found before the installed package
    from qshard import _checkout

    _checkout.hand_over()
