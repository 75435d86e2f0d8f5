"""qshard: sharded weights in FP8, MXFP8 and NVFP4, the same bits in JAX, PyTorch and NumPy.

`qshard.formats` names how numbers are stored, `qshard.recipes` which format each role takes. Both hold an `NVFP4`
(a format, a recipe), so use them through their modules. Importing `qshard` imports neither jax nor torch.
"""

from qshard import formats, recipes
from qshard.formats import Usage
from qshard.recipes import Role

__version__ = "0.1.0"
__all__ = ["Role", "Usage", "__version__", "formats", "recipes"]
