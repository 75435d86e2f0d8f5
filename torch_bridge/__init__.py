"""The PyTorch front end: quantized tensors, FP8 linear layers, and FSDP2 weights that are quantized before the gather.

    convert(model, CurrentScaling())           # nn.Linear -> Linear, in place
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    ...
    optimizer.step()
    update_scales(model)                       # one all-reduce for all weights

Importing it makes `torch.ops.qshard.<op>`, the same kernels as operators.
"""

if __name__ != "qshard.torch_bridge":
    raise ImportError(f"{__name__} is not the name of this package; write `import qshard.torch_bridge`")

from qshard.torch_bridge._adam import Adam
from qshard.torch_bridge._convert import convert
from qshard.torch_bridge._delayed import DelayedScale, update_delayed
from qshard.torch_bridge._layer import Linear
from qshard.torch_bridge._linear import linear
from qshard.torch_bridge._master import CastPlan, cast_master, update_columnwise
from qshard.torch_bridge._quantize import quantize
from qshard.torch_bridge._scales import update_scales
from qshard.torch_bridge._slices import QuantizedSlice, gather_slices, join_pieces
from qshard.torch_bridge._tensor import Plane, QuantizedTensor
from qshard.torch_bridge._weight import ShardedWeight
from qshard.torch_bridge.zero import ZeroOptimizer

__all__ = [
    "Adam",
    "CastPlan",
    "DelayedScale",
    "Linear",
    "Plane",
    "QuantizedSlice",
    "QuantizedTensor",
    "ShardedWeight",
    "ZeroOptimizer",
    "cast_master",
    "convert",
    "gather_slices",
    "join_pieces",
    "linear",
    "quantize",
    "update_columnwise",
    "update_delayed",
    "update_scales",
]
