"""Hooks by which sharded weights are there when they are used, and gradients leave when they have been made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from qshard.torch_bridge._quantized.device_moves import Move, changes, guard_moves
from qshard.torch_bridge._zero.flat_buffers import Flat
from qshard.torch_bridge._zero.placeholders import SlicedWeight, weakly
from qshard.torch_bridge._zero.schedule import Schedule
from qshard.torch_bridge._zero.weight import Weight


class Hook:
    """A hook on a module, which no compiler traces, and which copies and pickles of the module have no use for."""

    def __init__(self, call: Callable[..., Any] | None = None):
        self._call = None if call is None else torch.compiler.disable(call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return None if self._call is None else self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, ()


class ArrivalHook:
    """The hook of a parameter by which its gradient leaves as soon as it is made."""

    def __init__(self, take: Callable[[Tensor], None]):
        self._take = take

    def __call__(self, parameter: Tensor) -> None:
        self._take(parameter)


def watch_gradients(flat: Flat) -> None:
    """Takes gradients as soon as they are made."""
    for index, weight in enumerate(flat.weights):
        weight.parameter.register_post_accumulate_grad_hook(ArrivalHook(weakly(flat.take_arrived, index)))


def is_trained(parameter: Any) -> bool:
    """Whether a ZeroOptimizer trains a parameter."""
    hooks = parameter._post_accumulate_grad_hooks or {}
    return isinstance(parameter, SlicedWeight) or any(isinstance(hook, ArrivalHook) for hook in hooks.values())


def watch_moves(model: nn.Module, weights: Sequence[Weight]) -> None:
    """Sees to it that a move of the model, or of a module of it that has weights, raises before anything has moved."""
    owned: dict[nn.Module, list[Weight]] = {model: [*weights]}
    for weight in weights:
        for module, _ in weight.owners:
            if module is not model:
                owned.setdefault(module, []).append(weight)

    def check(module: nn.Module, move: Move) -> None:
        for weight in owned[module]:
            if changes(move, weight.shown):
                raise RuntimeError(
                    f"ZeroOptimizer: {weight.name} cannot be moved after the optimizer was made, whose masters and "
                    "buffers would stay where they are; call .to() of the model before"
                )

    for module in owned:
        guard_moves(module, Hook(check))


def watch_uses(module: nn.Module, flat: Flat, schedule: Schedule, renew: Callable[[], None]) -> None:
    """Gathers sharded weights before their module runs, and frees them after it, so too in backward."""
    schedule.flats.append(flat)
    flat.gradient_is_whole = schedule.pass_on

    def before_backward(_: Tensor) -> None:
        if not schedule.in_backward:
            schedule.begin_backward()
            torch.autograd.Variable._execution_engine.queue_callback(schedule.end_backward)
        flat.in_backward = True
        schedule.take(flat)

    def before_forward(*_: Any) -> None:
        renew()
        schedule.take(flat)

    def after_forward(_module: nn.Module, _args: Any, output: Any) -> None:
        tensors = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor)]
        if torch.is_grad_enabled() and not tensors:
            raise TypeError(
                f"ZeroOptimizer: output of a unit ({type(output).__name__}) holds no tensor to see backward pass "
                "by; return tensors in tuples, lists or dicts, or choose other units"
            )
        for t in tensors:
            if flat.shares(t):
                raise RuntimeError(
                    f"ZeroOptimizer: output of a unit ({type(module).__name__}) is its own weight, which is freed now; "
                    "return a .clone(), or choose units= that hold its users too"
                )
            if t.requires_grad:
                t.register_hook(before_backward)
        if not flat.in_backward:  # Else activation checkpointing runs it, and backward goes on to use it.
            schedule.leave(flat)

    def refuse_copies(protocol: Any) -> Any:
        raise TypeError(
            f"ZeroOptimizer: {type(module).__name__} (sharded weights) cannot be pickled or copied; load "
            "full_weights() into another model"
        )

    module.register_forward_pre_hook(Hook(before_forward))
    module.register_forward_hook(Hook(after_forward))
    module.__reduce_ex__ = refuse_copies  # type: ignore[method-assign]


def watch_model(model: nn.Module, schedule: Schedule, renew: Callable[[], None]) -> None:
    """Before the model runs: masters that were loaded are published, and wrappers are refused. To call last."""

    def before_forward(*_: Any) -> None:
        wrapper = DistributedDataParallel._get_active_ddp_module()
        if wrapper is not None and any(module is model for module in wrapper.modules()):
            raise RuntimeError(
                "ZeroOptimizer: model (in DistributedDataParallel) is wrapped; call it as it is: the optimizer sums "
                "the gradients of all ranks"
            )
        renew()
        schedule.begin_forward()

    # Outside of those of the model as a unit.
    model.register_forward_pre_hook(Hook(before_forward), prepend=True)
    model.register_forward_hook(Hook(lambda *_: schedule.end_forward()))


def check_shown(model: nn.Module, flats: list[Flat]) -> None:
    """Raises where parameters have changed in a way that a step would pass over.

    Raises:
      RuntimeError: one was replaced, moved, frozen or written, or the model has got others.
    """
    ours: set[int] = set()
    for flat in flats:
        for weight in flat.weights:
            shown = weight.shown
            there = {id(module._parameters.get(name)) for module, name in weight.owners}
            if not there <= {id(shown), id(weight.parameter)}:
                raise _changed(weight.name, "was replaced", "change models before you make their optimizer")
            if not shown.requires_grad:
                raise _changed(
                    weight.name, "was frozen", "freeze it before, or set its lr and weight_decay to 0 in its group"
                )
            if weight.where is not None and weight.where != (shown.data_ptr(), shown.dtype):
                raise _changed(weight.name, "was moved", "call .to() of the model before")
            if weight.where is not None and shown._version != weight.version:
                raise _changed(weight.name, "was written", "write with load_state_dict of the model: it has masters")
            ours.update((id(shown), id(weight.parameter)))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in ours:
            raise _changed(name, "came to train", "add and unfreeze parameters before")


def _changed(name: str, what: str, instead: str) -> RuntimeError:
    return RuntimeError(f"ZeroOptimizer: {name} {what} after the optimizer was made; {instead}")
