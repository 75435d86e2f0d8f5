"""The JAX front end: quantized arrays, linear layers and gathers that work in every mode of JAX."""

from qshard.jax import ops
from qshard.jax._array import Plane, QuantizedArray
from qshard.jax._gather import gather
from qshard.jax._linear import linear
from qshard.jax._quantize import compute_scales, quantize

__all__ = ["Plane", "QuantizedArray", "compute_scales", "gather", "linear", "ops", "quantize"]
