"""Refreshes of scales, and the casts of shards under them. `scale_state.py` has the glossary.

FSDP2 calls the hook of one weight after the other, then copies and sends the codes of all. GEMMs occupy the whole GPU,
so a kernel on another stream begins only when a GEMM ends: seven casts, a launch each, take as long as the layers that
should hide them. So the first hook of a group casts the other weights of the group in the same launch.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from qshard._core.flat_shards import Bucket
from qshard._core.operands import quantize_operand
from qshard._core.quantize_steps import Plane, Scales
from qshard.torch_bridge._delayed_scaling import update_delayed
from qshard.torch_bridge._distributed.dtensor import local_of
from qshard.torch_bridge._distributed.tensor_shards import merge_plan, merge_shards
from qshard.torch_bridge._fsdp.scale_state import (
    Passes,
    PrefetchedCodes,
    Refresh,
    ScaleState,
    Status,
    WeightShard,
    state_of,
)
from qshard.torch_bridge._fsdp.shard_plan import ShardPlan, check_reshards, groups_of, set_padded_shape
from qshard.torch_bridge._module_tree import parameters_of
from qshard.torch_bridge._ops.bind import into, ops
from qshard.torch_bridge._ops.collectives import max_over_ranks, unlike_ranks
from qshard.torch_bridge._ops.foreach import flat_plan
from qshard.torch_bridge._quantized.validation import check_model

_ALIGNMENT = 256  # Of codes that share memory: that of allocations on GPUs.


class Gather(NamedTuple):
    """A gather that has begun: the first hook of FSDP2 passes it to the second."""

    plan: ShardPlan
    refresh: Refresh
    restore_shape: Callable[[], None] | None

    def end(self, state: ScaleState, gathered: Tensor) -> Plane:
        """The plane of the weight. Its codes are the memory that FSDP2 has gathered."""
        if self.restore_shape is not None:
            self.restore_shape()
        scales = state.arrive(self.refresh)
        return Plane(self.plan.codes(gathered), scales.scale_inv, scales.global_scale_inv)


def begin_gather(state: ScaleState, shard: Tensor, shape: torch.Size, mesh: DeviceMesh) -> tuple[Tensor, Gather]:
    """The padded codes of a shard of a weight of this shape."""
    state.passes.watch()  # Hooks may have come before ours.
    if not state.agreed:  # The first time.
        check_reshards(state.passes.root)
    if state.primary is not None:
        shard = state.primary.take_master(state.at_home(shard) if state.primary.master is None else shard)
    weight = WeightShard(state, shard, state.plan_of(shard, shape, mesh))
    make_scales(weight)
    if state.primary is None:
        padded = weight.plan.padded_in(_padded_codes(weight))
    else:
        if state.primary.codes is None:
            _cast_into(weight, state.primary.room(weight.plan))
            state.primary.end_cast(weight.plan)
        padded = state.primary.codes_on(weight.plan.device)
    restore_shape = set_padded_shape(state, padded) if weight.plan.packs_columns else None
    assert state.refresh is not None
    return padded, Gather(weight.plan, state.refresh, restore_shape)


def update_scales(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Makes the scales of the next step from the amaxes of this one, under `DelayedScaling`: call it once a step.

    Other recipes need no call: each forward, and each backward, makes the scales of all sharded weights of the model
    anew before its first gather, with one all-reduce of amaxes for each group of ranks, 4 bytes a scale. Under them it
    does nothing, so that one loop serves all recipes.

    Args:
      model: after `convert` and `fully_shard`.
      group: the ranks that train this model, or this stage of a pipeline, if its parameters do not tell; they do not if
        none is a DTensor. As for `update_delayed`.

    Collective under `DelayedScaling`: call it on all ranks, after `optimizer.step()`; `update_delayed` has the formula.

    Weights of a model that was unpickled, and of `Linear`s made one by one, are refreshed each by itself, until this
    has seen the model that they are in.

    >>> from qshard.recipes import CurrentScaling
    >>> from qshard.torch_bridge import convert
    >>> update_scales(convert(nn.Sequential(nn.Linear(4, 4)), CurrentScaling()))
    """
    check_model("update_scales", model)
    passes = Passes.of(model)
    for parameter in parameters_of(model):
        state = state_of(parameter)
        if state is None or state.passes is passes:
            continue
        root = state.passes.root
        if root is None or getattr(root, "is_one_layer", False):  # Made by itself, it knows of no model but itself.
            state.passes = passes
    update_delayed(model, group)


def recast(parameters: Iterable[Tensor]) -> None:
    """Makes the codes of primary weights anew, of masters that an optimizer has changed. Collective.

    One max-reduction for each group of ranks. Under `DelayedScaling` the next gather does it, with the scales of then.
    """
    groups: dict[str, list[WeightShard]] = {}
    for parameter in parameters:
        state = state_of(parameter)
        if state is None or state.primary is None or state.primary.master is None:
            continue
        if state.delayed is not None or not state.gathers:
            state.primary.load(state.primary.master)
        elif (found := state.shard_of(parameter)) is not None:
            groups.setdefault(found.plan.group.group_name, []).append(found)
    for weights in groups.values():
        _refresh(weights, None)
        primaries = [weight.primary for weight in weights]
        with torch.no_grad():
            cast_shards(weights, [p.room(weight.plan) for p, weight in zip(primaries, weights, strict=True)])
        for p, weight in zip(primaries, weights, strict=True):
            p.end_cast(weight.plan)


def make_scales(weight: WeightShard) -> None:
    """Stages the scales for a gather that starts. If it is the first of its pass, a refresh comes before."""
    state = weight.state
    if state.primary is not None and state.primary.codes is not None:
        state.primary.check()
    else:
        now = state.passes.now()
        if now is None or state.refresh is None or state.refresh.made_in != now:
            weights = [weight]
            if now is not None:
                others = [weight if other.state is state else other for other in _sharded_weights(state.passes.root)]
                weights = [each for each in others if each.plan.group.group_name == weight.plan.group.group_name]
            _refresh(weights if any(each is weight for each in weights) else [weight], now)
    assert state.staged is not None
    state.status = Status.GATHERING


def _sharded_weights(model: nn.Module | None) -> Iterator[WeightShard]:
    """Weights that are sharded now and need scales, in the order of the model, which is the same on all ranks."""
    for parameter in () if model is None else parameters_of(model):
        state = state_of(parameter)
        if state is None or not state.gathers or state.status is Status.GATHERING:
            continue
        if state.primary is not None and state.primary.codes is not None:
            continue
        found = state.shard_of(parameter)
        if found is not None:
            yield found


@torch.no_grad()
def _refresh(weights: Sequence[WeightShard], made_in: object) -> None:
    """Makes the scales of weights that are cut over one group. All ranks give the same list."""
    if not all(weight.state.agreed for weight in weights):
        check_ranks_agree(weights)
    for delayed in (False, True):
        chosen = [weight for weight in weights if (weight.state.delayed is not None) is delayed]
        if chosen:
            made = delayed_scales(chosen) if delayed else current_scales(chosen)
            Refresh([weight.state for weight in chosen], made, made_in)


def delayed_scales(weights: Sequence[WeightShard]) -> list[Scales]:
    """Copies of delayed scales: an update amid a pass is for the next one. First ones take one max-reduction."""
    given = [state.delayed for state, _, _ in weights if state.delayed is not None]
    copies = torch.stack([buffer for delayed in given for buffer in (delayed.scale, delayed.scale_inv)]).unbind()
    made = [Scales(scale, scale_inv) for scale, scale_inv in zip(copies[::2], copies[1::2], strict=True)]
    new = [i for i, delayed in enumerate(given) if not delayed.knows_scale()]
    if new:
        amaxes = torch.stack([ops.amax_tensor(weights[i].shard, lead=0).to(made[i].scale.device) for i in new])
        of_wholes = max_over_ranks(amaxes, weights[0].plan.group).unbind()
        merge_shards([weights[i].state.part for i in new], of_wholes)
        for i, amax in zip(new, of_wholes, strict=True):
            made[i] = Scales(*given[i].scales_under(amax))
    return made


def current_scales(weights: Sequence[WeightShard]) -> list[Scales]:
    """Scales of the weights as they are, with one max-reduction.

    An empty shard takes part with amaxes of 0. An offloaded shard is on the CPU, unless FSDP2 has moved it for the
    gather that asks: its amaxes are made where it is, and needed where ranks compute.
    """
    group, device = weights[0].plan.group, weights[0].plan.device
    plans = tuple(weight.plan for weight in weights)
    devices = dict.fromkeys(weight.shard.device for weight in weights)
    bits = [_amaxes_on(there, weights, plans).to(device).view(torch.int32) for there in devices]
    amaxes = functools.reduce(torch.maximum, bits).view(torch.float32)
    flat = flat_plan(tuple(plan.slice for plan in plans), device)
    amaxes = max_over_ranks(amaxes, group)
    merge_plan([state.part for state, _, _ in weights], flat.plan, amaxes)
    made: dict[int, Scales] = {}
    for bucket, of_bucket in zip(flat.plan.buckets, flat.scales(amaxes), strict=True):
        made.update(zip(bucket.indices, _split_scales(bucket, of_bucket), strict=True))
    return [made[i] for i in range(len(weights))]


def _split_scales(bucket: Bucket, made: Scales) -> Iterator[Scales]:
    """`Bucket.split_scales`, in a few calls for all weights."""
    grids = [where.scale_shape for where in bucket.planes]
    parts = [_split(made.scale, grids), _split(made.scale_inv, grids)]
    if made.global_scale_inv is not None:
        parts.append(_split(made.global_scale_inv, [where.global_scale_shape or () for where in bucket.planes]))
    return (Scales(*each) for each in zip(*parts, strict=True))


def _split(numbers: Tensor, shapes: Sequence[tuple[int, ...]]) -> Sequence[Tensor]:
    """Tensors of these shapes, one after the other."""
    if not any(shapes):
        return numbers.unbind()
    sizes = [math.prod(shape) for shape in shapes]
    return [part.view(shape) for part, shape in zip(numbers.split(sizes), shapes, strict=True)]


def _amaxes_on(device: torch.device, weights: Sequence[WeightShard], plans: tuple[ShardPlan, ...]) -> Tensor:
    """The amaxes of all weights, as far as the shards on one device contribute to them."""
    flat = flat_plan(tuple(plan.slice for plan in plans), device)
    amaxes = flat.amaxes(
        [  # Of shards on other devices, and of columns of blocks, empty ones.
            shard if shard.device == device and plan.box is None else shard.new_empty(0, device=device)
            for _, shard, plan in weights
        ]
    )
    if any(plan.box for plan in plans):
        for bucket in flat.plan.buckets:
            for i, (grid, whole) in zip(bucket.indices, bucket.split(*bucket.found(amaxes)), strict=True):
                if weights[i].shard.device == device:
                    plans[i].note_amaxes_of_columns(weights[i].shard, grid, whole)
    return amaxes


def check_ranks_agree(weights: Sequence[WeightShard]) -> None:
    """Raises on every rank if one has other weights: it would make other scales, or wait for amaxes that never come.

    Every rank sends a digest of one size. The host waits for the device, once for each set of weights.
    """
    group, device = weights[0].plan.group, weights[0].plan.device
    described = [(s.name, str(s.fmt), s.part and s.part.placements, *plan.described) for s, _, plan in weights]
    others = unlike_ranks(repr(described).encode(), group, device)
    if others:
        raise ValueError(
            f"fully_shard: rank {others[0]} of the group has other weights than this rank ({len(weights)}, the first "
            f"{weights[0].state.name} {weights[0].plan.shape} in {weights[0].state.fmt}); convert and shard the model "
            "alike on every rank"
        )
    for weight in weights:
        weight.state.agreed = True


def end_with_zeros(weight: WeightShard, room: Tensor) -> None:
    """Zeros the padding of codes after the end of a shard that is shorter than others."""
    rows = weight.shard.shape[0]
    if rows < weight.plan.padded_shape[0]:
        weight.plan.padded_in(room)[rows:].zero_()


def cast_shards(weights: Sequence[WeightShard], rooms: Sequence[Tensor]) -> None:
    """Casts shards under their staged scales: all slices of a format that are on one device by one launch."""
    for device in dict.fromkeys(weight.shard.device for weight in weights):
        of_device = [(w, room) for w, room in zip(weights, rooms, strict=True) if w.shard.device == device]
        slices = [(weight, room) for weight, room in of_device if weight.plan.box is None]
        if slices:
            flat = flat_plan(tuple(weight.plan.slice for weight, _ in slices), device)
            scales = [weight.staged.scale for weight, _ in slices]
            of_buckets = [_concatenate([scales[i] for i in bucket.indices]).to(device) for bucket in flat.plan.buckets]
            flat.cast([room for _, room in slices], [w.shard for w, _ in slices], of_buckets, pieces=True)
        for weight, room in of_device:
            if weight.plan.box is not None:
                weight.plan.cast_columns(weight.shard, weight.staged.scale.to(device), room)


def pop_prefetched(weight: WeightShard) -> Tensor | None:
    """The codes of a weight that one before it in its group has cast for it; they are handed out once."""
    state, ahead = weight.state, weight.state.ahead
    state.ahead = None
    if ahead is None or ahead.refresh is not state.refresh or ahead.memory != weight.shard.data_ptr():
        return None
    return ahead.room


def cast_group(weight: WeightShard) -> Tensor:
    """The codes of a weight whose shard is a slice. Casts the next weights of its FSDP2 group in the same launch."""
    weights = [weight, *_next_in_group(weight)]
    sizes = [-(-one.plan.room // _ALIGNMENT) * _ALIGNMENT for one in weights]
    whole = torch.empty(sum(sizes), dtype=torch.uint8, device=weight.shard.device)
    rooms = [one.plan.room_in(part) for one, part in zip(weights, whole.split(sizes), strict=True)]
    for one, room in zip(weights, rooms, strict=True):
        end_with_zeros(one, room)
    cast_shards(weights, rooms)
    for (state, shard, _), room in zip(weights[1:], rooms[1:], strict=True):
        assert state.refresh is not None
        state.ahead = PrefetchedCodes(room, state.refresh, shard.data_ptr())
    return rooms[0]


def _next_in_group(weight: WeightShard) -> Iterator[WeightShard]:
    """Later weights of the FSDP2 group that have scales of the same refresh, so that they can be cast together."""
    group = _group_of(weight.state)
    begun = False
    for parameter in () if group is None else group.fsdp_params:
        local: Any = local_of(parameter.sharded_param)
        state = getattr(local, "scale_state", None)
        if state is weight.state:
            begun = True
        elif (
            begun
            and state is not None
            and state.status is not Status.GATHERING
            and state.refresh is weight.state.refresh
        ):
            found = state.shard_of(parameter.sharded_param)
            if found is not None and found.is_cast_in_gathers and found.shard.device == weight.shard.device:
                yield found


def _group_of(state: ScaleState) -> Any:
    """FSDP2's group of a weight, which is found once for all weights of a model."""
    if state.group is None:
        for group in groups_of(state.passes.root):
            for parameter in group.fsdp_params:
                known = getattr(local_of(parameter.sharded_param), "scale_state", None)
                if known is not None:
                    known.group = weakref.ref(group)
        if state.group is None:  # As in a model that was unpickled, which nobody has shown us.
            state.group = _nothing
    return state.group()


def _nothing() -> None:
    return None


def _concatenate(scales: Sequence[Tensor]) -> Tensor:
    """One after the other, without a copy where they lie so, as a refresh makes them."""
    first, last, end, count = scales[0], scales[-1], scales[0].data_ptr(), 0
    lie_so = last is first or first.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
    for scale in scales:
        if not lie_so or scale.data_ptr() != end:
            return torch.cat([scale.view(-1) for scale in scales])
        end += scale.nbytes
        count += scale.numel()
    whole: Tensor = first.as_strided((count,), (1,))
    return whole


def _padded_codes(weight: WeightShard) -> Tensor:
    """Padded codes of a weight that keeps none between gathers."""
    ahead = pop_prefetched(weight)
    if ahead is not None:
        return ahead
    if weight.is_cast_in_gathers:
        return cast_group(weight)
    room = torch.empty(weight.plan.room, dtype=torch.uint8, device=weight.shard.device)
    end_with_zeros(weight, room)
    _cast_into(weight, room)
    return room


def _cast_into(weight: WeightShard, room: Tensor) -> None:
    state, shard, plan = weight
    if state.delayed is None:
        cast_shards([weight], [room])
        return
    amax, scale_inv = (torch.empty((), dtype=torch.float32, device=shard.device) for _ in range(2))
    made = into(plan.padded_in(room)[: shard.shape[0]], amax, scale_inv)
    scale = weight.staged.scale.to(shard.device)
    quantize_operand(made, shard, state.operand, scale=scale)
    state.delayed.observe(amax)
