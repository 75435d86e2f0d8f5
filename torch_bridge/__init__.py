"""PyTorch front end: quantized tensors, FP8 linear layers, and weights that FSDP2 and ZeRO gather as codes.

    convert(model, CurrentScaling())           # nn.Linear -> Linear, in place
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    ...
    optimizer.step()
    update_scales(model)                       # only needed for DelayedScaling

Importing this package registers the kernels as `torch.ops.qshard.<op>`. Formats and recipes are in `qshard.formats` and
`qshard.recipes`, and the tensor-parallel styles are in `qshard.torch_bridge.tensor_parallel`.
"""

if __name__ != "qshard.torch_bridge":
    raise ImportError(f"{__name__} is not the name of this package; write `import qshard.torch_bridge`")

from qshard._core.environment import missing

if _lack := missing("torch", __name__):
    raise ImportError(_lack)

from qshard._core.layers import MoEPermutation
from qshard._core.quantize_steps import Plane
from qshard.torch_bridge._convert.convert import convert
from qshard.torch_bridge._convert.export import quantized_state_dict
from qshard.torch_bridge._convert.fsdp1 import prepare_modules_for_fsdp1
from qshard.torch_bridge._convert.load_quantized import freeze, load_quantized
from qshard.torch_bridge._convert.quantized_init import quantized_init
from qshard.torch_bridge._delayed_scaling import DelayedScale, update_delayed
from qshard.torch_bridge._distributed.recipe_planners import RecipeLoadPlanner, RecipeSavePlanner
from qshard.torch_bridge._distributed.scaling_state import load_scaling_state, scaling_state
from qshard.torch_bridge._experts.grouped_linear import grouped_linear
from qshard.torch_bridge._experts.layer import GroupedLinear
from qshard.torch_bridge._fsdp.gathered_weight import gathered_weight, is_converted
from qshard.torch_bridge._fsdp.reduce_scatter import reduce_gradients_in_order
from qshard.torch_bridge._fsdp.refresh import update_scales
from qshard.torch_bridge._fsdp.weight import ShardedWeight
from qshard.torch_bridge._losses.cross_entropy import cross_entropy
from qshard.torch_bridge._losses.heads import LinearCrossEntropy
from qshard.torch_bridge._losses.linear_cross_entropy import linear_cross_entropy
from qshard.torch_bridge._moe.experts import parallelize_experts
from qshard.torch_bridge._moe.grouped_mlp import grouped_mlp
from qshard.torch_bridge._moe.layer import MoE
from qshard.torch_bridge._moe.permutation import moe_permutation, moe_permute, moe_unpermute
from qshard.torch_bridge._moe.router import topk_routing
from qshard.torch_bridge._nn.activations import rms_norm, rms_norm_quantize, swiglu, swiglu_quantize
from qshard.torch_bridge._nn.functional import linear
from qshard.torch_bridge._nn.fused_modules import RMSNorm, SwiGLU
from qshard.torch_bridge._nn.linear import Linear
from qshard.torch_bridge._optim.adam import Adam, AdamW
from qshard.torch_bridge._optim.cast_master import CastPlan, cast_master, update_columnwise
from qshard.torch_bridge._optim.muon import Muon
from qshard.torch_bridge._optim.slices import QuantizedSlice, gather_slices, join_pieces
from qshard.torch_bridge._optim.with_masters import WithMasters
from qshard.torch_bridge._probes import numerics_of
from qshard.torch_bridge._quantized.quantize import quantize
from qshard.torch_bridge._quantized.serialization import from_plain, to_plain
from qshard.torch_bridge._quantized.stack import QuantizedStack
from qshard.torch_bridge._quantized.tensor import QuantizedTensor
from qshard.torch_bridge._recipe_switch import switch_recipe
from qshard.torch_bridge._weight_sync.stream import stream_weights
from qshard.torch_bridge._zero.optimizer import ZeroOptimizer

__all__ = [
    "Adam",
    "AdamW",
    "CastPlan",
    "DelayedScale",
    "GroupedLinear",
    "Linear",
    "LinearCrossEntropy",
    "MoE",
    "MoEPermutation",
    "Muon",
    "Plane",
    "QuantizedSlice",
    "QuantizedStack",
    "QuantizedTensor",
    "RMSNorm",
    "RecipeLoadPlanner",
    "RecipeSavePlanner",
    "ShardedWeight",
    "SwiGLU",
    "WithMasters",
    "ZeroOptimizer",
    "cast_master",
    "convert",
    "cross_entropy",
    "freeze",
    "from_plain",
    "gather_slices",
    "gathered_weight",
    "grouped_linear",
    "grouped_mlp",
    "is_converted",
    "join_pieces",
    "linear",
    "linear_cross_entropy",
    "load_quantized",
    "load_scaling_state",
    "moe_permutation",
    "moe_permute",
    "moe_unpermute",
    "numerics_of",
    "parallelize_experts",
    "prepare_modules_for_fsdp1",
    "quantize",
    "quantized_init",
    "quantized_state_dict",
    "reduce_gradients_in_order",
    "rms_norm",
    "rms_norm_quantize",
    "scaling_state",
    "stream_weights",
    "swiglu",
    "swiglu_quantize",
    "switch_recipe",
    "to_plain",
    "topk_routing",
    "update_columnwise",
    "update_delayed",
    "update_scales",
]
