"""The state of scaling: what layers carry from step to step beside their weights, for checkpoints of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from qshard._core.validation import quote
from qshard.torch_bridge._ops.collectives import max_over_ranks
from qshard.torch_bridge._quantized.validation import check_group, check_model

_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
"""What torch.compile, activation checkpointing and FSDP1 put into names."""


@torch.no_grad()
def scaling_state(model: nn.Module, group: dist.ProcessGroup | None = None) -> dict[str, Tensor]:
    """The state of scaling of all layers of `model`, by name: scales and histories of amaxes, and seeds.

    `model.state_dict()` has none of it, so that models of any recipe, and of none, load each other's. A run that goes
    on with the same bits needs it under `DelayedScaling`, and where a recipe rounds stochastically.

    Args:
      model: on any device, sharded or not.
      group: the ranks that save it together, whose amaxes since the last update are merged first: then any of them may
        save or load it, and no bit of the run changes. Collective. None: this rank's own, which are those of all right
        after `update_scales`, but not after a forward pass since, as of a validation.

    Returns:
      The very tensors, as `state_dict` does, on this rank: empty if no layer has any. `torch.save`, and
      `torch.distributed.checkpoint`, take them. Scales are equal on all ranks after `update_scales`. Seeds are so if
      ranks have made the model under the same `torch.manual_seed`; of others the checkpoint of all ranks keeps one,
      and they draw other bits once it is loaded.

    >>> import qshard.torch_bridge as qt
    >>> model = qt.convert(nn.Sequential(nn.Linear(16, 32)), "DelayedScaling")
    >>> state = scaling_state(model)
    >>> state["0.delayed.weight.scale"], list(model.state_dict())
    (tensor(0.), ['0.weight', '0.bias'])
    >>> load_scaling_state(model, state)
    """
    check_model("scaling_state", model)
    check_group("scaling_state", group)
    state = {name: buffer.detach() for name, buffer in _named_state(model)}
    amaxes = [buffer for name, buffer in state.items() if name.endswith(".amax")]
    if amaxes and group is not None:
        torch._foreach_copy_(amaxes, list(max_over_ranks(torch.stack(amaxes), group).unbind()))
    return state


@torch.no_grad()
def load_scaling_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Puts what `scaling_state` gave into the layers of `model`, all of it or, with an error, nothing.

    Args:
      model: has the layers and recipes of the model that the state is of.
      state: on any device.

    Raises:
      ValueError: the state is of other layers.
    """
    check_model("load_scaling_state", model)
    if not isinstance(state, Mapping):
        raise TypeError(f"load_scaling_state: state ({quote(state)}) is not a dict; pass the result of scaling_state")
    own = dict(_named_state(model))
    for what, names in (
        ("lacks", [name for name in own if name not in state]),
        ("also has", [name for name in state if name not in own]),
        ("has another shape for", [name for name in own if name in state and not _fits(state[name], own[name])]),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ValueError(
                f"load_scaling_state: state (of {len(state)} tensors) {what} {names[0]}{more}; pass the result of "
                "scaling_state for a model of the same layers and recipes"
            )
    for name, buffer in own.items():
        buffer.copy_(state[name])


def _fits(given: Any, own: Tensor) -> bool:
    return isinstance(given, Tensor) and (given.shape, given.dtype) == (own.shape, own.dtype)


def _named_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Of each module that keeps some: its `scaling_buffers` says which, and `restore_buffers` undoes casts of them."""
    for name, module in model.named_modules():
        if (restore := getattr(module, "restore_buffers", None)) is not None:
            restore()
        for kept in getattr(module, "scaling_buffers", ()):
            buffer = module._buffers.get(kept)
            if buffer is not None:
                yield ".".join([*plain_name(model, name), kept]), buffer


def plain_name(model: nn.Module, name: str) -> Iterator[str]:
    """The parts of a qualified name, without those of wrappers."""
    module = model
    for part in name.split(".") if name else ():
        wrapped = part in _WRAPPERS or part == "module" and isinstance(module, nn.parallel.DistributedDataParallel)
        if not wrapped:
            yield part
        module = module.get_submodule(part)


@contextlib.contextmanager
def loaded_if_there(module: Any, state_dict: Mapping[str, Any], prefix: str) -> Iterator[None]:
    """For loading: the state of scaling is in no state dict, but counts where one has it, as older files do."""
    kept = module._non_persistent_buffers_set
    there = {name for name in module.scaling_buffers if prefix + name in state_dict}
    module._non_persistent_buffers_set = kept - there
    try:
        yield
    finally:
        module._non_persistent_buffers_set = kept
