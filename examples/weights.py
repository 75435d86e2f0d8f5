"""Kinds of weights in train_torch.py (`--weights`), and their sharding (`--mesh`).

All kinds start from the same float32 values and gather the same codes:

    shard    FSDP2; the parameter is a float32 shard, quantized before each gather
    primary  FSDP2; the parameter is codes, quantized once per step from the optimizer's masters
    zero     no FSDP2; ZeroOptimizer has flat slices of codes, masters and states
"""

import gc
import warnings

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import experts_torch
import options
import qshard.torch_bridge as qshard
from gpt import GPTConfig, Schedule, initial_weights, is_quantized
from qshard.recipes import Recipe


def make_mesh(name: str, device: torch.device, ranks: int) -> DeviceMesh:
    """Arrange the ranks in the mesh that `--mesh` names."""
    return init_device_mesh(device.type, options.mesh_shape(name, ranks), mesh_dim_names=options.MESHES[name])


def parallelize_blocks(blocks: nn.ModuleList, mesh: DeviceMesh) -> None:
    """Apply tensor parallelism to all blocks, before FSDP2 shards each rank's part."""
    plan = {
        # q, k and v are one weight, so its shards are not split between heads: attention needs the whole result.
        "qkv": ColwiseParallel(output_layouts=Replicate()),
        "projection": RowwiseParallel(input_layouts=Replicate()),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    for block in blocks:
        parallelize_module(block, mesh, plan)


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Apply FSDP2: a block's weights are gathered when it runs and freed afterwards."""
    assert mesh.mesh_dim_names is not None
    if "tp" in mesh.mesh_dim_names:
        parallelize_blocks(model.blocks, mesh["tp"])
        mesh = mesh["fsdp"]
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=precision)


def make_optimizer(
    model: nn.Module, kind: str, recipe: Recipe | None, schedule: Schedule, name: str
) -> torch.optim.Optimizer:
    """Return AdamW, with weight decay for matrices only; or Muon, which updates embedding, head and norms by AdamW."""
    settings = {"betas": schedule.betas, "eps": schedule.eps}
    muon = {
        "weight_decay": schedule.weight_decay,
        "adjust_lr_fn": "match_rms_adamw",  # fits weight decay, and about the learning rates, of AdamW
        "adamw": {"weight_decay": 0.0, **settings},
    }
    if name == "muon" and kind != "zero":
        return qshard.Muon(model.named_parameters(), **muon)

    def decay(name: str, weight: torch.Tensor) -> dict[str, float]:
        return {"weight_decay": schedule.weight_decay if weight.ndim == 2 else 0.0}

    if kind == "zero":
        given = {"optimizer_class": qshard.AdamW, "settings": decay, **settings}
        given = {"optimizer_class": qshard.Muon, **muon} if name == "muon" else given
        return qshard.ZeroOptimizer(model, shard_weights=True, units=[*model.blocks, model], **given)
    grouped: dict[tuple[int, int], list[nn.Parameter]] = {}  # AdamW needs one mesh per group of weights
    for weight in model.parameters():
        grouped.setdefault((weight.ndim, weight.device_mesh.ndim), []).append(weight)
    groups = [{"params": grouped[key], **decay("", grouped[key][0])} for key in sorted(grouped, reverse=True)]
    if kind == "primary" and recipe is not None:
        return qshard.WithMasters(groups, torch.optim.AdamW, **settings)
    return torch.optim.AdamW(groups, **settings)


def narrow(model: nn.Module) -> None:
    """Cast weights that no recipe quantizes to bfloat16, as FSDP2's policy does for gathers.

    `load_exactly` then restores the float32 values in ZeroOptimizer's masters.
    """
    for weight in model.parameters():
        if not isinstance(weight, qshard.ShardedWeight):
            weight.data = weight.data.bfloat16()


def load_exactly(model: nn.Module, config: GPTConfig) -> None:
    """Load the float32 values that `narrow` has rounded into the masters."""
    model.load_state_dict({name: torch.from_numpy(value) for name, value in initial_weights(config).items()})


def quantize_layers(model: nn.Module, kind: str, recipe: Recipe) -> None:
    """Make the linear layers of the blocks gather and multiply in the recipe's formats."""
    qshard.convert(model, recipe, filter=lambda layer, name: is_quantized(f"{name}.weight"), primary=kind == "primary")
    experts_torch.group(model)


def resident_bytes() -> int:
    """Return the bytes of all tensors of this rank: shards or codes, masters, states, persistent gradients."""
    gc.collect()
    storages = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated classes warn when accessed
        for value in gc.get_objects():
            if type(value) in (torch.Tensor, nn.Parameter) and not value.is_meta and value.layout == torch.strided:
                storage = value.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
