"""The scales of sharded weights, made with one max-reduction. The glossary is in `scale_state.py`."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from qshard._core import flat_shards
from qshard._core.flat_shards import Bucket, MasterPlan
from qshard._core.quantize_steps import Scales
from qshard.torch_bridge._distributed.tensor_shards import merge_parts, merge_plan
from qshard.torch_bridge._fsdp.shard_plan import ShardPlan
from qshard.torch_bridge._ops.bind import ops
from qshard.torch_bridge._ops.collectives import max_over_ranks
from qshard.torch_bridge._ops.foreach import SliceOps
from qshard.torch_bridge._ops.uint64 import words

if TYPE_CHECKING:
    from qshard.torch_bridge._fsdp.scale_state import ShardOf


def delayed_scales(weights: Sequence[ShardOf]) -> list[Scales]:
    """Copies of delayed scales: an update amid a pass is for the next one. First ones take one max-reduction."""
    given = [state.delayed for state, _, _ in weights if state.delayed is not None]
    copies = torch.stack([buffer for delayed in given for buffer in (delayed.scale, delayed.scale_inv)]).unbind()
    made = [Scales(scale, scale_inv) for scale, scale_inv in zip(copies[::2], copies[1::2], strict=True)]
    new = [i for i, delayed in enumerate(given) if not delayed.knows_scale()]
    if new:
        amaxes = torch.stack([ops.amax_tensor(weights[i].shard, lead=0).to(made[i].scale.device) for i in new])
        of_wholes = max_over_ranks(amaxes, weights[0].plan.group).unbind()
        merge_parts([weights[i].state.part for i in new], of_wholes)
        for i, amax in zip(new, of_wholes, strict=True):
            made[i] = Scales(*given[i].scales_under(amax))
    return made


def made_scales(weights: Sequence[ShardOf]) -> list[Scales]:
    """Scales of the weights as they are, with one max-reduction.

    An empty shard takes part with amaxes of 0. An offloaded shard is on the CPU, unless FSDP2 has moved it for the
    gather that asks: its amaxes are made where it is, and needed where ranks compute.
    """
    group, device = weights[0].plan.group, weights[0].plan.device
    plans = tuple(weight.plan for weight in weights)
    devices = dict.fromkeys(weight.shard.device for weight in weights)
    bits = [_amaxes_on(there, weights, plans).to(device).view(torch.int32) for there in devices]
    amaxes = functools.reduce(torch.maximum, bits).view(torch.float32)
    plan, of_slices, _ = prepared(plans, device)
    amaxes = max_over_ranks(amaxes, group)
    merge_plan([state.part for state, _, _ in weights], plan, amaxes)
    made: dict[int, Scales] = {}
    for bucket, of_bucket in zip(plan.buckets, flat_shards.scales(of_slices, plan, amaxes), strict=True):
        made.update(zip(bucket.indices, _of_weights(bucket, of_bucket), strict=True))
    return [made[i] for i in range(len(weights))]


def _of_weights(bucket: Bucket, made: Scales) -> Iterator[Scales]:
    """`Bucket.split_scales`, in a few calls for all weights."""
    grids = [where.scale_shape for where in bucket.planes]
    parts = [_parts(made.scale, grids), _parts(made.scale_inv, grids)]
    if made.global_scale_inv is not None:
        parts.append(_parts(made.global_scale_inv, [where.global_scale_shape or () for where in bucket.planes]))
    return (Scales(*each) for each in zip(*parts, strict=True))


def _parts(numbers: Tensor, shapes: Sequence[tuple[int, ...]]) -> Sequence[Tensor]:
    """Tensors of these shapes, one after the other."""
    if not any(shapes):
        return numbers.unbind()
    sizes = [math.prod(shape) for shape in shapes]
    return [part.view(shape) for part, shape in zip(numbers.split(sizes), shapes, strict=True)]


def _amaxes_on(device: torch.device, weights: Sequence[ShardOf], plans: tuple[ShardPlan, ...]) -> Tensor:
    """What the shards on one device know of the amaxes of all weights."""
    plan, of_slices, starts = prepared(plans, device)
    slices = [  # Of shards on other devices, and of columns of blocks, empty ones.
        shard if shard.device == device and of_weight.columns is None else shard.new_empty(0, device=device)
        for _, shard, of_weight in weights
    ]
    amaxes: Tensor = flat_shards.amaxes(of_slices, plan, slices, starts)
    if any(of_weight.columns for of_weight in plans):
        for bucket in plan.buckets:
            for i, (grid, whole) in zip(bucket.indices, bucket.split(*bucket.found(amaxes)), strict=True):
                if weights[i].shard.device == device:
                    plans[i].note_amaxes_of_columns(weights[i].shard, grid, whole)
    return amaxes


@functools.lru_cache(maxsize=1024)
def prepared(plans: tuple[ShardPlan, ...], device: torch.device) -> tuple[MasterPlan, SliceOps, Tensor]:
    """What a refresh or a cast of some weights needs, step after step, without a copy from the host."""
    plan = flat_shards.plan_master([p.shape for p in plans], [p.fmt for p in plans], dtype=[p.dtype for p in plans])
    starts = words("update_scales", "starts", [p.start for p in plans], device, len(plans))
    return plan, SliceOps(plan, device), starts


def check_agree(weights: Sequence[ShardOf]) -> None:
    """Raises on every rank if one has other weights: it would make other scales, or wait for amaxes that never come.

    What is sent has one size, whatever a rank has. It costs a wait for the device, the first time that weights meet.
    """
    group, device = weights[0].plan.group, weights[0].plan.device
    described = [(s.name, str(s.fmt), s.part and s.part.placements, *plan.described) for s, _, plan in weights]
    mine = hashlib.sha256(repr(described).encode()).digest()
    sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
    everyone = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, sent, group=group)
    others = [rank for rank, of_rank in enumerate(everyone) if bytes(of_rank.tolist()) != mine]
    if others:
        raise ValueError(
            f"fully_shard: weights of rank {others[0]} of the group are not those of this rank, {len(weights)} from "
            f"{weights[0].state.name} {weights[0].plan.shape} of {weights[0].state.fmt} on: names, formats, shapes, "
            "dtypes or cuts differ; convert and shard the model alike on every rank"
        )
    for weight in weights:
        weight.state.agreed = True
