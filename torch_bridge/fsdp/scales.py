"""Scales of sharded weights: one max-reduction a step for all weights, and the rule for when they are out of date.

A scale is of the whole weight, so making one is a collective, and ranks must agree on when. They do because only what
every rank does alike marks a scale as out of date: a step of the optimizer that holds the weight, `load_state_dict`,
and moving the module. The next gather of a marked weight, or `update_scales` before it, makes the scales of all
marked weights anew with one all-reduce; either way each step pays for one.

A write that ranks may not have in common (`weight.copy_(...)`, a write to one rank's local tensor) must be followed
by `update_scales`. Where it is not, the rank that wrote finds out at the next gather. It can then neither start a
collective nor raise, or the other ranks would wait for it. It warns, and sends NaN (of E2M1, which has none, the
largest code): the codes of such a shard never pass for those of the weight. Not found out are writes that go through
the DTensors of a state dict and are not followed by `load_state_dict`, and writes to shards that are offloaded to the
CPU.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from qshard.pipeline import Scales
from qshard.recipes import DelayedScaling, Recipe, Role
from qshard.sharding import shard_rows
from qshard.torch_bridge.delayed import DelayedScale, update_delayed
from qshard.torch_bridge.fsdp.shards import Cut, amax_into, grid_shape, scales_of
from qshard.torch_bridge.quantize import max_over_ranks

__all__ = ["ScaleState", "ShardOf", "refresh", "shard_of", "stale_weights_of", "update_scales"]


class ScaleState:
    """What all ranks know alike about one weight. Every tensor object that stands for the weight refers to one state.

    It is no attribute of a tensor that FSDP2 may replace: it does so on unevenly sharded ranks only, and ranks that
    lost their scales would start collectives that the others never join.

    Attributes:
      fmt: the format that the weight is gathered in.
      name: of the weight, for messages.
      scales: of the whole weight; None before the first use.
      current: whether `scales` are of the weight as it is now, as far as all ranks know.
      delayed: holds the scales instead, if the recipe is `DelayedScaling`: they are of earlier steps.
    """

    def __init__(self, recipe: Recipe, name: str, root: nn.Module | None = None, device: Any = None):
        _watch_optimizers()
        self.fmt = recipe.format(Role.WEIGHT)
        self.name = name
        self.delayed = DelayedScale(recipe, Role.WEIGHT, device) if isinstance(recipe, DelayedScaling) else None
        self._recipe = recipe
        self.scales: Scales | None = None
        self.current = False
        self._root = _reference(root)
        self._shard: weakref.ref[Tensor] | None = None  # What the scales were made of on this rank,
        self._memory = self._version = -1  # where it lies, and the state of its version counter then.
        self._written = False

    @property
    def root(self) -> nn.Module | None:
        """The module whose weights are refreshed together with this one."""
        return None if self._root is None else self._root()

    @root.setter
    def root(self, module: nn.Module) -> None:
        self._root = _reference(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> ScaleState:
        """A copied weight goes its own way. Its state belongs to the copied model, if that is what is being copied."""
        copied = ScaleState(self._recipe, self.name, memo.get(id(self.root)))
        copied.delayed = copy.deepcopy(self.delayed, memo)
        return copied

    def set(self, scales: Scales, shard: Tensor) -> None:
        """Takes new scales, made of the weight of which this rank holds `shard` now."""
        self.scales, self.current = scales, True
        self._shard, self._memory = weakref.ref(shard), shard.untyped_storage().data_ptr()
        self._version, self._written = _version_of(shard), False

    def note_write(self, memory: Tensor) -> None:
        """Called for every op that writes to a tensor that stands for the weight: to its memory or to another's."""
        if self._shard is None or type(memory) is not Tensor:  # A fake one has no memory: nothing is written yet.
            return
        if memory.untyped_storage().data_ptr() == self._memory:
            self._written = True

    def written_since(self, shard: Tensor) -> bool:
        """Whether this rank wrote to its shard after its scales were made. Other ranks may answer otherwise.

        Ops on the parameter call `note_write`; those on plain tensors that share its memory, as of a state dict,
        count in its version.
        """
        if self._shard is None or self._shard() is not shard:
            return False
        return self._written or self._version != _version_of(shard)


class ShardOf(NamedTuple):
    """A sharded weight, as `refresh` takes it.

    Attributes:
      state: of the weight.
      shard: what this rank holds, in high precision; maybe no row at all.
      shape: of the whole weight.
      cut: where the shard is in it.
    """

    state: ScaleState
    shard: Tensor
    shape: tuple[int, ...]
    cut: Cut


def update_scales(model: nn.Module) -> None:
    """Makes the scales of all converted, sharded weights of `model` anew, with one all-reduce for each group of ranks.

    They follow from amaxes of the whole weights, which travel as one vector: 16 bytes a weight for per-tensor formats,
    4 bytes a block for the others.

    Args:
      model: after `convert` and `fully_shard`. Without sharded weights or delayed scales there is nothing to do.

    Collective: call it on all ranks, after `optimizer.step()`. Where it is left out the next forward does the same,
    before its first gather. After any other write to a weight it is needed: see the top of this file. With
    `DelayedScaling` in the model it is needed once a step, as nothing else calls `update_delayed`.

    >>> from qshard.recipes import CurrentScaling
    >>> from qshard.torch_bridge import convert
    >>> update_scales(convert(nn.Sequential(nn.Linear(4, 4)), CurrentScaling()))  # one process: no scales to agree on
    """
    update_delayed(model)
    groups: dict[str, tuple[dist.ProcessGroup, str, list[ShardOf]]] = {}
    for parameter in model.parameters():
        found = shard_of(parameter)
        if found is not None and isinstance(parameter, DTensor):
            found.state.root = model
            group = shard_group(parameter)
            groups.setdefault(group.group_name, (group, parameter.device_mesh.device_type, []))[2].append(found)
    for group, device_type, weights in groups.values():
        refresh(weights, group, device_type)


def shard_of(parameter: Tensor | None) -> ShardOf | None:
    """The sharded weight behind a parameter, if it is one of ours, is sharded now, and has memory."""
    state = _state_of(parameter)
    if state is None:
        return None
    assert isinstance(parameter, DTensor)
    local: Any = parameter._local_tensor
    shape, mesh_dim = tuple(parameter.shape), _shard_dim(parameter)
    return ShardOf(state, local.shard, shape, cut_of(local.shape, shape, parameter.device_mesh, mesh_dim))


def _state_of(parameter: Tensor | None) -> ScaleState | None:
    """What a compiled optimizer asks for too, so no question to a mesh is in it."""
    if not isinstance(parameter, DTensor):
        return None
    local: Any = parameter._local_tensor
    state: ScaleState | None = getattr(local, "scale_state", None)
    return None if state is None or state.delayed is not None or local.is_meta else state


def cut_of(local: tuple[int, ...], shape: tuple[int, ...], mesh: DeviceMesh, mesh_dim: int = 0) -> Cut:
    """Where the shard of this rank is, of a weight of which FSDP2 has cut rows, or columns into even parts."""
    axis = 0 if tuple(local[1:]) == tuple(shape[1:]) else 1
    return Cut(axis, shard_rows(shape[axis], mesh.size(mesh_dim), mesh.get_local_rank(mesh_dim)).start)


def shard_group(parameter: Tensor) -> dist.ProcessGroup:
    """The ranks that hold the pieces of a sharded parameter, without its replicas."""
    assert isinstance(parameter, DTensor)
    return parameter.device_mesh.get_group(_shard_dim(parameter))


def _shard_dim(parameter: DTensor) -> int:
    dims = [i for i, placement in enumerate(parameter.placements) if placement.is_shard()]
    if len(dims) != 1:
        raise NotImplementedError(
            f"update_scales: weight (cut over {len(dims)} axes of its mesh) is not cut over one; "
            "leave layers under tensor parallelism out with convert(filter=)"
        )
    return dims[0]


def stale_weights_of(root: nn.Module | None, group: dist.ProcessGroup) -> Iterable[ShardOf]:
    """Weights of `root`, cut over `group`, that all ranks know to be out of date, in the order of the model."""
    for parameter in () if root is None else root.parameters():
        found = shard_of(parameter)
        if found is not None and not found.state.current and shard_group(parameter).group_name == group.group_name:
            yield found


@torch.no_grad()
def refresh(weights: list[ShardOf], group: dist.ProcessGroup, device_type: str) -> None:
    """Makes the scales of `weights` with one max-reduction over `group`. The same list, in order, on every rank.

    An empty shard takes part with an amax of 0.
    """
    # Weights of one format next to each other: their scales come from one launch.
    weights = [
        weight for fmt in dict.fromkeys(w.state.fmt for w in weights) for weight in weights if weight.state.fmt == fmt
    ]
    shapes = [grid_shape(w.state.fmt, w.shape) for w in weights]
    # The scales of each weight begin on 16 bytes, as cuBLASLt wants of what it reads; the rest of a slot stays 0.
    sizes = [-(-math.prod(shape) // _SLOT) * _SLOT for shape in shapes]
    # An offloaded shard is on the CPU, unless FSDP2 has moved it for the gather that asks. Its amax is made where it
    # is, and needed where the ranks compute.
    device = torch.device(device_type, torch.cuda.current_device()) if device_type == "cuda" else device_type
    amax = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
    for weight, shape, slot in zip(weights, shapes, amax.split(sizes), strict=True):
        there = slot if slot.device == weight.shard.device else torch.zeros_like(slot, device=weight.shard.device)
        amax_into(weight.state.fmt, weight.shard, weight.cut, _in_slot(there, shape))
        if there is not slot:
            slot.copy_(there)
    max_over_ranks(amax, group)
    start = 0
    for fmt in dict.fromkeys(w.state.fmt for w in weights):
        of_format = [i for i, weight in enumerate(weights) if weight.state.fmt == fmt]
        slots = [sizes[i] for i in of_format]
        grids = amax[start : start + sum(slots)]
        start += sum(slots)
        if fmt.global_scale is None:
            made = scales_of(fmt, grids)
            parts = zip(made.scale.split(slots), made.scale_inv.split(slots), strict=True)
            found = [
                Scales(*(_in_slot(part, shapes[i]) for part in pair)) for i, pair in zip(of_format, parts, strict=True)
            ]
        else:
            found = [
                scales_of(fmt, _in_slot(slot, shapes[i])) for i, slot in zip(of_format, grids.split(slots), strict=True)
            ]
        for i, scales in zip(of_format, found, strict=True):
            weights[i].state.set(scales, weights[i].shard)


_SLOT = 4  # fp32 values in 16 bytes


def _in_slot(slot: Tensor, shape: tuple[int, ...]) -> Tensor:
    return slot[: math.prod(shape)].view(shape)


def _version_of(shard: Tensor) -> int:
    return -1 if shard.is_inference() else shard._version


def _reference(module: nn.Module | None) -> weakref.ref[nn.Module] | None:
    return None if module is None else weakref.ref(module)


_watching = False


def _watch_optimizers() -> None:
    """From the first weight on, a step of any optimizer marks the scales of the weights that it holds.

    Before the step: a post-hook of the user may call `update_scales`, and what it makes is current. After it too if
    there is a closure, as forwards inside the step have made scales of weights that the step then changed.
    """
    global _watching
    if not _watching:
        _watching = True
        register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: _mark(optimizer))
        register_optimizer_step_post_hook(
            lambda optimizer, args, kwargs: _mark(optimizer) if len(args) > 1 or kwargs.get("closure") else None
        )


def _mark(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = _state_of(parameter)
            if state is not None:
                state.current = False
