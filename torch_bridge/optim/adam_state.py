"""What `Adam` keeps for a parameter, and which parameters and settings it takes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from qshard import adam
from qshard.adam import BLOCK
from qshard.torch_bridge.dtensor import local_of, wrapped_like
from qshard.torch_bridge.fsdp.weight import memory_of
from qshard.torch_bridge.ops import dtype_name
from qshard.torch_bridge.tensor import QuantizedTensor

__all__ = ["SCALED", "check_group", "initialize"]

SCALED = tuple(getattr(torch, name) for name in adam.SCALED)
STATES = tuple(getattr(torch, name) for name in adam.STATES)
_MASTERS = (None, "remainder", "float32")


def initialize(state: dict[str, Any], parameter: Tensor, group: dict[str, Any]) -> None:
    """Adds what a state lacks."""
    memory = memory_of(parameter)
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=memory.device)
    for name in ("exp_avg", "exp_avg_sq"):
        if name in state:
            if state[name].dtype in SCALED and f"{name}_scale_inv" not in state:
                raise ValueError(
                    f"Adam: state {name} ({state[name].dtype}) has no {name}_scale_inv; load it as float32"
                )
            continue
        dtype = group[f"{name}_dtype"]
        if dtype in SCALED and parameter.ndim < 2:
            dtype = torch.float32
        state[name] = wrapped_like(parameter, torch.zeros(memory.shape, dtype=dtype, device=memory.device))
        if dtype in SCALED:
            ones = torch.ones(_blocks(memory.shape), dtype=torch.float32, device=memory.device)
            state[f"{name}_scale_inv"] = wrapped_like(parameter, ones, _blocks(parameter.shape))
    if memory.dtype != torch.float32 and not {"master", "remainder"} & state.keys():
        if group["master_weights"] == "float32":
            state["master"] = wrapped_like(parameter, memory.float())
        elif group["master_weights"] == "remainder":
            zeros = torch.zeros(memory.shape, dtype=torch.int16, device=memory.device)
            state["remainder"] = wrapped_like(parameter, zeros)


def _blocks(shape: Sequence[int]) -> tuple[int, int]:
    """The shape of the scales of a state: one for every block of a row."""
    return shape[0], -(-math.prod(shape[1:]) // BLOCK)


def check_group(group: dict[str, Any]) -> None:
    for name in ("lr", "eps", "weight_decay"):
        value = group[name]
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"Adam: {name} {tuple(value.shape)} is not one number")
        if not isinstance(value, Tensor) and not value >= 0:  # To look into a tensor would be to wait for a device.
            raise ValueError(f"Adam: {name} ({value}) is not a number from 0 up")
    if not all(0 <= beta < 1 for beta in group["betas"]):
        raise ValueError(f"Adam: betas {tuple(group['betas'])} are not from 0 to below 1")
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        if group[name] not in STATES:
            raise TypeError(f"Adam: {name} ({group[name]}) is not one of {_list_of(STATES)}")
    if group["master_weights"] not in _MASTERS:
        raise ValueError(f"Adam: master_weights ({group['master_weights']}) is not None, 'remainder' or 'float32'")
    for parameter in group["params"]:
        _check_parameter(parameter, group)


def _check_parameter(parameter: Tensor, group: dict[str, Any]) -> None:
    """Raises for what all ranks see alike: nothing here depends on the part of a rank."""
    local = local_of(parameter)
    shape = tuple(parameter.shape)
    if isinstance(local, QuantizedTensor):
        raise TypeError(f"Adam: parameter {shape} (QuantizedTensor) is not of floats; give the optimizer its master")
    if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"Adam: parameter {shape} ({parameter.dtype}) is not float32, bfloat16 or float16; cast it")
    if group["master_weights"] == "remainder" and parameter.dtype == torch.float16:
        raise TypeError(
            f"Adam: parameter {shape} (float16) is not bfloat16, which alone takes a remainder; "
            "give master_weights='float32'"
        )
    if not memory_of(parameter).is_contiguous():
        raise ValueError(f"Adam: parameter {shape} (strides {parameter.stride()}) is not contiguous; make it so")
    scaled = {group["exp_avg_dtype"], group["exp_avg_sq_dtype"]} & set(SCALED)
    if scaled and parameter.ndim >= 2 and isinstance(parameter, DTensor):
        for i, placement in enumerate(parameter.placements):
            axis = getattr(placement, "dim", 0)
            row, shards = math.prod(parameter.shape[1:]), parameter.device_mesh.size(i)
            if axis > 1 or (axis == 1 and (parameter.shape[1] % shards or row // shards % BLOCK)):
                raise ValueError(
                    f"Adam: parameter {shape} (cut into {shards} along axis {axis}) is not cut at blocks of {BLOCK}, "
                    f"which states in {_list_of(scaled)} have scales for; cut axis 0, or keep states in bfloat16"
                )


def _list_of(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(dtype_name(dtype) for dtype in dtypes)
