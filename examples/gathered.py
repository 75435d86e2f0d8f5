"""Measurement of weight all-gathers in PyTorch: their bytes, and copies of the gathered weights."""

from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode


class GatheredBytes(TorchDispatchMode):
    """Counts the bytes that all-gathers write while it is active."""

    total = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if op is torch.ops.c10d._allgather_base_.default:
            self.total += args[0].nbytes
        return op(*args, **(kwargs or {}))


def record_gathered(model: nn.Module) -> dict[str, list[np.ndarray]]:
    """Copy every gathered weight, by name, when its layer first runs.

    Under tensor parallelism a rank gathers only its part. The copy then joins the parts of all ranks.
    """
    gathered: dict[str, list[np.ndarray]] = {}
    hooks = {}

    def copy(layer: nn.Module, inputs: object, names: list[str]) -> None:
        for name in names:
            copy_of(model.get_submodule(name.removesuffix(".weight")).weight, name)
        hooks.pop(layer).remove()

    def copy_of(weight: Any, name: str) -> None:
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        parts = [part for part in local.rowwise if part is not None] if hasattr(local, "rowwise") else [local]
        if isinstance(weight, DTensor):
            parts = [_whole(part.detach(), weight) for part in parts]
        gathered[name] = [
            part.detach().clone().contiguous().flatten().view(torch.uint8).cpu().numpy() for part in parts
        ]

    for layer_name, layer in model.named_modules():
        names = [f"{layer_name}.weight"] if hasattr(layer, "weight") else []
        if hasattr(layer, "experts"):  # one call runs all experts, without calling the modules of single experts
            names = [f"{layer_name}.experts.{expert}.weight" for expert in range(len(layer.experts))]
        if names:
            hooks[layer] = layer.register_forward_pre_hook(partial(copy, names=names))
    return gathered


def _whole(part: Tensor, weight: DTensor) -> Tensor:
    """Join the codes or block scales of a weight that is sharded over ranks. A tensor scale is replicated."""
    (placement,) = weight.placements
    if part.numel() == 1 or not isinstance(placement, Shard):
        return part
    sent = part.contiguous().view(torch.uint8)
    parts = [torch.empty_like(sent) for _ in range(weight.device_mesh.size())]
    dist.all_gather(parts, sent, group=weight.device_mesh.get_group())
    return torch.cat([one.view(part.dtype) for one in parts], placement.dim)
