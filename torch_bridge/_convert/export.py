"""A converted model as a state dict of codes, for files: each weight is gathered once, as codes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from qshard.formats import Usage
from qshard.torch_bridge._delayed_scaling import DelayedScale
from qshard.torch_bridge._distributed.dtensor import local_of
from qshard.torch_bridge._fsdp.functional import gather, row_sharding_of
from qshard.torch_bridge._fsdp.weight import ShardedWeight, plain
from qshard.torch_bridge._quantized.plane_programs import quantize_operand
from qshard.torch_bridge._quantized.tensor import QuantizedTensor
from qshard.torch_bridge._quantized.validation import check_model


@torch.no_grad()
def quantized_state_dict(
    model: nn.Module, *, rank0_only: bool = False, cpu_offload: bool = False
) -> dict[str, QuantizedTensor | Tensor]:
    """The state dict of a converted model, whole, with the weights of its `Linear`s as they are multiplied with.

        save_file(*to_plain(quantized_state_dict(model, rank0_only=True, cpu_offload=True)))   # on rank 0

    Names are those of `model.state_dict()`. State of scaling, `delayed.*` and `seed`, is left out.

    Args:
      model: after `convert`, sharded by FSDP2 or not.
      rank0_only: the others let go of each tensor as soon as they have passed it on, and return nothing.
      cpu_offload: tensors are moved to the CPU, one by one.

    Returns:
      `QuantizedTensor`s, bit for bit those of the whole weight cast at once, and plain tensors. `to_plain` makes arrays
      for safetensors of them, which `qshard.jax.from_plain` reads too, and `.dequantize()` values for any model.

    Raises:
      RuntimeError: a weight has no memory now, as one of a `ZeroOptimizer` with sharded weights between its uses.

    Collective: a weight that is cut by rows is gathered as codes, after an all-reduce of its amaxes; what is cut in
    another way, and what is no weight of a `Linear`, in its own dtype.

    >>> from qshard.recipes import CurrentScaling
    >>> from qshard.torch_bridge import convert, to_plain
    >>> model = convert(nn.Sequential(nn.Linear(32, 16)), CurrentScaling())
    >>> quantized_state_dict(model)["0.weight"]
    QuantizedTensor(FP8_E4M3[nonfinite=nan], shape=(16, 32), dtype=torch.float32, device=cpu)
    >>> sorted(to_plain(quantized_state_dict(model))[0])
    ['0.bias', '0.weight.rowwise.data', '0.weight.rowwise.scale_inv']
    """
    check_model("quantized_state_dict", model)
    kept = not rank0_only or not dist.is_initialized() or dist.get_rank() == 0
    made: dict[str, Any] = {}
    seen: dict[int, Any] = {}  # Weights that layers share are gathered once.
    for name, value in _entries(model):
        if id(value) not in seen:
            whole = _whole(value)
            if not kept:
                seen[id(value)] = None
                continue
            seen[id(value)] = whole.cpu() if cpu_offload else whole
        if kept:
            made[name] = seen[id(value)]
    return made


def _entries(model: nn.Module) -> list[tuple[str, Tensor]]:
    """What `model.state_dict()` has, but the parameters themselves, without state of scaling."""
    found = []
    for prefix, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, DelayedScale):
            continue
        for name, value in (*module._parameters.items(), *module._buffers.items()):
            is_seed = name == "seed" and hasattr(module, "recipe")
            if value is not None and name not in module._non_persistent_buffers_set and not is_seed:
                found.append((f"{prefix}.{name}" if prefix else name, value))
    return found


def _whole(value: Tensor) -> Tensor:
    local = local_of(value)
    if isinstance(local, QuantizedTensor):  # Unsharded now, or of a `ZeroOptimizer`.
        local.described()  # Raises if there is no memory.
        return local.detach().clone()
    if not isinstance(local, ShardedWeight):
        return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
    if isinstance(value, DTensor) and (cut := row_sharding_of(value)) is not None:
        return gather(local, cut, value.dtype, observe=False)
    state, high = local.scale_state, plain(value)
    high = (high.full_tensor() if isinstance(high, DTensor) else high).contiguous()
    scale = None if state.delayed is None else state.delayed.scale
    planes, _ = quantize_operand(high, state.operand, scale=scale)
    return QuantizedTensor(state.fmt, tuple(high.shape), value.dtype, rowwise=planes[Usage.ROWWISE])
