"""FSDP1, `FullyShardedDataParallel`, as layers, delayed scaling and `convert` meet it.

`prepare_modules_for_fsdp1` (`_convert/fsdp1.py`) gets layers ready for it, and describes how they run in it.
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
"""The attribute of a parameter that FSDP1 is to take: its name, and its `DelayedScale`."""


def flat_of(weight: Tensor) -> Tensor | None:
    """The flat parameter that `weight` is a view of; None if it is not.

    FSDP1 frees the memory of such a view after a pass, and fills it again before the next one, or the backward pass,
    reads it. So autograd keeps the view, as that of a plain layer, and no codes of it.
    """
    base = base_of(weight) if type(weight) is Tensor else None
    return base if isinstance(base, FlatParameter) else None


def wrapper_of(module: nn.Module) -> str | None:
    """The wrapper that has taken the parameters of a module: FSDP1 or DistributedDataParallel, if it is one itself."""
    if "_flat_param" in module._parameters:
        return FullyShardedDataParallel.__name__
    return type(module).__name__ if isinstance(module, DistributedDataParallel | FullyShardedDataParallel) else None


def is_flattened(parameter: nn.Parameter) -> bool:
    """Returns True if FSDP1 has put a parameter into a flat one."""
    return "_fsdp_flattened" in vars(parameter)


def note_delayed(parameter: nn.Parameter, name: str, delayed: nn.Module) -> None:
    """Notes the `DelayedScale` of a parameter on itself: FSDP1 takes it from its layer."""
    setattr(parameter, _STATE, (name, delayed))


def delayed_of(parameter: Tensor) -> list[tuple[str, Any]] | None:
    """Names and `DelayedScale`s of the weights that a step on `parameter` changes; None if FSDP1 does not have it."""
    noted: tuple[str, Any] | None = parameter.__dict__.get(_STATE)
    if noted is not None:
        # FSDP1 gives no gradient to a rank without elements, which has to hear of it like all others.
        is_empty = parameter.requires_grad and not parameter.numel()
        return [noted] if is_empty or parameter.grad is not None else []
    if not isinstance(parameter, FlatParameter):
        return None
    layers: list[tuple[str, Any]] = [] if parameter.grad is None else modules_of_flat(parameter)
    return [
        (name, layer.delayed[Role.WEIGHT.value])
        for name, layer in layers
        if name.endswith("weight") and "delayed" in layer._modules
    ]


class Float32Buffers(nn.Module):
    """A module with buffers that keep their float32 bits, once `keep_bits` is called.

    FSDP1 casts buffers with `MixedPrecision(buffer_dtype=)`, once, before the first forward pass.
    """

    _kept: dict[str, Tensor] | None = None  # The memory of each buffer, once `keep_bits` was called.

    def keep_bits(self) -> None:
        """From now on `restore_buffers` gives buffers back their bits."""
        if self._kept is None:
            self._kept = {}
        self.restore_buffers()

    def restore_buffers(self) -> None:
        """Undoes a cast of the buffers. Called before they are used."""
        if self._kept is None:
            return
        for name, buffer in self._buffers.items():
            assert buffer is not None
            if buffer.dtype is not torch.float32:
                buffer.data = self._kept[name].to(buffer.device)
            elif name not in self._kept or self._kept[name].data_ptr() != buffer.data_ptr():
                self._kept[name] = buffer.detach()

    def __getstate__(self) -> dict[str, Any]:
        """Without memory of the buffers."""
        self.restore_buffers()
        return {**self.__dict__, "_kept": None if self._kept is None else {}}
