"""Sharded weights that are gathered as codes by functional collectives, without the hooks of FSDP2.

For programs that shard parameters as DTensors and gather them in a parametrization, in the manner of SimpleFSDP, and
for what looks at sharded weights outside of a forward.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from qshard._core.flat_shards import FlatSlice
from qshard._core.operands import quantize_operand
from qshard._core.quantize_steps import Plane
from qshard._core.validation import as_format, quote
from qshard.formats import Format, Usage
from qshard.layout import plane
from qshard.torch_bridge._distributed.dtensor import local_of
from qshard.torch_bridge._fsdp.weight import ShardedWeight, memory_of
from qshard.torch_bridge._ops.autograd_node import Node, apply_node
from qshard.torch_bridge._ops.bind import dtype_name, ops
from qshard.torch_bridge._ops.foreach import FlatPlan, flat_plan
from qshard.torch_bridge._quantized.tensor import QuantizedTensor
from qshard.torch_bridge._quantized.validation import check_dtype


# Dynamo of torch 2.13 cannot make a format a constant of a graph, unless it came with an input of the graph.
@torch.compiler.disable
def gathered_weight(
    weight: Tensor,
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    reduce_op: str = "sum",
) -> QuantizedTensor:
    """The whole of a converted weight that is sharded as a DTensor, gathered as codes: what `Linear` multiplies with.

    It takes the place of `weight.redistribute(placements=[Replicate()]).to_local(...)`, which gathers high precision:

        def forward(self, x):  # Of a parametrization that SimpleFSDP registers
            return gathered_weight(x) if is_converted(x) else x.redistribute(...).to_local(...)

    Args:
      weight: a parameter of a `Linear`, that `distribute_tensor` or `fully_shard` has cut by rows over one axis of its
        mesh; it may be replicated over others. Rows may be cut anywhere.
      param_dtype: that the codes stand for, so that of the gradient; the dtype of `weight` by default.
      reduce_dtype: in which gradients travel; `param_dtype` by default.
      reduce_op: "sum" or "avg" of the gradients of ranks.

    Returns:
      Bit for bit the codes and scales of the whole weight, cast at once. In backward its gradient is reduce-scattered,
      and all-reduced over axes of replicas.

    Raises:
      TypeError: `weight` is not a converted weight, or not a DTensor, or an argument is not of its type.
      NotImplementedError: it is cut in another way.
      ValueError: `reduce_op` is not one of these.

    Collective: an all-reduce of amaxes, 4 bytes a scale, and an all-gather of codes, 1 or 1/2 byte an element.
    Under `DelayedScaling` scales are those of earlier steps, and the amax of the shard is noted. Under `torch.compile`
    it runs between graphs, so not with `fullgraph=True`.
    """
    local = local_of(weight)
    if not isinstance(local, ShardedWeight) or not isinstance(weight, DTensor):
        raise TypeError(
            f"gathered_weight: weight ({quote(weight)}) is not the sharded weight of a converted Linear; call convert "
            "first, then distribute_tensor"
        )
    for name, dtype in (("param_dtype", param_dtype), ("reduce_dtype", reduce_dtype)):
        if dtype is not None:
            check_dtype("gathered_weight", name, dtype)
    if reduce_op not in ("sum", "avg"):
        raise ValueError(f"gathered_weight: reduce_op ({quote(reduce_op)}) is not 'sum' or 'avg'; pass one of these")
    cut = row_sharding_of(weight)
    if cut is None:
        raise NotImplementedError(
            f"gathered_weight: {local.scale_state.name} {tuple(weight.shape)} (placements {weight.placements}) is not "
            "sharded by rows over one mesh axis; use Shard(0) on one axis and Replicate() on the others"
        )
    dtype = weight.dtype if param_dtype is None else param_dtype
    # The gradient of a shard is that of the whole DTensor, cut as it is.
    shard = weight.to_local(grad_placements=weight.placements)
    made: QuantizedTensor = apply_node(_Gather, shard, local, cut, dtype, reduce_dtype or dtype, reduce_op)
    return made


def is_converted(weight: Any) -> bool:
    """Whether `weight` is one of a `Linear`, sharded or not, that is kept in high precision and gathered as codes."""
    return isinstance(local_of(weight), ShardedWeight) if isinstance(weight, Tensor) else False


@torch.compiler.assume_constant_result
def warn_of_late_quantization(weight: Tensor) -> None:
    """Says that a weight of a `Linear` was gathered before it was quantized.

    The values are right, so it is not an error. Compiled programs run it once, as they are traced.
    """
    warnings.warn(
        f"Linear: weight {tuple(weight.shape)} was gathered in {dtype_name(weight.dtype)}, {weight.itemsize} bytes per "
        "element, before it is quantized; use gathered_weight for the gather, such as in the parametrization",
        RuntimeWarning,
        stacklevel=2,
    )


class RowSharding(NamedTuple):
    """The sharding of a weight by rows, and the rows of this rank."""

    fmt: Format
    shape: tuple[int, ...]
    start: int  # The index of their first element.
    longest: int  # The most rows that a rank has.
    group: _Group
    replicas: tuple[_Group, ...]  # Of ranks that hold the same rows.


class _Group(NamedTuple):
    """Ranks, and their collectives as ops that compilers know: those that DTensor calls."""

    name: str
    size: int

    def all_reduce(self, x: Tensor, how: str) -> Tensor:
        return x if self.size == 1 else _wait(_collectives.all_reduce(x, how, self.name))

    def all_gather(self, x: Tensor) -> Tensor:
        return x if self.size == 1 else _wait(_collectives.all_gather_into_tensor(x, self.size, self.name))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x if self.size == 1 else _wait(_collectives.reduce_scatter_tensor(x, "sum", self.size, self.name))


_collectives = torch.ops._c10d_functional


def _wait(x: Tensor) -> Tensor:
    done: Tensor = _collectives.wait_tensor(x)
    return done


def row_sharding_of(weight: DTensor) -> RowSharding | None:
    """The sharding of a weight; None if it is not by rows over one axis of its mesh."""
    mesh, placements = weight.device_mesh, weight.placements
    dims = [i for i, placement in enumerate(placements) if not isinstance(placement, Replicate)]
    if len(dims) > 1 or any(placements[i] != Shard(0) for i in dims):
        return None
    groups = [_Group(mesh.get_group(i).group_name, mesh.size(i)) for i in range(mesh.ndim)]
    group = groups[dims[0]] if dims else _Group("", 1)
    rows, columns = weight.shape
    longest = -(-rows // group.size)
    first = min(rows, longest * mesh.get_local_rank(dims[0])) if dims else 0
    replicas = tuple(each for i, each in enumerate(groups) if i not in dims)
    fmt = local_of(weight).scale_state.fmt  # type: ignore[attr-defined]
    return RowSharding(fmt, (rows, columns), first * columns, longest, group, replicas)


class _Gather(Node):
    op, degree = "gathered_weight", 1
    instead = "exclude the layer with convert(filter=)"

    @staticmethod
    def forward(
        ctx: Any,
        shard: Tensor,
        local: ShardedWeight,
        cut: RowSharding,
        dtype: torch.dtype,
        reduce_dtype: Any,
        reduce_op: str,
    ) -> tuple[QuantizedTensor, tuple[Tensor, ...]]:
        ctx.cut, ctx.reduce_dtype, ctx.reduce_op = cut, reduce_dtype, reduce_op
        ctx.shard_shape, ctx.dtype = shard.shape, shard.dtype
        return gather(local, cut, dtype, observe=True), ()

    @staticmethod
    def gradients(ctx: Any, saved: list[Tensor], grad: Tensor) -> tuple[Tensor | None, ...]:
        cut = ctx.cut
        missing = cut.longest * cut.group.size - cut.shape[0]
        made = torch.nn.functional.pad(grad.to(ctx.reduce_dtype), (0, 0, 0, missing)).contiguous()
        made = cut.group.reduce_scatter(made)[: ctx.shard_shape[0]]
        for group in cut.replicas:
            made = group.all_reduce(made.contiguous(), "sum")
        if ctx.reduce_op == "avg":
            made = made / math.prod(group.size for group in (cut.group, *cut.replicas))
        return made.to(ctx.dtype), None, None, None, None, None


@torch.no_grad()
def gather(local: ShardedWeight, cut: RowSharding, dtype: torch.dtype, *, observe: bool) -> QuantizedTensor:
    """The whole weight, which stands for `dtype`. Collective. `observe`: whether delayed scaling notes its amax."""
    state, shard = local.scale_state, memory_of(local)
    if state.delayed is not None:
        delayed, scale = state.delayed, state.delayed.scale
        if not delayed.knows_scale():  # The first scale is of the whole weight.
            own = ops.amax_tensor(shard, lead=0)
            scale, _ = delayed.scales_under(cut.group.all_reduce(own.view(torch.int32), "max").view(torch.float32))
        planes, amax = quantize_operand(ops, shard, state.operand, scale=scale)
        if observe and amax is not None:
            delayed.observe(amax)
        codes, scale_inv, global_scale_inv = planes[Usage.ROWWISE]
        codes = torch.nn.functional.pad(codes, (0, 0, 0, cut.longest - codes.shape[0]))
    else:
        amaxes = _amaxes(shard, str(cut.fmt), cut.shape, cut.start)
        amaxes = cut.group.all_reduce(amaxes.view(torch.int32), "max").view(torch.float32)  # See `max_over_ranks`.
        codes, scale_inv, *others = _codes(shard, amaxes, str(cut.fmt), cut.shape, cut.start, cut.longest)
        global_scale_inv = others[0] if others else None
    where = plane(cut.fmt, cut.shape, Usage.ROWWISE, op="gathered_weight")
    codes = cut.group.all_gather(codes.contiguous()).view(-1)[: math.prod(where.data_shape)].view(where.data_shape)
    return QuantizedTensor(cut.fmt, cut.shape, dtype, rowwise=Plane(codes, scale_inv, global_scale_inv))


# Ops, so that compilers need not see how slices are planned.


def _plan(shard: Tensor, fmt: str, shape: Sequence[int], start: int) -> FlatPlan:
    known = as_format(fmt, "gathered_weight")
    return flat_plan((FlatSlice(tuple(shape), known, dtype_name(shard.dtype), start),), shard.device)


@torch.library.custom_op("qshard::amaxes_of_shard", mutates_args=())
def _amaxes(shard: Tensor, fmt: str, shape: Sequence[int], start: int) -> Tensor:
    """What rows of a weight know of its amaxes."""
    return _plan(shard, fmt, shape, start).amaxes([shard.reshape(-1)])


@_amaxes.register_fake
def _(shard: Tensor, fmt: str, shape: Sequence[int], start: int) -> Tensor:
    return shard.new_empty(_plan(shard, fmt, shape, 0).plan.amaxes, dtype=torch.float32)


@torch.library.custom_op("qshard::codes_of_shard", mutates_args=())
def _codes(shard: Tensor, amaxes: Tensor, fmt: str, shape: Sequence[int], start: int, longest: int) -> list[Tensor]:
    """Rows of a weight cast with the scales of its amaxes, padded to `longest`, and what is stored of those scales."""
    flat = _plan(shard, fmt, shape, start)
    (bucket,), (made,) = flat.plan.buckets, flat.scales(amaxes)
    (scales,) = bucket.split_scales(made)
    per_byte = bucket.fmt.element.codes_per_byte
    width = shape[1] // per_byte
    room = torch.zeros(longest * width + per_byte - 1, dtype=torch.uint8, device=shard.device)
    flat.cast([room], [shard.reshape(-1)], [made.scale], pieces=True)
    stored = [part.clone() for part in scales[1:] if part is not None]
    return [room[: longest * width].view(longest, width).clone(), *stored]


@_codes.register_fake
def _(shard: Tensor, amaxes: Tensor, fmt: str, shape: Sequence[int], start: int, longest: int) -> list[Tensor]:
    known = as_format(fmt, "gathered_weight")
    where = plane(known, tuple(shape), Usage.ROWWISE, op="gathered_weight")
    made = [shard.new_empty((longest, shape[1] // known.element.codes_per_byte), dtype=torch.uint8)]
    made.append(shard.new_empty(where.scale_shape, dtype=getattr(torch, known.stored_scale_dtype)))
    if where.global_scale_shape is not None:
        made.append(shard.new_empty(where.global_scale_shape, dtype=torch.float32))
    return made
