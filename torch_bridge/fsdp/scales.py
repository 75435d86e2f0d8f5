"""The scales of a sharded weight: when they are current, and how ranks make them.

Glossary, in the manner of FSDP2's own `_fsdp_param.py`. All code of this package uses these words.

  weight      the whole parameter, `[rows, columns]`; no rank holds it in high precision
  shard       what this rank holds of it in high precision: rows or columns, maybe none
  slice       a shard of rows, as flat elements of the row-major weight
  codes       the shard, cast with the scales of the weight: one uint8 tensor, 4-bit codes two a byte
  padded      codes with room for those of the longest shard, the rest zeros: what FSDP2 wants of every rank
  wide        4-bit codes that travel one a byte, since shards differ in length or hold columns
  gathered    the padded codes of all ranks, one after the other, which begin with the codes of the weight
  unsharded   gathered codes and scales as a `QuantizedTensor`, between a gather and the reshard
  scales      of the weight: the same on every rank, made of amaxes that ranks have max-reduced; they never travel
  refresh     to make the scales of some weights, on all ranks at once, with one max-reduction
  mark        to note that scales are of an older weight. Only what every rank does alike may mark
  write       a change of the shard that other ranks may not have made, and need not know of

A scale is of the whole weight, so making one is a collective, and ranks must agree on when. So the scales of a weight
are in one of three states (`Status`), and ranks that disagree do so between FRESH and WRITTEN alone:

  state     the scales are                                      the next gather
  MARKED    none, or of an older weight: all ranks know         refreshes all marked weights of the model, then casts
  FRESH     of the weight as it is                              casts
  WRITTEN   of an older shard of this rank: it alone knows      warns, and sends NaN in place of codes

  to        from        by
  MARKED    any         `mark`: a step of the optimizer that holds the weight, `load_state_dict`, moving the module. A
                        weight that is new, or a copy, begins so.
  FRESH     any         `take`: `refresh` has made scales, for `update_scales` or for the next gather
  WRITTEN   FRESH       `note_write`: an op wrote to the parameter; `is_written`: one wrote to its memory by another way

A WRITTEN shard can neither start a collective nor raise, or the other ranks would wait for it. The NaN that it sends
(of E2M1, which has none, the largest code) never passes for codes of the weight. Not found out are writes that go
through the DTensors of a state dict and are not followed by `load_state_dict`, and writes through plain tensors to
shards that are offloaded to the CPU.

Under `DelayedScaling` there are no states: scales are those of earlier steps, which `update_delayed` makes.
"""

from __future__ import annotations

import copy
import enum
import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from qshard import master
from qshard.master import MasterPlan
from qshard.pipeline import Scales
from qshard.recipes import Recipe, Role
from qshard.torch_bridge.arguments import check_model
from qshard.torch_bridge.delayed import DelayedScale, update_delayed
from qshard.torch_bridge.dtensor import local_of
from qshard.torch_bridge.fsdp.shards import ShardPlan
from qshard.torch_bridge.quantize import max_over_ranks
from qshard.torch_bridge.slice_ops import SliceOps
from qshard.torch_bridge.words import words


class Status(enum.Enum):
    """Whether scales are current. The table at the top of this file says who moves a weight from one to another."""

    MARKED = "marked"
    FRESH = "fresh"
    WRITTEN = "written"


class _Source(NamedTuple):
    """The shard that scales were made of on this rank, where it lies, and the state of its version counter then."""

    shard: weakref.ref[Tensor]
    memory: int
    version: int


class ScaleState:
    """What a rank knows of one weight. Every tensor object that stands for the weight refers to the one state.

    It is no attribute of a tensor that FSDP2 may replace: it does so on unevenly sharded ranks only, and ranks that
    lost their scales would start collectives that the others never join.

    Attributes:
      refusal: why FSDP2 cannot gather it; None if it can.
      scales: of the weight; None before the first refresh.
      delayed: holds the scales instead, if the recipe is `DelayedScaling`.
    """

    def __init__(self, recipe: Recipe, name: str, root: nn.Module | None = None, device: Any = None):
        _watch_optimizers()
        self.fmt = recipe.format(Role.WEIGHT)
        self.name = name
        self.refusal = self.fmt.gather_refusal
        self.status = Status.MARKED
        self.scales: Scales | None = None
        self.delayed = DelayedScale(recipe, Role.WEIGHT, device) if recipe.stateful else None
        self._recipe = recipe
        self._source: _Source | None = None
        self._plans: dict[Any, ShardPlan] = {}
        self.join(root)

    def __deepcopy__(self, memo: dict[int, Any]) -> ScaleState:
        """A copied weight goes its own way. Its state belongs to the copied model, if that is what is being copied."""
        copied = ScaleState(self._recipe, self.name, memo.get(id(self.root)))
        copied.delayed = copy.deepcopy(self.delayed, memo)
        return copied

    @property
    def root(self) -> nn.Module | None:
        """The module whose marked weights are refreshed together with this one.

        None of the weight of a model that was unpickled, until `update_scales` sees it: then it is refreshed alone. So
        ranks must come by their models in one way.
        """
        return None if self._root is None else self._root()

    def join(self, root: nn.Module | None) -> None:
        self._root = None if root is None else weakref.ref(root)

    def mark(self) -> None:
        self.status = Status.MARKED

    def take(self, scales: Scales, shard: Tensor) -> None:
        self.scales, self.status = scales, Status.FRESH
        self._source = _Source(weakref.ref(shard), shard.untyped_storage().data_ptr(), _version_of(shard))

    def note_write(self, memory: Tensor) -> None:
        """Called for every op that writes to a tensor that stands for the weight: to the shard or to other memory."""
        if self.status is not Status.FRESH or type(memory) is not Tensor:  # A fake tensor has no memory.
            return
        assert self._source is not None
        if memory.untyped_storage().data_ptr() == self._source.memory:
            self.status = Status.WRITTEN

    def is_written(self, shard: Tensor) -> bool:
        """Whether this rank wrote to its shard since its scales were made. Other ranks may answer otherwise.

        Ops on the parameter have called `note_write`; those on plain tensors that share its memory, as of a state dict,
        count in its version. A shard that FSDP2 has put in the place of the first has a counter of its own.
        """
        if self.status is Status.FRESH:
            assert self._source is not None
            if self._source.shard() is shard and self._source.version != _version_of(shard):
                self.status = Status.WRITTEN
        return self.status is Status.WRITTEN

    def plan_of(self, shard: Tensor, shape: tuple[int, ...], mesh: DeviceMesh, mesh_dim: int = 0) -> ShardPlan:
        """What `shard` is of the weight, which is cut over one axis of `mesh`."""
        key = (mesh, mesh_dim, shape, shard.shape, shard.dtype, shard.device)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = ShardPlan(self.name, self.fmt, shape, shard, mesh, mesh_dim)
        return plan

    def current_scales(self, shard: Tensor, plan: ShardPlan) -> Scales:
        """The scales for a gather. If they are marked, a refresh of all marked weights of the model comes first."""
        if self.status is Status.MARKED:
            others = [
                other
                for other in _sharded_weights(self.root)
                if (other.state.status, other.plan.group.group_name) == (Status.MARKED, plan.group.group_name)
                and other.state is not self
            ]
            _refresh([ShardOf(self, shard, plan), *others])
        assert self.scales is not None
        return self.scales


class ShardOf(NamedTuple):
    """A sharded weight, as a refresh takes it: its state, what this rank holds of it, and which part that is."""

    state: ScaleState
    shard: Tensor
    plan: ShardPlan


def update_scales(model: nn.Module) -> None:
    """Makes the scales of all converted, sharded weights of `model` anew, with one all-reduce for each group of ranks.

    They follow from amaxes of the whole weights, which travel as one vector, 4 bytes a scale.

    Args:
      model: after `convert` and `fully_shard`. Without sharded weights or delayed scales there is nothing to do.

    Collective: call it on all ranks, after `optimizer.step()`. Where it is left out the next forward does the same,
    before its first gather. After any other write to a weight it is needed: see the top of this file. With
    `DelayedScaling` in the model it is needed once a step, as nothing else calls `update_delayed`.

    Launches do not grow with the number of weights that are cut along rows: for each format and dtype, one for amaxes,
    some for scales and one that puts them in their places; on a GPU, one for each few hundred weights.

    >>> from qshard.recipes import CurrentScaling
    >>> from qshard.torch_bridge import convert
    >>> update_scales(convert(nn.Sequential(nn.Linear(4, 4)), CurrentScaling()))  # one process: no scales to agree on
    """
    check_model("update_scales", model)
    update_delayed(model)
    groups: dict[str, list[ShardOf]] = {}
    for found in _sharded_weights(model):
        found.state.join(model)
        groups.setdefault(found.plan.group.group_name, []).append(found)
    for weights in groups.values():
        _refresh(weights)


def _sharded_weights(root: nn.Module | None) -> Iterable[ShardOf]:
    """Those of our weights that are sharded now and have memory, in the order of the model: on all ranks the same."""
    for parameter in () if root is None else root.parameters():
        state = _state_of(parameter)
        if state is None:
            continue
        assert isinstance(parameter, DTensor)
        dims = [i for i, placement in enumerate(parameter.placements) if placement.is_shard()]
        if len(dims) != 1:
            raise NotImplementedError(
                f"update_scales: {state.name} {tuple(parameter.shape)} is cut over {len(dims)} axes of its mesh, and "
                "must be over one; leave layers under tensor parallelism out with convert(filter=)"
            )
        shard: Tensor = local_of(parameter).shard  # type: ignore[attr-defined]
        yield ShardOf(state, shard, state.plan_of(shard, parameter.shape, parameter.device_mesh, dims[0]))


def _state_of(parameter: Tensor) -> ScaleState | None:
    """The state of a sharded weight, unless its scales are delayed. Compiled optimizers ask too: no mesh is asked."""
    if not isinstance(parameter, DTensor):
        return None
    local = local_of(parameter)
    state: ScaleState | None = getattr(local, "scale_state", None)
    return None if state is None or state.delayed is not None or local.is_meta else state


@torch.no_grad()
def _refresh(weights: Sequence[ShardOf]) -> None:
    """Makes the scales of weights that are cut over one group, with one max-reduction. All ranks give the same list.

    An empty shard takes part with amaxes of 0. An offloaded shard is on the CPU, unless FSDP2 has moved it for the
    gather that asks: its amaxes are made where it is, and needed where ranks compute.
    """
    group, device = weights[0].plan.group, weights[0].plan.device
    plans = tuple(weight.plan for weight in weights)
    devices = dict.fromkeys(weight.shard.device for weight in weights)
    bits = [_amaxes_on(there, weights, plans).to(device).view(torch.int32) for there in devices]
    amaxes = functools.reduce(torch.maximum, bits).view(torch.float32)
    plan, ops, _ = _prepared(plans, device)
    made = master.scales(ops, plan, max_over_ranks(amaxes, group))
    for bucket, of_bucket in zip(plan.buckets, made, strict=True):
        each = bucket.split_scales(of_bucket)
        stored = _aligned([scales.scale_inv for scales in each])
        for i, scales, scale_inv in zip(bucket.indices, each, stored, strict=True):
            weights[i].state.take(scales._replace(scale_inv=scale_inv), weights[i].shard)


def _amaxes_on(device: torch.device, weights: Sequence[ShardOf], plans: tuple[ShardPlan, ...]) -> Tensor:
    """What the shards on one device know of the amaxes of all weights."""
    plan, ops, starts = _prepared(plans, device)
    slices = [  # Of shards on other devices, and of columns of blocks, empty ones.
        shard.view(-1) if shard.device == device and of_weight.columns is None else shard.new_empty(0, device=device)
        for _, shard, of_weight in weights
    ]
    amaxes: Tensor = master.amaxes(ops, plan, slices, starts)
    if any(of_weight.columns for of_weight in plans):
        for bucket in plan.buckets:
            for i, (grid, whole) in zip(bucket.indices, bucket.split(*bucket.found(amaxes)), strict=True):
                if weights[i].shard.device == device:
                    plans[i].note_amaxes_of_columns(weights[i].shard, grid, whole)
    return amaxes


@functools.lru_cache(maxsize=64)
def _prepared(plans: tuple[ShardPlan, ...], device: torch.device) -> tuple[MasterPlan, SliceOps, Tensor]:
    """What a refresh of some weights needs, step after step, without a copy from the host."""
    plan = master.plan_master([p.shape for p in plans], [p.fmt for p in plans], dtype=[p.dtype for p in plans])
    starts = words("update_scales", "starts", [p.start for p in plans], device, len(plans))
    return plan, SliceOps(plan, device), starts


def _aligned(parts: Sequence[Tensor]) -> Sequence[Tensor]:
    """The parts of one tensor, each from a multiple of 16 bytes on, as cuBLASLt wants of scales that it reads."""
    if len(parts) == 1:
        return parts
    unit = 16 // parts[0].itemsize
    slots = [-(-part.numel() // unit) * unit for part in parts]
    room = parts[0].new_empty(sum(slots)).split(slots)
    copies = [slot[: part.numel()].view(part.shape) for slot, part in zip(room, parts, strict=True)]
    torch._foreach_copy_(copies, list(parts))
    return copies


def _version_of(shard: Tensor) -> int:
    return -1 if shard.is_inference() else shard._version


@functools.cache
def _watch_optimizers() -> None:
    """Registers, once in a process, with the first weight, what marks weights: a step of any optimizer that holds them.

    PyTorch has these hooks for all optimizers only, so programs without converted weights do not get them.

    Before the step: a post-hook of the user may call `update_scales`, and what it makes is current. After it too if
    there is a closure, as forwards inside the step have made scales of weights that the step then changed.
    """
    register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: _mark(optimizer))
    register_optimizer_step_post_hook(
        lambda optimizer, args, kwargs: _mark(optimizer) if len(args) > 1 or kwargs.get("closure") else None
    )


def _mark(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = _state_of(parameter)
            if state is not None:
                state.mark()
