"""JAX front end: quantized arrays and gathers, layers, losses, optimizers and model conversion.

Everything here is implemented in private packages. The flax modules `linen` and `nnx` are imported on first access, so
flax is optional.
"""

import importlib
from typing import Any

from qshard._core.environment import missing

if _lack := missing("jax", __name__):
    raise ImportError(_lack)

from qshard._core.layers import MoEPermutation
from qshard._core.quantize_steps import Plane
from qshard.jax import ops, policies
from qshard.jax._convert.convert import convert
from qshard.jax._convert.recipe_metadata import check_recipes, describe_recipes
from qshard.jax._convert.switch import switch_recipe
from qshard.jax._delayed_scaling import (
    LinearState,
    Observed,
    TensorState,
    init_delayed,
    merge_observed,
    spread_states,
    update_delayed,
)
from qshard.jax._experts.ragged_dot import ragged_dot
from qshard.jax._losses.cross_entropy import cross_entropy
from qshard.jax._losses.linear_cross_entropy import linear_cross_entropy
from qshard.jax._moe.grouped_mlp import grouped_mlp
from qshard.jax._moe.permutation import moe_permutation, moe_permute, moe_unpermute
from qshard.jax._moe.router import topk_routing
from qshard.jax._nn.activations import rms_norm, rms_norm_quantize, swiglu, swiglu_quantize
from qshard.jax._nn.dot_general import DotGeneral, einsum
from qshard.jax._nn.linear import gathered_weight, linear
from qshard.jax._nn.policy import Policy, Weight
from qshard.jax._ops.bind import disabled_checks
from qshard.jax._optim.adam import adam, adamw
from qshard.jax._optim.cast_master import cast_master, join_pieces
from qshard.jax._optim.muon import MuonState, muon
from qshard.jax._optim.primary_optimizer import PrimaryOptimizer, PrimaryState, optimizer
from qshard.jax._optim.zero import ZeroPlan, plan_zero
from qshard.jax._probes import Probe, init_numerics, numerics_of
from qshard.jax._quantized.array import QuantizedArray
from qshard.jax._quantized.gather import CodedWeight, Shards, gather
from qshard.jax._quantized.load_quantized import load_quantized
from qshard.jax._quantized.primary import PrimaryWeight, dequantize_tree, value_and_grad
from qshard.jax._quantized.quantize import quantize
from qshard.jax._quantized.serialization import from_plain, to_plain
from qshard.jax._quantized.stream import stream_weights
from qshard.jax._quantized.tree_metadata import describe, rebuild
from qshard.jax._quantized.weight_scales import WeightScales, compute_scales

__all__ = [
    "CodedWeight",
    "DotGeneral",
    "LinearState",
    "MoEPermutation",
    "MuonState",
    "Observed",
    "Plane",
    "Policy",
    "PrimaryOptimizer",
    "PrimaryState",
    "PrimaryWeight",
    "Probe",
    "QuantizedArray",
    "Shards",
    "TensorState",
    "Weight",
    "WeightScales",
    "ZeroPlan",
    "adam",
    "adamw",
    "cast_master",
    "check_recipes",
    "compute_scales",
    "convert",
    "cross_entropy",
    "dequantize_tree",
    "describe",
    "describe_recipes",
    "disabled_checks",
    "einsum",
    "from_plain",
    "gather",
    "gathered_weight",
    "grouped_mlp",
    "init_delayed",
    "init_numerics",
    "join_pieces",
    "linear",
    "linear_cross_entropy",
    "load_quantized",
    "merge_observed",
    "moe_permutation",
    "moe_permute",
    "moe_unpermute",
    "muon",
    "numerics_of",
    "ops",
    "optimizer",
    "plan_zero",
    "policies",
    "quantize",
    "ragged_dot",
    "rebuild",
    "rms_norm",
    "rms_norm_quantize",
    "spread_states",
    "stream_weights",
    "swiglu",
    "swiglu_quantize",
    "switch_recipe",
    "to_plain",
    "topk_routing",
    "update_delayed",
    "value_and_grad",
]


def __getattr__(name: str) -> Any:
    """Import the flax modules on first access."""
    if name in ("linen", "nnx"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
