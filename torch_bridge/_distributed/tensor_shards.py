"""Tensor parallelism: shards of the operands of a linear layer, as `parallelize_module` shards its weight.

    for each axis of the mesh   weight     x                       its gradient   y
    colwise                     Shard(0)   Replicate               Partial        Shard(-1)
    rowwise                     Shard(1)   Shard(-1)               Shard(-1)      Partial
    neither                     Replicate  Shard of rows, or not   the same       the same

Each rank multiplies its local shards, which are plain tensors. DTensor redistributes x before that where needed, adds
the bias, and computes gradients, with the placements of the tensors they belong to.

If x of a colwise layer is sharded along rows over the same ranks, it stays so, and codes are gathered. If y of a
rowwise layer is to be sharded along rows, partial sums are scattered, and codes of its gradient are gathered:
`sequence_parallel.py`.

Shard boundaries are between blocks, so each rank computes the scales of its blocks. A per-tensor scale needs the
amax of all shards: of x in rowwise layers, of the gradient of y in colwise layers, and of the weight in both. Each
takes an all-reduce of 4 bytes, but the weights of a model share one for each forward pass (`_nn/weight_amax.py`). Codes
and scales of all three are then, bit for bit, the codes and scales of one device. y and the gradients are sums over
ranks, in another order than on one device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from qshard._core.flat_shards import MasterPlan
from qshard._core.placement import Box, chunk_range
from qshard._core.quantize_steps import Philox
from qshard.layout import block_alignment
from qshard.recipes import Recipe, Role
from qshard.torch_bridge._distributed.sequence_parallel import Rows, rows_of
from qshard.torch_bridge._ops.collectives import max_over_ranks
from qshard.torch_bridge._ops.eager import is_compiling
from qshard.torch_bridge._ops.uint64 import as_uint64


class ShardSpec(NamedTuple):
    """The sharding of a tensor of shape `shape` over a mesh: Shard or Replicate for each axis of the mesh."""

    shape: tuple[int, ...]
    mesh: DeviceMesh
    placements: tuple[Placement, ...]

    @property
    def box(self) -> Box:
        sizes, starts = list(self.shape), [0] * len(self.shape)
        for axis, placement in enumerate(self.placements):
            if isinstance(placement, Shard):
                dim = placement.dim
                start, stop = chunk_range(sizes[dim], self.mesh.size(axis), self.mesh.get_local_rank(axis))
                starts[dim] += start
                sizes[dim] = stop - start
        return Box(self.shape, tuple(starts), tuple(sizes))

    def axes(self, *, by_row: bool = False) -> list[int]:
        """Return the axes of the mesh that shard the tensor.

        With `by_row`, only axes that shard the last dimension count: ranks with other parts of the same rows.
        """
        last = len(self.shape) - 1
        pairs = enumerate(self.placements)
        return [axis for axis, p in pairs if isinstance(p, Shard) and (p.dim == last or not by_row)]

    def groups(self, *, by_row: bool = False) -> list[dist.ProcessGroup]:
        """Return the groups of ranks with other shards, one for each of `axes`."""
        return [self.mesh.get_group(axis) for axis in self.axes(by_row=by_row)]

    def merge_amax(self, amax: Tensor, *, by_row: bool = False) -> Tensor:
        """Return the amax of the whole tensor, or of its rows, in place. Collective over ranks with other shards."""
        return max_over_ranks(amax, self.groups(by_row=by_row))

    def philox(self, seed: Tensor) -> Philox:
        """Return the Philox key and offset of the shard: each element gets its random number in the whole tensor.

        If an axis is sharded that has axes before it, the rows of a shard are not adjacent. Then ranks still use
        disjoint random numbers, but other ones than one device.
        """
        shift = 0
        axes = {placement.dim for placement in self.placements if isinstance(placement, Shard)}
        if any(math.prod(self.shape[:axis]) > 1 for axis in axes - {len(self.shape) - 1}):
            shift = (1 + self.mesh.get_rank()) * math.prod(self.shape)
        return self.box.philox(seed, lambda offset: as_uint64("linear", "offset", offset + shift, seed.device))


class LinearSharding(NamedTuple):
    """The sharding of x, of the weight and of the gradient of y.

    `x_rows` and `y_rows` tell how rows are sharded over the ranks that shard the weight; None if they are not.
    """

    parts: dict[Role, ShardSpec]
    x_rows: Rows | None = None
    y_rows: Rows | None = None
    scatter_dim: int | None = None

    def x(self, x: DTensor) -> Tensor:
        part = self.parts[Role.ACTIVATION]
        over = list(part.placements)
        if self.x_rows is None:
            over = [Partial() if isinstance(w, Shard) and w.dim == 0 else p for w, p in self._pairs_with(part)]
        # Even where it moves nothing, `redistribute` would sum a partial gradient of x over the ranks, for each layer.
        there = x if x.placements == part.placements else x.redistribute(placements=part.placements)
        local: Tensor = there.to_local(grad_placements=over)
        # Dynamo does not trace `grad_fn`.
        if not is_compiling() and over != list(part.placements) and local.grad_fn is not None:
            local.grad_fn.register_hook(_sum_with_graph(part.placements))
        return local

    def weight(self, weight: DTensor) -> Tensor:
        """Return the local shard of the weight. Ranks with other rows of x each have a partial sum of its gradient."""
        pairs = self._pairs_with(self.parts[Role.ACTIVATION])
        over = [Partial() if isinstance(w, Replicate) and isinstance(p, Shard) else w for w, p in pairs]
        return weight.to_local(grad_placements=over)

    def y(self, y: Tensor) -> Tensor:
        part = self.parts[Role.GRADIENT]
        over = list(part.placements)
        if self.y_rows is None:
            over = [Partial() if isinstance(w, Shard) and w.dim == 1 else p for w, p in self._pairs_with(part)]
        stride = torch.empty(part.shape, device="meta").stride()
        result = DTensor.from_local(y, part.mesh, over, run_check=False, shape=torch.Size(part.shape), stride=stride)
        return result if self.scatter_dim is None else result.redistribute(placements=[Shard(self.scatter_dim)])

    def y_shape(self, x: Tensor, rows: int) -> tuple[int, ...]:
        whole = self.parts[Role.GRADIENT].shape
        if self.x_rows is not None:
            return (*whole[:-1], rows)
        if self.y_rows is None:
            return (*x.shape[:-1], rows)
        ranks, sizes = self.y_rows.ranks, enumerate(whole[:-1])
        return (*(size // ranks if axis == self.scatter_dim else size for axis, size in sizes), rows)

    def _pairs_with(self, part: ShardSpec) -> list[tuple[Placement, Placement]]:
        return list(zip(self.parts[Role.WEIGHT].placements, part.placements, strict=True))


def _sum_with_graph(placements: Sequence[Placement]) -> Callable[..., Any]:
    """Return a hook of an autograd node that sums a partial gradient of x if it will be differentiated again.

    `DTensor.from_local` would sum it without its graph, and second derivatives would be left out silently.
    """

    def hook(grads: tuple[Any, ...], _: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not torch.is_grad_enabled() or grads[0] is None:
            return None
        return (grads[0].redistribute(placements=placements), *grads[1:])

    return hook


def linear_sharding(
    op: str, x: DTensor, weight: DTensor, recipe: Recipe, scatter_dim: int | None = None, overlap: bool = False
) -> LinearSharding:
    """Return how `x @ weight.T` is sharded over the mesh of both. Arguments as in `linear`.

    Raises:
      ValueError: on all ranks, if the meshes differ or the table above does not have such shardings.
    """
    mesh = weight.device_mesh
    if x.device_mesh != mesh:
        raise ValueError(
            f"{op}: weight (over {mesh}) is not on the mesh of x, {x.device_mesh}; call the module that fully_shard "
            "wraps, which gathers the weight over its axes"
        )
    check_sharding(op, "weight", recipe, tuple(weight.shape), mesh, weight.placements)
    last, y_shape = x.ndim - 1, (*x.shape[:-1], weight.shape[0])
    if scatter_dim is not None and (weight.placements != (Shard(1),) or not 0 <= scatter_dim < last):
        raise ValueError(
            f"{op}: scatter_dim ({scatter_dim}) does not apply to y {y_shape} with weight placements "
            f"{weight.placements}; pass a row axis of y, with the weight sharded along K on a 1-D mesh"
        )
    of_x: list[Placement] = []
    of_y: list[Placement] = []
    x_rows = y_rows = None
    for w, p in zip(weight.placements, x.placements, strict=True):
        rows: Placement = p if isinstance(p, Shard) and p.dim != last else Replicate()
        x_part, y_part = rows, rows
        if isinstance(w, Shard):
            x_part, y_part = (Shard(last), Replicate()) if w.dim else (Replicate(), Shard(last))
            if mesh.ndim == 1 and mesh.size() > 1:
                if w.dim == 0 and isinstance(rows, Shard):
                    x_rows = rows_of(recipe, Role.ACTIVATION, tuple(x.shape), rows.dim, mesh.get_group(), overlap)
                    x_part = x_part if x_rows is None else rows
                if scatter_dim is not None:
                    y_rows = rows_of(recipe, Role.GRADIENT, y_shape, scatter_dim, mesh.get_group(), overlap)
                    y_part = y_part if y_rows is None else Shard(scatter_dim)
        of_x.append(x_part)
        of_y.append(y_part)
    parts = {
        Role.WEIGHT: ShardSpec(tuple(weight.shape), mesh, weight.placements),
        Role.ACTIVATION: ShardSpec(tuple(x.shape), mesh, tuple(of_x)),
        Role.GRADIENT: ShardSpec(y_shape, mesh, tuple(of_y)),
    }
    return LinearSharding(parts, x_rows, y_rows, scatter_dim)


def check_sharding(
    op: str, name: str, recipe: Recipe, shape: tuple[int, ...], mesh: DeviceMesh, placements: Sequence[Placement]
) -> None:
    """Raise ValueError unless a weight is sharded along rows or columns, between blocks. All ranks raise."""
    sizes, what = list(shape), f"{op}: {name} {shape}"
    for axis, placement in enumerate(placements):
        if not isinstance(placement, Replicate | Shard):
            raise ValueError(f"{what} has placement {placement!r}; use Shard(0), Shard(1) or Replicate()")
        if isinstance(placement, Replicate) or mesh.size(axis) == 1:
            continue
        dim = placement.dim
        whole, (_, size) = sizes[dim], chunk_range(sizes[dim], mesh.size(axis), 0)
        sizes[dim] = size
        # The columns of the gradient of y, or of x, are sharded with the rows or columns of the weight.
        for role in (Role.WEIGHT, (Role.GRADIENT, Role.ACTIVATION)[dim]):
            fmt = recipe.format(role)
            unit = block_alignment(fmt)
            if size % unit and size < whole:
                raise ValueError(
                    f"{what} has shards of {size} {('rows', 'columns')[dim]}, which split the {role.value} blocks of "
                    f"{unit} of {fmt}; shard it over fewer ranks, pad it, or leave it out"
                )


def merge_shards(parts: Sequence[ShardSpec | None], amaxes: Sequence[Tensor]) -> None:
    """Replace amaxes of shards by amaxes of whole tensors, in place, with one reduction for each set of ranks."""
    groups: dict[tuple[str, ...], tuple[ShardSpec, list[Tensor]]] = {}
    for part, amax in zip(parts, amaxes, strict=True):
        if part is not None:
            groups.setdefault(tuple(group.group_name for group in part.groups()), (part, []))[1].append(amax)
    for part, of_parts in groups.values():
        torch._foreach_copy_(of_parts, list(part.merge_amax(torch.stack(of_parts)).unbind()))


def merge_plan(parts: Sequence[ShardSpec | None], plan: MasterPlan, amaxes: Tensor) -> None:
    """Merge the per-tensor amaxes of all weights of a plan, in place. No shard boundary splits a block."""
    if not any(parts):
        return
    pairs = zip(parts, plan.slices, plan.split_amaxes(amaxes), strict=True)
    found = [(part, grid if planned.fmt.per_tensor else whole) for part, planned, (grid, whole) in pairs]
    of_tensors = [(part, amax) for part, amax in found if amax is not None]
    merge_shards([part for part, _ in of_tensors], [amax for _, amax in of_tensors])


def first_rank(mesh: DeviceMesh) -> int:
    """Return a number that identifies a mesh: equal for all ranks with shards of the same tensors."""
    return int(mesh.mesh.min())
