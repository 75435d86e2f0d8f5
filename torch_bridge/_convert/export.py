"""`quantized_state_dict`: exports a converted model with its weights as codes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from qshard.formats import Usage
from qshard.torch_bridge._delayed_scaling import DelayedScale
from qshard.torch_bridge._distributed.dtensor import local_of
from qshard.torch_bridge._fsdp.code_gather import gather_codes, row_shard_plan
from qshard.torch_bridge._fsdp.weight import ShardedWeight, plain
from qshard.torch_bridge._quantized.plane_programs import quantize_operand
from qshard.torch_bridge._quantized.tensor import QuantizedTensor
from qshard.torch_bridge._quantized.validation import check_model


@torch.no_grad()
def quantized_state_dict(
    model: nn.Module, *, rank0_only: bool = False, cpu_offload: bool = False
) -> dict[str, QuantizedTensor | Tensor]:
    """Return the full state dict of a converted model, with the weights of its `Linear`s as codes.

        tensors, metadata = to_plain(quantized_state_dict(model, rank0_only=True, cpu_offload=True))
        save_file(tensors, "codes.safetensors", metadata)   # on rank 0

    Names are the names in `model.state_dict()`. The scaling state, `delayed.*` and `seed`, is left out.

    Args:
      model: after `convert`, sharded by FSDP2 or not.
      rank0_only: other ranks free each tensor once it is gathered, and return an empty dict.
      cpu_offload: move tensors to the CPU, one by one.

    Returns:
      `QuantizedTensor`s, bit for bit the whole weight quantized at once, and plain tensors. `to_plain` converts them to
      tensors for safetensors, which `qshard.jax.from_plain` also reads. `.dequantize()` gives values for any model.

    Raises:
      TypeError: `model` is not a module.
      RuntimeError: the memory of a weight is freed, as under a `ZeroOptimizer` with sharded weights.

    Collective: weights sharded by rows, also after `parallelize_module`, are gathered as codes, after an all-reduce of
    the amaxes that shards share. Weights with another sharding, and parameters that are not weights of a `Linear`, are
    gathered in their own dtype.

    >>> from qshard.recipes import CurrentScaling
    >>> from qshard.torch_bridge import convert, to_plain
    >>> model = convert(nn.Sequential(nn.Linear(32, 16)), CurrentScaling())
    >>> quantized_state_dict(model)["0.weight"]
    QuantizedTensor(FP8_E4M3[nonfinite=nan], shape=(16, 32), dtype=torch.float32, device=cpu)
    >>> sorted(to_plain(quantized_state_dict(model))[0])
    ['0.bias', '0.weight.rowwise.data', '0.weight.rowwise.scale_inv']
    """
    check_model("quantized_state_dict", model)
    is_returned = not rank0_only or not dist.is_initialized() or dist.get_rank() == 0
    state_dict: dict[str, Any] = {}
    gathered: dict[int, Any] = {}  # Shared weights are gathered once.
    for name, value in entries_of(model):
        if id(value) not in gathered:
            whole = quantized_weight("quantized_state_dict", value)
            if not is_returned:
                gathered[id(value)] = None
                continue
            gathered[id(value)] = whole.cpu() if cpu_offload else whole
        if is_returned:
            state_dict[name] = gathered[id(value)]
    return state_dict


def entries_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the entries of `model.state_dict()` as the parameters themselves, without scaling state."""
    found = []
    for prefix, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, DelayedScale):
            continue
        for name, value in (*module._parameters.items(), *module._buffers.items()):
            is_seed = name == "seed" and hasattr(module, "recipe")
            if value is not None and name not in module._non_persistent_buffers_set and not is_seed:
                found.append((f"{prefix}.{name}" if prefix else name, value))
    return found


def quantized_weight(op: str, value: Tensor) -> Tensor:
    """Return a whole weight of a converted `Linear` as codes, and another tensor as values. Collective.

    Errors name the caller `op`.
    """
    local = local_of(value)
    if isinstance(local, QuantizedTensor):  # Currently unsharded, or of a `ZeroOptimizer`.
        local.describe()  # Raises if there is no memory.
        return local.detach().clone()
    fmt = local.scale_state.fmt if isinstance(local, ShardedWeight) and local.ndim == 2 else None
    if fmt is None:
        value = plain(value)
        return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
    assert isinstance(local, ShardedWeight)
    state, shape = local.scale_state, tuple(value.shape)
    if fmt.slice_refusal is None and (plan := row_shard_plan(op, value, fmt)) is not None:
        return QuantizedTensor(fmt, shape, value.dtype, rowwise=gather_codes(value, plan))
    high = plain(value)
    high = (high.full_tensor() if isinstance(high, DTensor) else high).contiguous()
    scale = None if state.delayed is None else state.delayed.scale
    assert state.operand is not None
    planes, _ = quantize_operand(high, state.operand, scale=scale)
    return QuantizedTensor(fmt, shape, value.dtype, rowwise=planes[Usage.ROWWISE])
