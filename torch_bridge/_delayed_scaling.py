"""Delayed scaling: the scale of a tensor comes from the amaxes of earlier steps, kept in buffers of its layer.

A tensor without history has scale 0, and the cast makes its first scale of its own amax (`cast_delayed`): on the
device, so compiled and captured code that was made in the first step is right in all others. Of a weight that is cut,
it takes the amax of the whole: a collective, on which ranks must agree. So they look which scales have been made where
they agree anyway, in `update_delayed`; until they know, they make first scales, which the device uses only where there
are none.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from qshard._core.validation import quote
from qshard.recipes import RecipeLike, Role, as_delayed
from qshard.torch_bridge._distributed.dtensor import local_of
from qshard.torch_bridge._distributed.fsdp1 import Float32Buffers, delayed_of
from qshard.torch_bridge._distributed.process_groups import groups_of
from qshard.torch_bridge._module_tree import modules_of
from qshard.torch_bridge._ops.bind import ops
from qshard.torch_bridge._ops.collectives import max_over_ranks, unlike_ranks
from qshard.torch_bridge._ops.eager import is_capturing, is_compiling
from qshard.torch_bridge._quantized.scaling_state import loaded_if_there
from qshard.torch_bridge._quantized.validation import check_group, check_model
from qshard.torch_bridge._torch_internals import active_ddp


class DelayedScale(Float32Buffers):
    """What one tensor of a layer carries from step to step. All of it is fp32, whatever the model is moved to.

    Attributes:
      scale, scale_inv: `[]`, of this step: they encode and decode. 0 before the first update, when the tensor is scaled
        by its own amax.
      amax: `[]`, the largest that this rank has seen since the last update, over all its microbatches.
      amax_history: `[history]`, of the steps before, the oldest first.
      stepped, stepper: of a weight, whether an optimizer has stepped since the last update, and which, by identity.
      group: the ranks that train the layer, where a `ZeroOptimizer` or DistributedDataParallel has said so.
    """

    scale: Tensor
    scale_inv: Tensor
    amax: Tensor
    amax_history: Tensor
    scaling_buffers = ("scale", "scale_inv", "amax", "amax_history")

    def __init__(self, recipe: RecipeLike, role: Role, device: Any = None):
        super().__init__()
        recipe = as_delayed(recipe, "DelayedScale")
        if not isinstance(role, Role):
            raise TypeError(f"DelayedScale: role ({quote(role)}) is not a Role; pass one, such as Role.WEIGHT")
        _watch_optimizers()
        self.options = {
            "element": recipe.format(role).element.name,
            "margin": recipe.margin,
            "most_recent": recipe.algorithm == "most_recent",
        }
        self.stepped, self.stepper = False, 0
        self.group: dist.ProcessGroup | None = None
        self._asked = False  # Whether a cut weight needs to know if there is a scale.
        self._made: int | None = None  # The version of `scale` that this rank knows to be a scale.
        self._look: _Look | None = None
        shapes = recipe.state_shapes
        for name in ("scale", "scale_inv", "amax", "amax_history"):
            shape = shapes.get(name, shapes["scale"])
            self.register_buffer(name, torch.empty(shape, dtype=torch.float32, device=device), persistent=False)
        self.reset()

    def reset(self) -> None:
        """The state before the first step."""
        self._made = self._look = None
        self.restore_buffers()
        for buffer in (self.scale, self.scale_inv, self.amax, self.amax_history):
            buffer.zero_()

    def reset_parameters(self) -> None:
        """`reset`, by the name by which FSDP1 calls it of modules on meta."""
        self.reset()

    def observe(self, amax: Tensor) -> None:
        """Takes the amax of one use of the tensor. The amax of several is their maximum, in any order."""
        note(self.amax, amax)

    @property
    def margin(self) -> int:
        margin: Any = self.options["margin"]
        return int(margin)

    def knows_scale(self) -> bool:
        """Whether ranks know that there is a scale. One that writes it, as by loading a checkpoint, knows no longer."""
        known = self._made is not None and self._made == _version_of(self._buffers["scale"])
        self._asked = self._asked or not known
        return known

    def scales_under(self, amax: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and inverse; where there is no scale, those that the amax of the whole tensor makes."""
        made: tuple[Tensor, Tensor] = ops.delayed_scale(
            amax, self.scale, element=self.options["element"], margin=self.margin
        )
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to this process."""
        return {**super().__getstate__(), "_made": None, "_look": None, "group": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({"group": None, **state})  # Older files lack it.
        self.restore_buffers()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DelayedScale:
        """As bits: what changes the dtype of a model changes that of floats."""
        self.restore_buffers()
        was_meta = self.scale.is_meta
        for name, buffer in self._buffers.items():
            assert buffer is not None
            self._buffers[name] = fn(buffer.view(torch.int32)).view(torch.float32)
        self._made = self._look = None
        self.restore_buffers()
        if was_meta and not self.scale.is_meta:
            self.reset()
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        """The state is in no state dict, but in those of old files."""
        self.restore_buffers()
        self._made = self._look = None
        with loaded_if_there(self, state_dict, prefix):
            super()._load_from_state_dict(state_dict, prefix, *others)


def keep_amaxes() -> None:
    """Called in forward passes: DistributedDataParallel lets each rank keep its amaxes.

    Before a pass it gives all ranks the buffers of the first, where gradients were reduced in the pass before.
    """
    ddp = active_ddp()
    if ddp is not None and ddp not in _told:
        _told.add(ddp)
        for name, module in ddp.module.named_modules():
            if isinstance(module, DelayedScale):
                module.group = ddp.process_group
                ddp.parameters_to_ignore.add(f"{name}.amax")


_told: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def note(noted: Tensor, amax: Tensor) -> None:
    """Raises an amax to another one, in its memory."""
    if is_compiling():  # Dynamo does not take every `out=`.
        noted.copy_(torch.maximum(noted, amax))
    else:
        torch.maximum(noted, amax, out=noted)


@torch.no_grad()
def update_delayed(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Makes the scales of the next step from the amaxes of this one, for all tensors of `model` at once.

        the amax of the step, reduced over ranks, enters the history, and the oldest leaves
        scale = min(fl(fl(max * 2^-margin) / a), FLT_MAX), with a = max(history), or the amax itself ("most_recent")

    A tensor that was not used, or is all zeros, keeps its scale and history; so a second call changes nothing. Where a
    is infinite or NaN the scale stays. Before its first update a tensor is scaled by its own amax: that of this rank's
    tensor, of a weight that FSDP2 has cut that of the whole weight.

    Args:
      model: layers of it have a `DelayedScaling` recipe. Without any there is nothing to do.
      group: the ranks that train this model, or this stage of a pipeline. By default, those of the mesh that its
        parameters are on; if none is a DTensor, those of the FullyShardedDataParallel or DistributedDataParallel that
        `model` is or has, or of its `ZeroOptimizer`; without any, all ranks. Collective: an all-reduce of 4 bytes a
        tensor, for each axis of a mesh that is not all ranks, and with HYBRID_SHARD for shards and for replicas.

    Raises:
      ValueError: no mesh of the parameters has the ranks of all others; or layers are trained by several groups.
      RuntimeError: models of these ranks differ in their delayed scales; on all of them, in the first update.

    Call it on all ranks once a step, after backward; `update_scales` does. A second step of an optimizer without it is
    an error, as scales would stay what they are. It waits for nothing on the host, so a CUDA graph may hold it.

    Sources: TransformerEngine, `amax_and_scale_update_after_reduction`.
    """
    check_model("update_delayed", model)
    check_group("update_delayed", group)
    states = [module for module in modules_of(model) if isinstance(module, DelayedScale)]
    if not states:
        return
    for state in states:
        state.restore_buffers()
    groups = groups_of(model, group, [state.group for state in states])
    _check_alike(model, states, groups)
    buffers: list[dict[str, Any]] = [state._buffers for state in states]  # Attributes of modules are slow to get.
    amax = torch.stack([each["amax"] for each in buffers])
    max_over_ranks(amax, groups)
    old: list[Tensor] = []
    new: list[Tensor] = []
    kinds: dict[Any, list[int]] = {}
    for i, (state, of_state) in enumerate(zip(states, buffers, strict=True)):
        kinds.setdefault((*state.options.values(), of_state["amax_history"].shape), []).append(i)
    amaxes = amax.unbind()
    for chosen in kinds.values():
        alike = [buffers[i] for i in chosen]
        histories, scales, inverses = ops.update_delayed_scale(
            amax if len(kinds) == 1 else torch.stack([amaxes[i] for i in chosen]),
            torch.stack([each["amax_history"] for each in alike]),
            torch.stack([each["scale"] for each in alike]),
            **states[chosen[0]].options,
        )
        for name, parts in (("amax_history", histories), ("scale", scales), ("scale_inv", inverses)):
            old += [each[name] for each in alike]
            new += parts.unbind()
    made = [state for state in states if _is_made(state)]
    torch._foreach_copy_(old, new)
    torch._foreach_zero_([each["amax"] for each in buffers])
    for state in made:
        vars(state)["_made"] = _version_of(state._buffers["scale"])  # To set attributes of modules is slow, too.
    _look_at([state for state in states if state._asked and state._made is None])
    for state in states:
        vars(state)["stepped"] = False


class _Look:
    """Scales on their way to the host, after an update."""

    def __init__(self, states: Sequence[DelayedScale]):
        scales = torch.stack([state.scale for state in states])
        self._values = scales.to("cpu", non_blocking=True)
        self._ready = torch.cuda.Event() if scales.is_cuda else None
        if self._ready is not None:
            self._ready.record()
        self._versions = {id(state): (i, _version_of(state.scale)) for i, state in enumerate(states)}

    def shows(self, state: DelayedScale) -> bool:
        """Whether this rank has a scale, and has not written it since. An update later there is nothing to wait for."""
        if self._ready is not None:
            self._ready.synchronize()
        i, version = self._versions[id(state)]
        return bool(self._values[i] != 0) and version == _version_of(state.scale)


def _is_made(state: DelayedScale) -> bool:
    """Whether this rank knows that there is a scale. All ranks see the same scales, so the same."""
    scale = state._buffers["scale"]
    if state._look is not None and not is_capturing(state.scale.device):
        if state._look.shows(state):
            state._made = _version_of(scale)
        state._look = None
    return state._made is not None and state._made == _version_of(scale)


def _look_at(states: Sequence[DelayedScale]) -> None:
    if states and not is_capturing(states[0].scale.device):
        look = _Look(states)
        for state in states:
            state._look = look


def _version_of(tensor: Tensor | None) -> int:
    return -1 if tensor is None or tensor.is_inference() else tensor._version


_agreed: weakref.WeakKeyDictionary[nn.Module, tuple[Any, ...]] = weakref.WeakKeyDictionary()


def _check_alike(model: nn.Module, states: Sequence[DelayedScale], groups: Sequence[dist.ProcessGroup]) -> None:
    """Raises on all ranks unless all have the same states. Collective, until they agree; then not until they change."""
    if not groups or is_capturing(states[0].amax.device):
        return
    key = (*[group.group_name for group in groups], *map(id, states))
    if _agreed.get(model) == key:
        return
    named = [(name, module) for name, module in model.named_modules() if isinstance(module, DelayedScale)]
    what = repr([(name, tuple(state.options.values()), tuple(state.amax_history.shape)) for name, state in named])
    device = named[0][1].amax.device
    if unlike_ranks(what.encode(), groups, device):
        counts = torch.tensor([-len(named), len(named)], device=device)
        for group in groups:
            dist.all_reduce(counts, op=dist.ReduceOp.MAX, group=group)
        least, largest = counts.abs().tolist()
        count = f"{least} to {largest} a rank" if largest != least else f"{least} on each"
        raise RuntimeError(
            f"update_scales: ranks have different tensors under DelayedScaling ({count}), by name, format or options; "
            "pass group=, the ranks that train this model, such as one pipeline stage"
        )
    _agreed[model] = key


@functools.cache
def _watch_optimizers() -> None:
    """Registers, once in a process, what finds out that nobody makes scales."""
    register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: _note_step(optimizer))
    register_optimizer_step_post_hook(lambda optimizer, args, kwargs: _end_step(optimizer))


_running: list[int] = []
"""Optimizers, by identity, whose step runs: those that others are made of step within theirs, which is one step."""


def _end_step(optimizer: Optimizer) -> None:
    if id(optimizer) in _running:
        del _running[_running.index(id(optimizer)) :]


def _note_step(optimizer: Optimizer) -> None:
    """Raises RuntimeError at the second step of a weight since the last update."""
    if is_compiling():
        return
    _end_step(optimizer)  # One before has raised.
    for group in optimizer.param_groups:
        lr = group.get("lr")
        if not (isinstance(lr, Tensor) and lr.is_cuda) and lr == 0:  # As PyTorch steps to make states for a checkpoint.
            continue
        for parameter in group["params"]:
            for name, delayed in _stepped_by(parameter):
                if delayed.stepped and delayed.stepper not in _running:
                    raise RuntimeError(
                        f"DelayedScaling: the scales of {name} were not updated after the last optimizer step; call "
                        "update_scales(model) once per step, on all ranks"
                    )
                if not delayed.stepped:
                    delayed.stepped, delayed.stepper = True, id(optimizer)
    _running.append(id(optimizer))


def _stepped_by(parameter: Tensor) -> Sequence[tuple[str, DelayedScale]]:
    """Names and states of the weights that a step on `parameter` changes: one, or those in a flat parameter."""
    found = delayed_of(parameter)
    if found is not None or parameter.grad is None:
        return found or []
    state = getattr(local_of(parameter), "scale_state", None)
    return [] if state is None or state.delayed is None else [(state.name, state.delayed)]
