"""Casts of shards: those that are gathered together take one launch. The words are of the glossary in `scale_state.py`.

FSDP2 asks for the codes of one weight after the other, and copies and sends them when it has all. A launch for each
would have to wait for its turn: GEMMs that take a whole GPU let a kernel of another stream begin when one of them
ends, so seven of them, one after another, take as long as the layers that they are to hide behind. So whoever is asked
first casts for all that are asked next.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from qshard._core import flat_shards
from qshard.torch_bridge._distributed.dtensor import local_of
from qshard.torch_bridge._fsdp.mesh_groups import groups_of
from qshard.torch_bridge._fsdp.scale_computation import prepared

if TYPE_CHECKING:
    from qshard.torch_bridge._fsdp.scale_state import Refresh, ScaleState, ShardOf

_ALIGNMENT = 256  # Of codes that share memory: that of allocations on GPUs.


class Ahead(NamedTuple):
    """Codes that were cast before they are asked for.

    Attributes:
      refresh: whose scales they have.
      memory: where the shard is.
    """

    room: Tensor
    refresh: Refresh
    memory: int


def end_with_zeros(weight: ShardOf, room: Tensor) -> None:
    """Of padded codes: those past the end of a shard that is shorter than others."""
    rows = weight.shard.shape[0]
    if rows < weight.plan.padded_shape[0]:
        weight.plan.padded_in(room)[rows:].zero_()


def cast_together(weights: Sequence[ShardOf], rooms: Sequence[Tensor]) -> None:
    """Casts slices that are on one device under their staged scales, with a launch for those of a format."""
    device = weights[0].shard.device
    plan, ops, starts = prepared(tuple(of_weight for _, _, of_weight in weights), device)
    scales = []
    for state, _, _ in weights:
        assert state.staged is not None
        scales.append(state.staged.scale)
    of_buckets = [_joined([scales[i] for i in bucket.indices]).to(device) for bucket in plan.buckets]
    shards = [shard for _, shard, _ in weights]
    flat_shards.cast(ops, plan, rooms, shards, starts, of_buckets, pieces=True)


def taken_ahead(weight: ShardOf) -> Tensor | None:
    """The codes of a weight that one before it in its group has cast for it; they are handed out once."""
    state, ahead = weight.state, weight.state.ahead
    state.ahead = None
    if ahead is None or ahead.refresh is not state.refresh or ahead.memory != weight.shard.data_ptr():
        return None
    return ahead.room


def cast_group(weight: ShardOf) -> Tensor:
    """The codes of a weight, which is a slice. Those that FSDP2 asks for next are cast along."""
    weights = [weight, *_asked_next(weight)]
    sizes = [-(-one.plan.room // _ALIGNMENT) * _ALIGNMENT for one in weights]
    whole = torch.empty(sum(sizes), dtype=torch.uint8, device=weight.shard.device)
    rooms = [one.plan.room_in(part) for one, part in zip(weights, whole.split(sizes), strict=True)]
    for one, room in zip(weights, rooms, strict=True):
        end_with_zeros(one, room)
    cast_together(weights, rooms)
    for (state, shard, _), room in zip(weights[1:], rooms[1:], strict=True):
        assert state.refresh is not None
        state.ahead = Ahead(room, state.refresh, shard.data_ptr())
    return rooms[0]


def _asked_next(weight: ShardOf) -> Iterator[ShardOf]:
    """What can be cast along: of the group of FSDP2, after this weight, with scales of the same refresh."""
    group = _group_of(weight.state)
    begun = False
    for parameter in () if group is None else group.fsdp_params:
        local: Any = local_of(parameter.sharded_param)
        state = getattr(local, "scale_state", None)
        if state is weight.state:
            begun = True
        elif begun and state is not None and not state.travels and state.refresh is weight.state.refresh:
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


def _joined(scales: Sequence[Tensor]) -> Tensor:
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
