"""State dicts of `Adam`: conversion to plain values that checkpoints, collectives and pickle accept, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from qshard._core.optimizers import adam
from qshard._core.validation import join_names
from qshard.torch_bridge._distributed.dtensor import local_of, wrapped_like
from qshard.torch_bridge._ops.bind import dtype_name

SCALED = tuple(getattr(torch, name) for name in adam.SCALED)
_AS_BYTES = (torch.int16, *(dtype for dtype in SCALED if dtype.itemsize == 1))
"""Dtypes that gloo, and partly pickle, rejects. A plain state has them as bytes: `{"int16": <uint8 [*shape, 2]>}`."""
_OF_STATES = (*(getattr(torch, name) for name in adam.STATES), torch.int16)
"""Dtypes of states; int16 is the dtype of "remainder"."""
_DTYPES = ("exp_avg_dtype", "exp_avg_sq_dtype")
"""Settings that are dtypes, stored by name in a state dict."""


class Uncast:
    """A wrapped tensor, to keep torch's `load_state_dict` from casting it to the dtype of the parameter."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor

    def on(self, op: str, name: str, parameter: Tensor) -> Tensor:
        """Return the tensor on the device of its parameter.

        torch shards a full state only if the optimizer has a tensor of the same name, and so of the same dtype.

        Raises:
          TypeError: no state has the dtype of the tensor.
          ValueError: the tensor is whole and the parameter is sharded.
        """
        if name != "step" and self.tensor.dtype not in _OF_STATES:
            known = join_names(map(dtype_name, _OF_STATES))
            raise TypeError(f"{op}: state {name} ({dtype_name(self.tensor.dtype)}) is not {known}; cast it first")
        if isinstance(parameter, DTensor) and self.tensor.ndim and not isinstance(self.tensor, DTensor):
            given = dtype_name(self.tensor.dtype)
            raise ValueError(
                f"{op}: state {name} ({given}) is of the whole parameter {tuple(parameter.shape)}, which is sharded; "
                f"load it with set_optimizer_state_dict into an optimizer whose {name} is {given}"
            )
        dtype = torch.float32 if name == "step" else self.tensor.dtype
        there: Tensor = self.tensor.to(device=parameter.device, dtype=dtype)
        return there


def to_plain(state_dict: dict[str, Any], groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Convert a state dict of torch's `Optimizer`: dtypes to names, and tensors that gloo cannot send to bytes."""
    states = {
        key: {name: _as_bytes(value) for name, value in state.items()} for key, state in state_dict["state"].items()
    }
    plain = [
        {
            **packed,
            **{name: dtype_name(own[name]) for name in _DTYPES},
            # torch's Adam rejects `capturable` on a CPU.
            "capturable": any(parameter.device.type != "cpu" for parameter in own["params"]),
        }
        for packed, own in zip(state_dict["param_groups"], groups, strict=True)
    ]
    return {**state_dict, "state": states, "param_groups": plain}


def from_plain(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Invert `to_plain`, with tensors as `Uncast`. Dtypes and tensors that are not converted are accepted too."""
    states = {
        key: {name: _from_bytes(value) for name, value in state.items() if not _is_absent(value)}
        for key, state in state_dict["state"].items()
    }
    groups = [
        {name: _dtype_of(value) if name in _DTYPES else value for name, value in group.items()}
        for group in state_dict["param_groups"]
    ]
    return {**state_dict, "state": states, "param_groups": groups}


def _as_bytes(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.dtype not in _AS_BYTES:
        return value
    of_each = (value.itemsize,) if value.itemsize > 1 else ()  # An axis of its own keeps the sharding.
    local = local_of(value)
    data = local.contiguous().view(-1).view(torch.uint8).view(*local.shape, *of_each)
    return {dtype_name(value.dtype): wrapped_like(value, data, (*value.shape, *of_each))}


def _from_bytes(value: Any) -> Any:
    if isinstance(value, dict) and len(value) == 1:
        ((name, data),) = value.items()
        dtype = _dtype_of(name)
        if dtype in _AS_BYTES:
            shape, local = data.shape[: data.ndim - (dtype.itemsize > 1)], local_of(data)
            own = local.shape[: len(shape)]
            value = wrapped_like(data, local.contiguous().view(-1).view(dtype).view(own), shape)
    return Uncast(value) if isinstance(value, Tensor) else value


def _is_absent(value: Any) -> bool:
    """Return True for an empty dict: torch fills in one for a state that a flat state dict lacks."""
    return isinstance(value, dict) and not value


def _dtype_of(name: Any) -> Any:
    return getattr(torch, name, name) if isinstance(name, str) else name
