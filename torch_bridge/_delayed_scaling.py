"""Delayed scaling: the scale of a tensor is computed from the amaxes of earlier steps, stored in buffers of its layer.

A tensor without history has scale 0, and the cast computes its first scale from its own amax (`cast_delayed`). The
device decides this, so code that was compiled or captured in the first step is correct in all others. The first scale
of a sharded weight needs the amax of the whole weight: a collective, on which all ranks must agree. They learn which
scales exist in `update_delayed`, where they synchronize anyway. Until then they compute first scales in every gather,
and the device uses them only where no scale exists.
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

from qshard._core.quantize_steps import Scales
from qshard._core.validation import quote
from qshard.recipes import RecipeLike, Role, as_delayed
from qshard.torch_bridge._distributed.dtensor import local_of
from qshard.torch_bridge._distributed.fsdp1 import Float32Buffers, delayed_of
from qshard.torch_bridge._distributed.process_groups import groups_of
from qshard.torch_bridge._distributed.scaling_state import load_state_if_present
from qshard.torch_bridge._modules import modules_of
from qshard.torch_bridge._ops.bind import ops
from qshard.torch_bridge._ops.collectives import join_scalars, max_over_ranks, split_scalars, unlike_ranks
from qshard.torch_bridge._ops.eager import is_capturing, is_compiling
from qshard.torch_bridge._quantized.validation import check_group, check_model
from qshard.torch_bridge._torch_internals import active_ddp, in_functorch


class DelayedScale(Float32Buffers):
    """Delayed scaling state of one tensor of a layer. Its buffers stay fp32 when the model is cast.

    Args:
      recipe: a `DelayedScaling`, or its name.
      experts: E, for the tensors of all experts of a layer: every buffer has a leading axis of E. None for one tensor.

    Attributes:
      scale: `[]`, encodes in this step. 0 before the first update, when the tensor is scaled by its own amax.
      scale_inv: `[]`, decodes in this step.
      amax: `[]`, the maximum that this rank has observed since the last update, over all its microbatches.
      amax_history: `[history]`, the amaxes of earlier steps, oldest first.
      stepped: for a weight: an optimizer has stepped since the last update.
      stepper: for a weight: `id` of that optimizer.
      group: the ranks that train the layer, if a `ZeroOptimizer` or DistributedDataParallel has set them.
      on_load: casts the weights of the model's `ZeroOptimizer` by loaded scales; None without one.

    Raises:
      TypeError: `recipe` is not a `DelayedScaling`, or `role` is not a `Role`.

    >>> from qshard.recipes import DelayedScaling
    >>> state = DelayedScale(DelayedScaling(history=2), Role.WEIGHT)
    >>> state.observe(torch.tensor(4.0))
    >>> state.scale, state.amax, state.amax_history
    (tensor(0.), tensor(4.), tensor([0., 0.]))
    """

    scale: Tensor
    scale_inv: Tensor
    amax: Tensor
    amax_history: Tensor
    scaling_buffers = ("scale", "scale_inv", "amax", "amax_history")

    def __init__(self, recipe: RecipeLike, role: Role, device: Any = None, experts: int | None = None):
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
        self.on_load: Callable[[], None] | None = None
        self._asked = False  # True if a sharded weight waits to learn whether it has a scale.
        self._made: int | None = None  # The version of `scale` at which it was known to exist.
        self._look: _ScaleReadback | None = None
        shapes, lead = recipe.state_shapes, () if experts is None else (experts,)
        for name in ("scale", "scale_inv", "amax", "amax_history"):
            shape = lead + shapes.get(name, shapes["scale"])
            self.register_buffer(name, torch.empty(shape, dtype=torch.float32, device=device), persistent=False)
        self.reset()

    def reset(self) -> None:
        self._made = self._look = None
        self.restore_buffers()
        for buffer in (self.scale, self.scale_inv, self.amax, self.amax_history):
            buffer.zero_()

    def reset_parameters(self) -> None:
        """Call `reset`. FSDP1 calls this method on modules on meta."""
        self.reset()

    def observe(self, amax: Tensor) -> None:
        """Record the amax of one use of the tensor. Amaxes of several uses are merged by maximum, in any order."""
        merge_amax(self.amax, amax)

    @property
    def margin(self) -> int:
        margin: Any = self.options["margin"]
        return int(margin)

    def knows_scale(self) -> bool:
        """Return True if all ranks know that a scale exists. After a write to `scale`, updates must confirm it."""
        known = self._made is not None and self._made == version_of(self._buffers["scale"])
        self._asked = self._asked or not known
        return known

    def scales_under(self, amax: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scale and its inverse; if no scale exists yet, compute them from the amax of the whole tensor."""
        pair: tuple[Tensor, Tensor] = ops.delayed_scale(
            amax, self.scale, element=self.options["element"], margin=self.margin
        )
        return pair

    def __getstate__(self) -> dict[str, Any]:
        """Drop the fields that belong to this process."""
        return {**super().__getstate__(), "_made": None, "_look": None, "group": None, "on_load": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({"group": None, "on_load": None, **state})  # Older files lack them.
        self.restore_buffers()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DelayedScale:
        """Move the buffers as int32, because a cast of the model changes only floating-point dtypes."""
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
        """Load the state if the state dict has it, which only older versions wrote."""
        self.restore_buffers()
        self._made = self._look = None
        with load_state_if_present(self, state_dict, prefix):
            super()._load_from_state_dict(state_dict, prefix, *others)


def keep_amaxes() -> None:
    """Make DistributedDataParallel keep the amaxes of each rank. Called in forward passes.

    Otherwise it broadcasts the buffers of the first rank before each pass that follows a gradient reduction.
    """
    ddp = active_ddp()
    if ddp is not None and ddp not in _prepared_ddps:
        _prepared_ddps.add(ddp)
        for name, module in ddp.module.named_modules():
            if isinstance(module, DelayedScale):
                module.group = ddp.process_group
                ddp.parameters_to_ignore.add(f"{name}.amax")


_prepared_ddps: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def merge_amax(buffer: Tensor, amax: Tensor) -> None:
    """Set `buffer` to the maximum of itself and `amax`, in place."""
    if is_compiling():  # Dynamo does not support every `out=`.
        buffer.copy_(torch.maximum(buffer, amax))
        return
    try:
        torch.maximum(buffer, amax, out=buffer)
    except RuntimeError:
        if not in_functorch():
            raise
        raise NotImplementedError(
            "DelayedScaling: torch.func.vmap is not supported, because each call records an amax; use a recipe without "
            "a state, or exclude the layer with convert(filter=)"
        ) from None


@torch.no_grad()
def update_delayed(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Compute the scales of the next step from the amaxes of this step, for all tensors of `model` at once.

        the amax of the step, reduced over ranks, enters the history, and the oldest leaves
        scale = min(fl(fl(max * 2^-margin) / a), FLT_MAX), with a = max(history), or the amax itself ("most_recent")

    A tensor that was not used, or is all zeros, keeps its scale and history, so a second call changes nothing. If a is
    infinite or NaN, the scale is kept. Before its first update a tensor is scaled by its own amax: of the local tensor,
    or of the whole weight if FSDP2 has sharded it.

    Args:
      model: with layers that have a `DelayedScaling` recipe. Without such layers the call does nothing.
      group: the ranks that train this model, or this pipeline stage. The default is the mesh of its parameters. If no
        parameter is a DTensor, it is the group of the FullyShardedDataParallel or DistributedDataParallel that `model`
        is or contains, or of its `ZeroOptimizer`; otherwise all ranks. Collective: an all-reduce of 4 bytes per tensor,
        for each axis of a mesh that does not span all ranks, and with HYBRID_SHARD one for shards and one for replicas.

    Raises:
      TypeError: `model` is not a module, or `group` is not a process group.
      ValueError: no mesh of the parameters contains the ranks of all others, or several groups train the layers.
      RuntimeError: the models of these ranks differ in their delayed scales. All ranks raise, in the first update.

    Call it on all ranks once per step, after backward; `update_scales` does. A second optimizer step without it raises,
    because scales would never change. It does not synchronize with the host, so a CUDA graph may capture it.

    >>> import qshard.torch_bridge as qt
    >>> model = qt.convert(nn.Sequential(nn.Linear(16, 32)), "DelayedScaling")
    >>> _ = model(torch.full((1, 16), 7.0))
    >>> update_delayed(model)
    >>> model[0].delayed["activation"].scale
    tensor(64.)

    Source: TransformerEngine, `amax_and_scale_update_after_reduction`.
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
    buffers: list[dict[str, Any]] = [state._buffers for state in states]  # Attribute access on modules is slow.
    amax = join_scalars([each["amax"] for each in buffers])
    max_over_ranks(amax, groups)
    old: list[Tensor] = []
    new: list[Tensor] = []
    kinds: dict[Any, list[int]] = {}
    for i, (state, of_state) in enumerate(zip(states, buffers, strict=True)):
        kinds.setdefault((*state.options.values(), of_state["amax_history"].shape[-1]), []).append(i)
    amaxes = split_scalars(amax, [each["amax"] for each in buffers])
    for chosen in kinds.values():
        alike = [buffers[i] for i in chosen]
        histories, scales, inverses = ops.update_delayed_scale(
            amax if len(kinds) == 1 else join_scalars([amaxes[i] for i in chosen]),
            join_scalars([each["amax_history"] for each in alike], axes=1),
            join_scalars([each["scale"] for each in alike]),
            **states[chosen[0]].options,
        )
        for name, parts in (("amax_history", histories), ("scale", scales), ("scale_inv", inverses)):
            of_name = [each[name] for each in alike]
            old += of_name
            new += split_scalars(parts, of_name, axes=int(name == "amax_history"))
    with_scale = [state for state in states if _has_known_scale(state)]
    torch._foreach_copy_(old, new)
    torch._foreach_zero_([each["amax"] for each in buffers])
    for state in with_scale:
        vars(state)["_made"] = version_of(state._buffers["scale"])  # Setting attributes on modules is slow, too.
    _start_readback([state for state in states if state._asked and state._made is None])
    for state in states:
        vars(state)["stepped"] = False


def delayed_scales(
    states: Sequence[DelayedScale], whole_amaxes: Callable[[list[int]], Sequence[Tensor]]
) -> list[Scales]:
    """Return copies of delayed scales of weights, so that an update during a pass affects only the next pass.

    Weights without a scale get one from their amaxes: `whole_amaxes(indices)` returns the amaxes of these whole
    weights. All ranks call it, or none.
    """
    buffers = [buffer for state in states for buffer in (state.scale, state.scale_inv)]
    copies = split_scalars(join_scalars(buffers), buffers)
    scales = [Scales(scale, scale_inv) for scale, scale_inv in zip(copies[::2], copies[1::2], strict=True)]
    if new := [i for i, state in enumerate(states) if not state.knows_scale()]:
        for i, amax in zip(new, whole_amaxes(new), strict=True):
            scales[i] = Scales(*states[i].scales_under(amax.view(states[i].scale.shape)))
    return scales


class _ScaleReadback:
    """Asynchronous copy of scales to the host after an update."""

    def __init__(self, states: Sequence[DelayedScale]):
        scales = [state.scale for state in states]
        copied = join_scalars(scales).to("cpu", non_blocking=True)
        self._values = split_scalars(copied, scales)
        self._ready = torch.cuda.Event() if scales[0].is_cuda else None
        if self._ready is not None:
            self._ready.record()
        self._versions = {id(state): (i, version_of(state.scale)) for i, state in enumerate(states)}

    def has_scale(self, state: DelayedScale) -> bool:
        """Return True if a scale exists on this rank, and was not written since. One update later it does not wait."""
        if self._ready is not None:
            self._ready.synchronize()
        i, version = self._versions[id(state)]
        return bool((self._values[i] != 0).all()) and version == version_of(state.scale)


def _has_known_scale(state: DelayedScale) -> bool:
    """Return True if this rank knows that a scale exists. All ranks see equal scales, so they agree."""
    scale = state._buffers["scale"]
    if state._look is not None and not is_capturing(state.scale.device):
        if state._look.has_scale(state):
            state._made = version_of(scale)
        state._look = None
    return state._made is not None and state._made == version_of(scale)


def _start_readback(states: Sequence[DelayedScale]) -> None:
    if states and not is_capturing(states[0].scale.device):
        look = _ScaleReadback(states)
        for state in states:
            state._look = look


def version_of(tensor: Tensor | None) -> int:
    """Return the version counter of a tensor, to detect writes; -1 if it has none."""
    return -1 if tensor is None or tensor.is_inference() else tensor._version


_agreed: weakref.WeakKeyDictionary[nn.Module, tuple[Any, ...]] = weakref.WeakKeyDictionary()


def _check_alike(model: nn.Module, states: Sequence[DelayedScale], groups: Sequence[dist.ProcessGroup]) -> None:
    """Raise on all ranks unless all have the same states. Collective until they agree and after states change."""
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
    """Register, once per process, the optimizer hooks that detect a missing scale update."""
    register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: _begin_step(optimizer))
    register_optimizer_step_post_hook(lambda optimizer, args, kwargs: _end_step(optimizer))


_running: list[int] = []
"""`id`s of optimizers in their `step`. An optimizer that calls the `step` of others within its own takes one step."""


def _end_step(optimizer: Optimizer) -> None:
    if id(optimizer) in _running:
        del _running[_running.index(id(optimizer)) :]


def _begin_step(optimizer: Optimizer) -> None:
    """Raise RuntimeError at the second step of a weight since its last scale update."""
    if is_compiling():
        return
    _end_step(optimizer)  # Left over if the last step raised.
    for group in optimizer.param_groups:
        lr = group.get("lr")
        # PyTorch takes a step with lr=0 to create optimizer states for a checkpoint.
        if not (isinstance(lr, Tensor) and lr.is_cuda) and lr == 0:
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
    """Return names and states of the weights that a step on `parameter` changes: one, or all in a flat parameter."""
    state = getattr(local_of(parameter), "scale_state", None)
    if state is None:
        return delayed_of(parameter)
    return [] if state.delayed is None or parameter.grad is None else [(state.name, state.delayed)]
