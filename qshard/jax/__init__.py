"""The JAX front end: quantized arrays, linear layers and gathers that work in every mode of JAX."""

from qshard.jax import ops
from qshard.jax._adam import adam
from qshard.jax._array import Plane, QuantizedArray
from qshard.jax._delayed import LinearState, TensorState, init_delayed, merge_observed, spread_states, update_delayed
from qshard.jax._gather import gather
from qshard.jax._linear import linear
from qshard.jax._master import cast_master, join_pieces
from qshard.jax._quantize import compute_scales, quantize
from qshard.jax._zero import ZeroPlan, ZeroWeight, plan_zero, zero_linear

__all__ = [
    "update_delayed",
    "spread_states",
    "merge_observed",
    "init_delayed",
    "TensorState",
    "LinearState",
    "Plane",
    "QuantizedArray",
    "adam",
    "cast_master",
    "compute_scales",
    "gather",
    "join_pieces",
    "linear",
    "ops",
    "quantize",
    "ZeroPlan",
    "ZeroWeight",
    "plan_zero",
    "zero_linear",
]
