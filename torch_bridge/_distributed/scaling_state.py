"""Scaling state of a model: delayed scales, amax histories and seeds, saved in a checkpoint of their own.

Layers that `switch_recipe` has changed also have an entry `recipe`, the text of their recipe as bytes.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from qshard._core.validation import quote
from qshard.torch_bridge._distributed.dtensor import local_box, wrapped_like
from qshard.torch_bridge._ops.collectives import join_scalars, max_over_ranks, split_scalars
from qshard.torch_bridge._quantized.validation import check_group, check_model

_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
"""Parts that torch.compile, activation checkpointing and FSDP1 insert into qualified names."""


@torch.no_grad()
def scaling_state(model: nn.Module, group: dist.ProcessGroup | None = None) -> dict[str, Tensor]:
    """Return the scaling state of all layers of `model`: scales, amax histories and seeds, by qualified name.

    Of layers that `switch_recipe` has changed it also contains the recipe.

    `model.state_dict()` does not contain it, so that models of any recipe, or of none, can load each other's
    checkpoints. Save it to resume a run with the same bits under `DelayedScaling` or with stochastic rounding.

    Args:
      model: on any device, sharded or not.
      group: ranks that save the state together. Their amaxes since the last update are merged first, so any of them may
        save or load the state without changing a bit of the run. Collective. None: this rank's own amaxes. All ranks
        have the same right after `update_scales`, but not after a later forward pass, as in a validation.

    Returns:
      The buffers themselves, as in `state_dict`, on this rank; empty if no layer has any. `torch.save` and
      `torch.distributed.checkpoint` accept them. Scales are equal on all ranks after `update_scales`. Seeds are equal
      if the ranks built the model under the same `torch.manual_seed`. Otherwise a checkpoint of all ranks keeps one of
      them, and ranks draw different bits after loading it.

    Raises:
      TypeError: `model` is not a module, or `group` is not a process group.

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
        merged = max_over_ranks(join_scalars(amaxes), group)
        torch._foreach_copy_(amaxes, list(split_scalars(merged, amaxes)))
    recipes = {name: recipe for name, (recipe, is_switched) in _named_recipes(model).items() if is_switched}
    return state | {name: torch.tensor([*recipe.encode()], dtype=torch.uint8) for name, recipe in recipes.items()}


@torch.no_grad()
def load_scaling_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy a state from `scaling_state` into the layers of `model`: all of it, or nothing if it raises.

    The models must have the same layers and recipes; devices may differ. Each rank loads its own copy, without
    communication. Under a `ZeroOptimizer` weights are cast again by the loaded scales: then it is collective.

    Raises:
      TypeError: `model` is not a module, or `state` is not a dict.
      ValueError: names, shapes or dtypes differ from the state of `model`; or the state was saved after a
        `switch_recipe` that `model` lacks.

    >>> import qshard.torch_bridge as qt
    >>> one, other = (qt.convert(nn.Sequential(nn.Linear(16, 32)), "DelayedScaling") for _ in range(2))
    >>> _ = one[0].delayed["weight"].scale.fill_(2.0)
    >>> load_scaling_state(other, scaling_state(one))
    >>> other[0].delayed["weight"].scale
    tensor(2.)
    """
    check_model("load_scaling_state", model)
    if not isinstance(state, Mapping):
        raise TypeError(f"load_scaling_state: state ({quote(state)}) is not a dict; pass the result of scaling_state")
    own = dict(_named_state(model))
    state = _in_form_of(own, _without_recipes(model, state))
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
        given = state[name]
        if isinstance(buffer, DTensor) and not isinstance(given, DTensor):
            given = wrapped_like(buffer, given[local_box(buffer).slices].to(buffer.device))
        buffer.copy_(given)
    scales = [module for module in model.modules() if hasattr(module, "scaling_buffers")]
    casts: set[Callable[[], None] | None] = {getattr(scale, "on_load", None) for scale in scales}
    for on_load in casts:
        if on_load is not None:
            on_load()


def _named_recipes(model: nn.Module) -> dict[str, tuple[str, bool]]:
    """Return the text of the recipe of each converted layer, and whether `switch_recipe` has changed it."""
    return {
        ".".join([*plain_name(model, name), "recipe"]): (repr(module.recipe), bool(switched))
        for name, module in model.named_modules()
        if (switched := getattr(module, "converted", None)) is not None
    }


def _without_recipes(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state without its recipes, and raise if the model has others."""
    own = _named_recipes(model)
    for name in own.keys() & state.keys():
        saved, (recipe, _) = bytes(state[name].tolist()).decode(), own[name]
        if saved != recipe:
            raise ValueError(
                f"load_scaling_state: state was saved after switch_recipe, with {name.removesuffix('.recipe')} in "
                f"{saved}, but here it has {recipe}; call switch_recipe as in that run, then load"
            )
    return {name: value for name, value in state.items() if name.rpartition(".")[2] != "recipe"}


_OF_EXPERT = re.compile(r"(?P<layer>(?:.*\.)?experts)\.(?P<index>\d+)\.(?P<rest>delayed\..*|seed)")


def _in_form_of(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Stack or split the state of experts, if it was saved by the other form of `GroupedLinear`.

    >>> _in_form_of({"experts.seed": torch.zeros(1, 2)}, {"experts.0.seed": torch.ones(2)})
    {'experts.seed': tensor([[1., 1.]])}
    """
    found = dict(state)
    stacks: dict[str, dict[int, str]] = {}
    for name in state:
        if (parts := _OF_EXPERT.fullmatch(name)) is not None:
            stacks.setdefault(f"{parts['layer']}.{parts['rest']}", {})[int(parts["index"])] = name
    for whole, names in stacks.items():
        if whole in own and len(names) == len(own[whole]):
            found[whole] = torch.stack([found.pop(names[index]) for index in range(len(names))])
    for name in own:
        if (parts := _OF_EXPERT.fullmatch(name)) is not None and name not in state:
            whole = f"{parts['layer']}.{parts['rest']}"
            if whole in state and int(parts["index"]) < len(state[whole]):
                found[name] = state[whole][int(parts["index"])]
                found.pop(whole, None)
    return found


def _fits(given: Any, own: Tensor) -> bool:
    return isinstance(given, Tensor) and (given.shape, given.dtype) == (own.shape, own.dtype)


def _named_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that modules list in `scaling_buffers`, after `restore_buffers` has undone casts of them."""
    for name, module in model.named_modules():
        if (restore := getattr(module, "restore_buffers", None)) is not None:
            restore()
        for buffer_name in getattr(module, "scaling_buffers", ()):
            buffer = module._buffers.get(buffer_name)
            if buffer is not None:
                yield ".".join([*plain_name(model, name), buffer_name]), buffer


def plain_name(model: nn.Module, name: str) -> Iterator[str]:
    """Yield the parts of a qualified name, without the parts that wrappers insert."""
    module = model
    for part in name.split(".") if name else ():
        wrapped = part in _WRAPPERS or part == "module" and isinstance(module, nn.parallel.DistributedDataParallel)
        if not wrapped:
            yield part
        module = module.get_submodule(part)


@contextlib.contextmanager
def load_state_if_present(module: Any, state_dict: Mapping[str, Any], prefix: str) -> Iterator[None]:
    """Make `module` load the scaling state in a state dict, if there is any.

    State dicts of older versions contain it; current ones do not, and then loading must not report missing keys.
    """
    non_persistent = module._non_persistent_buffers_set
    there = {name for name in module.scaling_buffers if prefix + name in state_dict}
    module._non_persistent_buffers_set = non_persistent - there
    try:
        yield
    finally:
        module._non_persistent_buffers_set = non_persistent
