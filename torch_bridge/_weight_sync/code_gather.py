"""All-gather of several weights as codes, for one bucket: one reduction of amaxes, then one coalesced gather.

    shard  --FSDP-->  part  --tensor parallelism-->  weight

A weight is sharded by rows, as FSDP2 shards, over ranks of one mesh axis; blocks may be split. What these ranks have
together may be a part of the weight, as `parallelize_module` shards, along rows or columns between blocks. All ranks
then have, bit for bit, the codes of `quantize` of the whole weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from qshard._core.flat_shards import FlatSlice
from qshard._core.quantize_steps import Plane
from qshard.formats import Format, Usage
from qshard.layout import plane
from qshard.torch_bridge._distributed.tensor_shards import ShardSpec, merge_plan
from qshard.torch_bridge._fsdp.weight import memory_of
from qshard.torch_bridge._ops.bind import dtype_name
from qshard.torch_bridge._ops.collectives import max_over_ranks
from qshard.torch_bridge._ops.foreach import flat_plan

_collectives = torch.ops._c10d_functional


class CodeShard(NamedTuple):
    """The local shard of a weight that can be gathered as codes.

    Attributes:
      weight: the parameter.
      slice: the local rows as a flat slice of the part.
      longest: rows of the longest shard.
      group: ranks with the other rows; None for all rows.
      part: the part of the weight that these ranks have together; None for the whole weight.
    """

    weight: Tensor
    slice: FlatSlice
    longest: int
    group: dist.ProcessGroup | None
    part: ShardSpec | None

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for weights that are gathered together."""
        part = self.part
        return id(self.group), None if part is None else (id(part.mesh), part.placements)


def code_shard_of(weight: Tensor, fmt: Format) -> CodeShard | None:
    """Return the local shard of a weight; None if its sharding is not as above. All ranks return alike."""
    shape, dtype = tuple(weight.shape), dtype_name(memory_of(weight).dtype)
    if not isinstance(weight, DTensor):
        return CodeShard(weight, FlatSlice(shape, fmt, dtype, 0), shape[0], None, None)
    mesh, placements = weight.device_mesh, weight.placements
    axes = [i for i, each in enumerate(placements) if not isinstance(each, Replicate) and mesh.size(i) > 1]
    dims = [getattr(placements[i], "dim", None) for i in axes]
    if not set(dims) <= {0, 1} or len(axes) > 2 or dims == [1, 1]:
        return None
    rows_axis = _rows_axis(placements, axes, dims)
    outer = [i for i in axes if i != rows_axis]
    part = None
    if outer:
        kept = [each if i in outer else Replicate() for i, each in enumerate(placements)]
        part = ShardSpec(shape, mesh, tuple(kept))
        if not _has_whole_blocks(part, fmt):
            return None
    rows, columns = shape if part is None else part.box.size
    ranks = 1 if rows_axis is None else mesh.size(rows_axis)
    longest = -(-rows // ranks)
    first = 0 if rows_axis is None else min(rows, longest * mesh.get_local_rank(rows_axis))
    group = None if rows_axis is None else mesh.get_group(rows_axis)
    return CodeShard(weight, FlatSlice((rows, columns), fmt, dtype, first * columns), longest, group, part)


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


@torch.no_grad()
def gather_codes(shards: Sequence[CodeShard], device: torch.device) -> list[Plane]:
    """All-gather weights with one `key` as codes, and return their rowwise planes. Collective."""
    slices, group = tuple(each.slice for each in shards), shards[0].group
    values = [memory_of(each.weight).to(device).reshape(-1) for each in shards]
    flat = flat_plan(slices, device)
    amaxes = flat.amaxes(values)
    if group is not None:
        amaxes = max_over_ranks(amaxes, [group])
    merge_plan([each.part for each in shards], flat.plan, amaxes)
    scales = flat.scales(amaxes)
    sizes = [each.longest * each.slice.shape[1] // each.slice.fmt.element.codes_per_byte for each in shards]
    spare = max(each.slice.fmt.element.codes_per_byte for each in shards) - 1  # a slice may start within a byte
    buffers = [torch.zeros(size + spare, dtype=torch.uint8, device=device) for size in sizes]
    flat.cast(buffers, values, [each.scale for each in scales], pieces=True)
    gathered = _all_gather([buffer[:size] for buffer, size in zip(buffers, sizes, strict=True)], group)
    found: dict[int, Plane] = {}
    for bucket, of_bucket in zip(flat.plan.buckets, scales, strict=True):
        for i, (_, scale_inv, global_scale_inv) in zip(bucket.indices, bucket.split_scales(of_bucket), strict=True):
            shape = plane(bucket.fmt, slices[i].shape, Usage.ROWWISE).data_shape
            codes = gathered[i].view(-1)[: math.prod(shape)].view(shape)
            found[i] = Plane(codes, scale_inv, global_scale_inv)
    planes = [found[i] for i in range(len(shards))]
    return planes if shards[0].part is None else _join_parts(planes, shards)


def _join_parts(planes: list[Plane], shards: Sequence[CodeShard]) -> list[Plane]:
    """All-gather the parts of weights over the ranks of tensor parallelism. Scales of whole tensors are there."""
    part = shards[0].part
    assert part is not None
    for axis in reversed(range(part.mesh.ndim)):
        placement: Any = part.placements[axis]
        if isinstance(placement, Replicate):
            continue
        group, dim = part.mesh.get_group(axis), placement.dim
        arrays: list[Tensor] = []
        for each, shard in zip(planes, shards, strict=True):
            where = plane(shard.slice.fmt, shard.slice.shape, Usage.ROWWISE)
            arrays.append(each.data)
            arrays += [each.scale_inv] if where.scale_shape else []
            if where.global_scale_shape and dim == 0:
                assert each.global_scale_inv is not None
                arrays.append(each.global_scale_inv)
        whole = iter(_concatenate(_all_gather(arrays, group), arrays, dim))
        joined = []
        for each, shard in zip(planes, shards, strict=True):
            where = plane(shard.slice.fmt, shard.slice.shape, Usage.ROWWISE)
            data = next(whole)
            scale_inv = next(whole) if where.scale_shape else each.scale_inv
            is_by_row = where.global_scale_shape and dim == 0
            joined.append(Plane(data, scale_inv, next(whole) if is_by_row else each.global_scale_inv))
        planes = joined
    return planes


def gather_ranks(whole: Plane, group: dist.ProcessGroup) -> list[Plane]:
    """All-gather the planes of as many weights as the group has ranks, one on each. Collective."""
    arrays = [array[None] for array in whole if array is not None]
    gathered = iter(_all_gather(arrays, group))
    parts = [None if array is None else next(gathered).unbind() for array in whole]
    ranks = range(dist.get_world_size(group))
    return [Plane(*(None if part is None else part[rank] for part in parts)) for rank in ranks]


def _all_gather(arrays: list[Tensor], group: dist.ProcessGroup | None) -> list[Tensor]:
    """All-gather arrays of equal shapes on all ranks, with one call: rank after rank along the first axis."""
    if group is None or dist.get_world_size(group) == 1:
        return arrays
    # As bytes: gloo copies all arrays of a call through one buffer of one dtype.
    sent = [array.contiguous().view(-1).view(torch.uint8) for array in arrays]
    begun = _collectives.all_gather_into_tensor_coalesced(sent, dist.get_world_size(group), group.group_name)
    pairs = zip(begun, arrays, strict=True)
    return [_collectives.wait_tensor(each).view(own.dtype).view(-1, *own.shape[1:]) for each, own in pairs]


def _concatenate(gathered: list[Tensor], arrays: list[Tensor], dim: int) -> list[Tensor]:
    """Return gathered arrays with the parts of ranks one after the other along `dim`."""
    if dim == 0:
        return gathered
    parts = (whole.view(-1, *own.shape) for whole, own in zip(gathered, arrays, strict=True))
    return [torch.cat(part.unbind(), dim) for part in parts]
