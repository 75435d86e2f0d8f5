"""All-gather of weights as codes without FSDP2's hooks: amaxes, then codes with one coalesced all-gather.

    shard  --FSDP-->  part  --tensor parallelism-->  weight

A weight is sharded by rows, as FSDP2 shards, over ranks of one mesh axis. What these ranks have together may be a part
of the weight, as `parallelize_module` shards, along rows or columns between blocks. All ranks then have, bit for bit,
the codes of `quantize` of the whole weight. Under delayed scaling amaxes are reduced only if a weight has no scale yet.

| shards | max-reduced over ranks | gathered |
| --- | --- | --- |
| split no block | scales of whole tensors, 4 bytes a weight | codes, and scales of blocks |
| split blocks | amaxes of all blocks | codes |
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from qshard._core.flat_shards import SliceBatch
from qshard._core.quantize_steps import Plane, Scales
from qshard.formats import Format, Usage
from qshard.layout import PlaneLayout, plane
from qshard.torch_bridge._delayed_scaling import DelayedScale, delayed_scales
from qshard.torch_bridge._distributed.dtensor import local_of
from qshard.torch_bridge._distributed.tensor_shards import ShardSpec, merge_plan
from qshard.torch_bridge._fsdp.scale_state import ScaleState
from qshard.torch_bridge._fsdp.shard_plan import ShardPlan, compute_device
from qshard.torch_bridge._fsdp.weight import memory_of
from qshard.torch_bridge._ops.collectives import PendingGather, begin_max, join_scalars
from qshard.torch_bridge._ops.flat_plan import flat_plan


def row_shard_plan(op: str, weight: Tensor, fmt: Format) -> ShardPlan | None:
    """Return the plan of the local shard of a weight; None if its sharding is not as above. All ranks return alike.

    Errors name the caller `op`.
    """
    shape: tuple[int, ...] = tuple(weight.shape)
    mesh: DeviceMesh | None = None
    rows_axis: int | None = None
    part: ShardSpec | None = None
    if isinstance(weight, DTensor):
        mesh, placements = weight.device_mesh, weight.placements
        axes = [i for i, each in enumerate(placements) if not isinstance(each, Replicate) and mesh.size(i) > 1]
        dims = [getattr(placements[i], "dim", None) for i in axes]
        if not set(dims) <= {0, 1} or len(axes) > 2 or dims == [1, 1]:
            return None
        rows_axis = _rows_axis(placements, axes, dims)
        if outer := [i for i in axes if i != rows_axis]:
            kept = [each if i in outer else Replicate() for i, each in enumerate(placements)]
            part = ShardSpec(shape, mesh, tuple(kept))
            if fmt.row_scaled or not _has_whole_blocks(part, fmt):
                return None
            shape = part.box.size
    where = memory_of(weight), shape, mesh, rows_axis, part
    state: ScaleState | None = getattr(local_of(weight), "scale_state", None)
    if state is not None and state.fmt == fmt:
        return state.plan_of(op, *where)
    return ShardPlan(op, "weight", fmt, *where, is_delayed=False)


def _rows_axis(placements: Sequence[Any], axes: list[int], dims: list[Any]) -> int | None:
    """Return the mesh axis that shards rows last, so that its ranks have adjacent rows of a part."""
    strided = [i for i in axes if hasattr(placements[i], "split_factor")]  # FSDP2 after tensor parallelism
    by_rows = strided or [i for i, dim in zip(axes, dims, strict=True) if dim == 0]
    return by_rows[-1] if by_rows and (len(axes) > 1 or dims == [0]) else None


def _has_whole_blocks(part: ShardSpec, fmt: Format) -> bool:
    """Return whether no boundary of parts splits a block or a byte. It depends on sizes that all ranks share."""
    where = plane(fmt, part.shape, Usage.ROWWISE)
    block = where.scaled_shape if where.scale_shape else (1, 1)
    units = block[0], math.lcm(block[1], fmt.element.codes_per_byte)
    for axis, placement in enumerate(part.placements):
        if not isinstance(placement, Replicate):
            dim: int = placement.dim  # type: ignore[attr-defined]
            if part.shape[dim] % part.mesh.size(axis) or part.shape[dim] // part.mesh.size(axis) % units[dim]:
                return False
    return True


class PendingAmaxes(NamedTuple):
    """The first step of a gather: values of shards, amaxes, and their reductions, which may not be over.

    `delayed` has the states of weights with delayed scales, and then `amaxes` is None if no state needs them.
    """

    values: list[Tensor]
    amaxes: Tensor | None
    reductions: list[dist.Work]
    delayed: list[DelayedScale]


class PendingCodes(NamedTuple):
    """The second step of a gather: codes and scales that are gathered, and the scales that this rank computed."""

    gathering: PendingGather
    scales: list[Scales]


class CodeGather:
    """All-gather of weights with one `ShardPlan.gather_key`, in three steps that other work may come between.

    Collectives are `reduce`, `send`, and `planes` if the weights have parts.
    """

    def __init__(self, plans: Sequence[ShardPlan]):
        self._plans = plans
        self._device, self._group, self._part = plans[0].device, plans[0].group, plans[0].part
        self._splits_blocks, self._is_delayed = plans[0].splits_blocks, plans[0].is_delayed
        self._flat = flat_plan(tuple(plan.cast_slice for plan in plans), self._device)
        self._sizes = [math.prod(plan.padded_shape) for plan in plans]

    def reduce(self, weights: Sequence[Tensor], *, observe: bool = False) -> PendingAmaxes:
        """Compute the amaxes of the shards of `weights`, and begin their max-reduction.

        `observe` records the amaxes for the next delayed scales.
        """
        values = [memory_of(each).to(self._device).reshape(-1) for each in weights]
        states: list[Any] = [local_of(each) for each in weights] if self._is_delayed else []
        delayed = [each.scale_state.delayed for each in states]
        has_scales = bool(delayed) and all([state.knows_scale() for state in delayed])  # noqa: C419, every state must be told.
        if has_scales and not observe:
            return PendingAmaxes(values, None, [], delayed)
        amaxes = self._flat.amaxes(values)
        if observe:
            for state, (amax, _) in zip(delayed, self._flat.plan.split_amaxes(amaxes), strict=False):
                state.observe(amax)
        if has_scales:
            return PendingAmaxes(values, None, [], delayed)
        reduced = [amaxes]
        if not self._splits_blocks:
            parts = [(batch, *batch.part(amaxes)) for batch in self._flat.plan.batches]
            of_tensors = [grid if batch.fmt.per_tensor else whole for batch, grid, whole in parts]
            is_shared = [batch.fmt.tensor_scaled for batch, *_ in parts]
            reduced = [each for each, shared in zip(of_tensors, is_shared, strict=True) if shared and each is not None]
        works = [work for each in reduced if (work := begin_max(each, self._group)) is not None]
        return PendingAmaxes(values, amaxes, works, delayed)

    def send(self, step: PendingAmaxes, global_amaxes: Sequence[Tensor | None] = ()) -> PendingCodes:
        """Cast the shards, and begin the all-gather of their codes.

        `global_amaxes` may give a weight, by its index, another amax for its global scale: of more than the weight.
        """
        for work in step.reductions:
            work.wait()
        if step.amaxes is not None:
            merge_plan([plan.part for plan in self._plans], self._flat.plan, step.amaxes)
            for given, (_, own) in zip(global_amaxes, self._flat.plan.split_amaxes(step.amaxes), strict=False):
                if given is not None and own is not None:
                    own.copy_(given)
        scales = self._scales(step)
        sizes = [plan.buffer_size for plan in self._plans] if self._splits_blocks else self._sizes
        buffers = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes]
        if self._splits_blocks:  # The padding of shorter shards, and halves of bytes of other ranks.
            torch._foreach_zero_(buffers)
        self._flat.cast(buffers, step.values, [each.scale for each in scales], pieces=self._splits_blocks)
        if self._splits_blocks:
            arrays = [buffer[:size] for buffer, size in zip(buffers, self._sizes, strict=True)]
        else:
            arrays = [*buffers, *(array for each, of in self._batches(scales) for array in self._of_rows(each, of))]
        return PendingCodes(PendingGather.begin(arrays, self._group), scales)

    def _scales(self, step: PendingAmaxes) -> list[Scales]:
        """Return the scales of each batch."""
        amaxes = step.amaxes
        if not step.delayed:
            assert amaxes is not None
            return self._flat.scales(amaxes)
        grids = [] if amaxes is None else [grid for grid, _ in self._flat.plan.split_amaxes(amaxes)]
        each = delayed_scales(step.delayed, lambda new: [grids[i] for i in new])
        of_batches = [[each[i] for i in batch.indices] for batch in self._flat.plan.batches]
        return [
            Scales(join_scalars([s.scale for s in scales]), join_scalars([s.scale_inv for s in scales]))
            for scales in of_batches
        ]

    def planes(self, step: PendingCodes) -> list[Plane]:
        """Return the rowwise planes of the whole weights, once they are gathered."""
        gathered = step.gathering.wait()
        codes = [plan.codes(each) for plan, each in zip(self._plans, gathered, strict=False)]
        rest = iter(gathered[len(codes) :])
        found: dict[int, Plane] = {}
        for batch, of_batch in self._batches(step.scales):
            pairs: Iterable[tuple[Tensor, Tensor | None]]
            if self._splits_blocks:
                pairs = batch.split(of_batch.scale_inv, of_batch.global_scale_inv)
            else:
                pairs = self._whole_scales(batch, of_batch, rest)
            for i, (scale_inv, global_scale_inv) in zip(batch.indices, pairs, strict=True):
                found[i] = Plane(codes[i], scale_inv, global_scale_inv)
        planes = [found[i] for i in range(len(codes))]
        return planes if self._part is None else _join_parts(planes, [plan.layout for plan in self._plans], self._part)

    def _batches(self, scales: Sequence[Scales]) -> Iterator[tuple[SliceBatch, Scales]]:
        return zip(self._flat.plan.batches, scales, strict=True)

    @staticmethod
    def _of_rows(batch: SliceBatch, of_batch: Scales) -> list[Tensor]:
        """Return the scales of all weights of a batch that each rank has for its rows alone."""
        found: list[Tensor] = [] if batch.fmt.per_tensor else [of_batch.scale_inv]
        if batch.fmt.row_scaled:
            assert of_batch.global_scale_inv is not None
            found.append(of_batch.global_scale_inv)
        return found

    def _whole_scales(
        self, batch: SliceBatch, of_batch: Scales, gathered: Iterator[Tensor]
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Return the scales of each weight. `gathered` has the arrays of `_of_rows`, rank after rank."""
        wheres = [self._plans[i].layout for i in batch.indices]

        def split(counts: Sequence[int], shapes: Sequence[Any]) -> list[Tensor]:
            of_ranks = next(gathered).view(-1, sum(counts))
            ranks = of_ranks.shape[0]
            parts = of_ranks.new_empty(of_ranks.numel()).split([ranks * count for count in counts])
            out = [part.view(ranks, count) for part, count in zip(parts, counts, strict=True)]
            torch.split_with_sizes_copy(of_ranks, counts, 1, out=out)
            return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

        of_blocks: Sequence[Tensor]
        if batch.fmt.per_tensor:
            of_blocks = of_batch.scale_inv.unbind()
        else:
            of_blocks = split(batch.grids, [where.scale_shape for where in wheres])
        whole: Sequence[Tensor | None] = [None] * len(wheres)
        if batch.fmt.row_scaled:
            whole = split(batch.wholes, [where.global_scale_shape for where in wheres])
        elif of_batch.global_scale_inv is not None:
            whole = of_batch.global_scale_inv.unbind()
        return zip(of_blocks, whole, strict=True)


def gather_codes(weight: Tensor, plan: ShardPlan, *, observe: bool = False) -> Plane:
    """All-gather one weight, or its local shard: its rowwise plane. Collective. `observe` as in `CodeGather.reduce`."""
    with torch.no_grad():
        gather = CodeGather([plan])
        (whole,) = gather.planes(gather.send(gather.reduce([weight], observe=observe)))
    return whole


def device_of(value: Tensor) -> torch.device:
    """Return the device where ranks gather a tensor."""
    return compute_device(value.device_mesh if isinstance(value, DTensor) else None, local_of(value))


def _join_parts(planes: list[Plane], wheres: Sequence[PlaneLayout], part: ShardSpec) -> list[Plane]:
    """All-gather the parts of weights over the ranks of tensor parallelism. Scales of whole tensors are there."""
    for axis in reversed(range(part.mesh.ndim)):
        placement: Any = part.placements[axis]
        if isinstance(placement, Replicate):
            continue
        group, dim = part.mesh.get_group(axis), placement.dim
        arrays = [each.data for each in planes]
        arrays += [each.scale_inv for each, where in zip(planes, wheres, strict=True) if where.scale_shape]
        whole = _concatenate(PendingGather.begin(arrays, group).wait(), arrays, dim)
        scales = iter(whole[len(planes) :])
        planes = [
            each._replace(data=data, scale_inv=next(scales) if where.scale_shape else each.scale_inv)
            for each, data, where in zip(planes, whole, wheres, strict=False)
        ]
    return planes


def gather_ranks(whole: Plane, group: dist.ProcessGroup) -> list[Plane]:
    """All-gather the planes of as many weights as the group has ranks, one on each. Collective."""
    arrays = [array[None] for array in whole if array is not None]
    gathered = iter(PendingGather.begin(arrays, group).wait())
    parts = [None if array is None else next(gathered).unbind() for array in whole]
    ranks = range(dist.get_world_size(group))
    return [Plane(*(None if part is None else part[rank] for part in parts)) for rank in ranks]


def _concatenate(gathered: list[Tensor], arrays: list[Tensor], dim: int) -> list[Tensor]:
    """Return gathered arrays with the parts of ranks one after the other along `dim`."""
    if dim == 0:
        return gathered
    parts = (whole.view(-1, *own.shape) for whole, own in zip(gathered, arrays, strict=True))
    return [torch.cat(part.unbind(), dim) for part in parts]
