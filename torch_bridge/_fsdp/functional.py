"""All-gather of a row-sharded weight as codes, with functional collectives instead of FSDP2's hooks.

For parametrizations in the manner of SimpleFSDP, which shard parameters as DTensors and gather them in a property, and
for exports, which read whole weights outside a forward.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from qshard._core.flat_shards import FlatSlice
from qshard._core.operands import quantize_operand
from qshard._core.quantize_steps import Plane
from qshard._core.validation import quote
from qshard.formats import Usage
from qshard.layout import plane
from qshard.torch_bridge._distributed.dtensor import local_of
from qshard.torch_bridge._fsdp.weight import ShardedWeight, memory_of
from qshard.torch_bridge._ops.autograd_node import Node, apply_node
from qshard.torch_bridge._ops.bind import dtype_name, ops
from qshard.torch_bridge._ops.foreach import flat_plan
from qshard.torch_bridge._quantized.tensor import QuantizedTensor
from qshard.torch_bridge._quantized.validation import check_dtype


# Dynamo of torch 2.13 makes a format a graph constant only if it comes with a graph input.
@torch.compiler.disable
def gathered_weight(
    weight: Tensor,
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    reduce_op: str = "sum",
) -> QuantizedTensor:
    """All-gather a row-sharded weight as codes, for the products of `Linear`.

    It replaces `weight.redistribute(placements=[Replicate()]).to_local(...)`, which gathers in high precision. The
    forward of a parametrization, as SimpleFSDP registers it, becomes:

        def forward(self, x):
            return gathered_weight(x) if is_converted(x) else x.redistribute(...).to_local(...)

    Args:
      weight: the DTensor parameter of a converted `Linear`, `[N, K]`, that `distribute_tensor` or `fully_shard` has
        sharded by rows over one axis of its mesh. It may be replicated over the other axes. Shard boundaries may split
        blocks.
      param_dtype: dtype of the returned tensor, and of the gradient that it receives; by default the dtype of `weight`.
      reduce_dtype: dtype of the gradient reduction over ranks; by default `param_dtype`.
      reduce_op: "sum" or "avg", how gradients of ranks are reduced.

    Returns:
      The whole weight as a `QuantizedTensor` `[N, K]` with a rowwise plane: bit for bit the codes and scales of
      `quantize` of the whole weight. In backward its gradient is reduce-scattered over the shards, and all-reduced over
      replicas.

    Raises:
      TypeError: `weight` is not a converted weight or not a DTensor, or an argument has a wrong type.
      NotImplementedError: `weight` is not sharded by rows over one axis of its mesh.
      ValueError: `reduce_op` is neither "sum" nor "avg".

    Collective: a max-reduction of amaxes, 4 bytes a scale, then an all-gather of codes, 1 or 1/2 byte an element. Under
    `DelayedScaling` the scales come from earlier steps, and the amax of the local shard is recorded for the next
    update.

    Under `torch.compile` the call breaks the graph, so `fullgraph=True` fails.

    >>> import torch.distributed as dist
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> from torch.distributed.tensor import distribute_tensor
    >>> from qshard.torch_bridge import convert
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> layer = convert(torch.nn.Linear(32, 16), "CurrentScaling")
    >>> weight = torch.nn.Parameter(distribute_tensor(layer.weight, init_device_mesh("cpu", (1,)), [Shard(0)]))
    >>> gathered_weight(weight)
    QuantizedTensor(FP8_E4M3[nonfinite=nan], shape=(16, 32), dtype=torch.float32, device=cpu)
    >>> dist.destroy_process_group()
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
    sharding = weight_sharding_of(weight)
    if sharding is None:
        raise NotImplementedError(
            f"gathered_weight: {local.scale_state.name} {tuple(weight.shape)} (placements {weight.placements}) is not "
            "sharded by rows over one mesh axis; use Shard(0) on one axis and Replicate() on the others"
        )
    dtype = weight.dtype if param_dtype is None else param_dtype
    # The backward pass returns a gradient that is sharded like the weight.
    shard = weight.to_local(grad_placements=weight.placements)
    whole: QuantizedTensor = apply_node(_Gather, shard, local, sharding, dtype, reduce_dtype or dtype, reduce_op)
    return whole


def is_converted(weight: Any) -> bool:
    """Return True if `weight` is a quantized weight of a `Linear`: high precision at rest, gathered as codes.

    Args:
      weight: any object; for a sharded parameter, the DTensor.

    Returns:
      True for the weight of a layer that `convert` has replaced, whole or sharded by FSDP2 or `distribute_tensor`.
      False for biases, weights of other layers and anything that is not a tensor.

    >>> from qshard.torch_bridge import convert
    >>> layer = convert(torch.nn.Linear(32, 16), "CurrentScaling")
    >>> is_converted(layer.weight), is_converted(layer.bias)
    (True, False)
    """
    return isinstance(local_of(weight), ShardedWeight) if isinstance(weight, Tensor) else False


@torch.compiler.assume_constant_result
def warn_of_late_quantization(weight: Tensor) -> None:
    """Warn that a weight was gathered in high precision and is quantized only afterwards.

    The result is right, but the all-gather sends 2 or 4 bytes an element. Compiled programs warn once, while tracing.
    """
    warnings.warn(
        f"Linear: weight {tuple(weight.shape)} was gathered in {dtype_name(weight.dtype)}, {weight.itemsize} bytes per "
        "element, before it is quantized; use gathered_weight for the gather, such as in the parametrization",
        RuntimeWarning,
        stacklevel=2,
    )


class WeightSharding(NamedTuple):
    """Sharding of a weight by rows over the ranks of `group`: the local rows as a flat slice, and the longest shard.

    `replicas` has one group for each other mesh axis: ranks with the same rows.
    """

    slice: FlatSlice
    longest: int
    group: _Group
    replicas: tuple[_Group, ...]


class _Group(NamedTuple):
    """A process group by name, with the functional collectives that DTensor calls; a group of one rank calls none."""

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


def weight_sharding_of(weight: DTensor) -> WeightSharding | None:
    """Return the row sharding of a weight; None if it is not sharded by rows over one axis of its mesh."""
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
    local: Any = local_of(weight)
    own = FlatSlice((rows, columns), local.scale_state.fmt, dtype_name(memory_of(local).dtype), first * columns)
    return WeightSharding(own, longest, group, replicas)


class _Gather(Node):
    """Autograd node: all-gather of codes in forward, reduce-scatter of the gradient in backward."""

    op, degree = "gathered_weight", 1
    instead = "exclude the layer with convert(filter=)"

    @staticmethod
    def forward(
        ctx: Any,
        shard: Tensor,
        local: ShardedWeight,
        sharding: WeightSharding,
        dtype: torch.dtype,
        reduce_dtype: Any,
        reduce_op: str,
    ) -> tuple[QuantizedTensor, tuple[Tensor, ...]]:
        ctx.sharding, ctx.reduce_dtype, ctx.reduce_op = sharding, reduce_dtype, reduce_op
        ctx.shard_shape, ctx.dtype = shard.shape, shard.dtype
        return gather(local, sharding, dtype, observe=True), ()

    @staticmethod
    def gradients(ctx: Any, saved: list[Tensor], grad: Tensor) -> tuple[Tensor | None, ...]:
        sharding = ctx.sharding
        missing = sharding.longest * sharding.group.size - sharding.slice.shape[0]
        shard_grad = torch.nn.functional.pad(grad.to(ctx.reduce_dtype), (0, 0, 0, missing)).contiguous()
        shard_grad = sharding.group.reduce_scatter(shard_grad)[: ctx.shard_shape[0]]
        for group in sharding.replicas:
            shard_grad = group.all_reduce(shard_grad.contiguous(), "sum")
        if ctx.reduce_op == "avg":
            shard_grad = shard_grad / math.prod(group.size for group in (sharding.group, *sharding.replicas))
        return shard_grad.to(ctx.dtype), None, None, None, None, None


@torch.no_grad()
def gather(local: ShardedWeight, sharding: WeightSharding, dtype: torch.dtype, *, observe: bool) -> QuantizedTensor:
    """All-gather the whole weight as codes. Collective. `observe` records the amax of the shard for delayed scaling."""
    state, shard = local.scale_state, memory_of(local)
    fmt, shape = sharding.slice.fmt, sharding.slice.shape
    if state.delayed is not None:
        delayed, scale = state.delayed, state.delayed.scale
        if not delayed.knows_scale():  # The first scale needs the amax of the whole weight.
            own = ops.amax_tensor(shard, lead=0)
            scale, _ = delayed.scales_under(sharding.group.all_reduce(own.view(torch.int32), "max").view(torch.float32))
        planes, amax = quantize_operand(ops, shard, state.operand, scale=scale)
        if observe and amax is not None:
            delayed.observe(amax)
        codes, scale_inv, global_scale_inv = planes[Usage.ROWWISE]
        codes = torch.nn.functional.pad(codes, (0, 0, 0, sharding.longest - codes.shape[0]))
    else:
        flat = flat_plan((sharding.slice,), shard.device)
        bits = flat.amaxes([shard.reshape(-1)]).view(torch.int32)
        (scales,) = flat.scales(sharding.group.all_reduce(bits, "max").view(torch.float32))  # As in `max_over_ranks`.
        ((_, scale_inv, global_scale_inv),) = flat.plan.buckets[0].split_scales(scales)
        per_byte = fmt.element.codes_per_byte
        width = shape[1] // per_byte
        buffer = torch.zeros(sharding.longest * width + per_byte - 1, dtype=torch.uint8, device=shard.device)
        flat.cast([buffer], [shard.reshape(-1)], [scales.scale], pieces=True)
        codes = buffer[: sharding.longest * width]
    where = plane(fmt, shape, Usage.ROWWISE, op="gathered_weight")
    codes = sharding.group.all_gather(codes.contiguous()).view(-1)[: math.prod(where.data_shape)].view(where.data_shape)
    return QuantizedTensor(fmt, shape, dtype, rowwise=Plane(codes, scale_inv, global_scale_inv))
