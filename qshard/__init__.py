"""qshard: sharded weights in FP8, MXFP8, MXFP6, MXFP4 and NVFP4, the same bits in JAX, PyTorch and NumPy.

`qshard.formats` names how numbers are stored, `qshard.recipes` which format each role takes. Some names,
`NVFP4` for one, are those of a format and of a recipe, so use them through their modules. Importing `qshard` imports
neither jax nor torch.
"""

from qshard import formats, recipes
from qshard.formats import Usage
from qshard.recipes import Role

__version__ = "0.1.0"
__all__ = ["Role", "Usage", "__version__", "formats", "num_threads", "recipes", "set_num_threads"]


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
