"""FSDP1, `FullyShardedDataParallel`: detection of its flat parameters and wrappers, and state that survives it.

`_convert/fsdp1.py` has `prepare_modules_for_fsdp1`, and describes how layers run under FSDP1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FlatParameter, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from qshard.recipes import Role
from qshard.torch_bridge._torch_internals import base_of, modules_of_flat

_STATE = "_qshard_delayed"
"""Attribute of a parameter that FSDP1 will flatten: its name and its `DelayedScale`."""


def flat_of(weight: Tensor) -> Tensor | None:
    """Return the flat parameter that `weight` is a view of; None if there is none.

    FSDP1 frees the memory of such a view after a pass, and refills it before the next pass or the backward pass reads
    it. So autograd saves the view, as for a plain layer, and not codes of it.
    """
    base = base_of(weight) if type(weight) is Tensor else None
    return base if isinstance(base, FlatParameter) else None


def wrapper_of(module: nn.Module) -> str | None:
    """Return the name of the wrapper that owns a module's parameters: FSDP1 or DistributedDataParallel; else None."""
    if "_flat_param" in module._parameters:
        return FullyShardedDataParallel.__name__
    return type(module).__name__ if isinstance(module, DistributedDataParallel | FullyShardedDataParallel) else None


def is_flattened_model(model: nn.Module) -> bool:
    """Return whether FSDP1 shards part of a model: parameters are then flat, and their shards no rows of weights."""
    return any(wrapper_of(module) == FullyShardedDataParallel.__name__ for module in model.modules())


def attach_delayed(parameter: nn.Parameter, name: str, delayed: nn.Module) -> None:
    """Store the `DelayedScale` of a parameter on the parameter, because FSDP1 removes the parameter from its layer."""
    setattr(parameter, _STATE, (name, delayed))


def delayed_of(parameter: Tensor) -> list[tuple[str, Any]]:
    """Return names and `DelayedScale`s of the weights in a parameter of FSDP1 that a step changes."""
    found: tuple[str, Any] | None = parameter.__dict__.get(_STATE)
    if found is not None:
        # FSDP1 sets no gradient on a rank without elements, but that rank must take part in the update.
        is_empty = parameter.requires_grad and not parameter.numel()
        return [found] if is_empty or parameter.grad is not None else []
    if not isinstance(parameter, FlatParameter) or parameter.grad is None:
        return []
    layers: list[tuple[str, Any]] = modules_of_flat(parameter)
    return [
        (name, layer.delayed[Role.WEIGHT.value])
        for name, layer in layers
        if name.endswith("weight") and "delayed" in layer._modules
    ]


class Float32Buffers(nn.Module):
    """A module that can protect its float32 buffers from casts.

    FSDP1 casts buffers with `MixedPrecision(buffer_dtype=)` once, before the first forward pass. After `keep_bits`,
    `restore_buffers` undoes that.
    """

    _kept: dict[str, Tensor] | None = None  # Memory of each protected buffer; None before `keep_bits`.

    def keep_bits(self) -> None:
        if self._kept is None:
            self._kept = {}
        self.restore_buffers()

    def restore_buffers(self) -> None:
        """Undo a cast of the buffers. Call it before every use."""
        if self._kept is None:
            return
        for name, buffer in self._buffers.items():
            assert buffer is not None
            if buffer.dtype is not torch.float32:
                buffer.data = self._kept[name].to(buffer.device)
            elif name not in self._kept or self._kept[name].data_ptr() != buffer.data_ptr():
                self._kept[name] = buffer.detach()

    def __getstate__(self) -> dict[str, Any]:
        self.restore_buffers()
        return {**self.__dict__, "_kept": None if self._kept is None else {}}
