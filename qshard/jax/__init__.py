"""The JAX front end: quantized arrays, linear layers and gathers that work in every mode of JAX."""

from qshard.jax import ops
from qshard.jax.array import Plane, QuantizedArray
from qshard.jax.delayed import LinearState, TensorState, init_delayed, merge_observed, spread_states, update_delayed
from qshard.jax.gather import gather
from qshard.jax.linear import linear
from qshard.jax.optim.adam import adam, adamw
from qshard.jax.optim.master import cast_master, join_pieces
from qshard.jax.quantize import compute_scales, quantize
from qshard.jax.zero import ZeroPlan, ZeroWeight, plan_zero, zero_linear

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
    "adamw",
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
