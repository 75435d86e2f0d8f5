"""`gathered_weight`: differentiable all-gather of a row-sharded weight as codes, without FSDP2's hooks.

For parametrizations in the manner of SimpleFSDP, which shard parameters as DTensors and gather them in a property.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from qshard._core.operands import two_formats_error
from qshard._core.validation import quote
from qshard.torch_bridge._distributed.dtensor import local_of
from qshard.torch_bridge._fsdp.code_gather import gather_codes, row_shard_plan
from qshard.torch_bridge._fsdp.shard_plan import ShardPlan
from qshard.torch_bridge._fsdp.weight import ShardedWeight
from qshard.torch_bridge._ops.autograd_node import Node, apply_node
from qshard.torch_bridge._ops.bind import dtype_name
from qshard.torch_bridge._ops.collectives import reduce_scatter
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
      NotImplementedError: `weight` is not sharded by rows over one axis of its mesh, or is a stack of experts.
      ValueError: `reduce_op` is neither "sum" nor "avg".

    Collective: a max-reduction of the amaxes that shards share, 4 bytes a scale, then an all-gather of codes, 1 or 1/2
    byte an element, and of the scales of blocks that no boundary splits. Under `DelayedScaling` the scales come from
    earlier steps, and the amax of the local shard is recorded for the next update.

    Under `torch.compile` the call breaks the graph, so `fullgraph=True` fails.

    >>> import torch.distributed as dist
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> from torch.distributed.tensor import Shard, distribute_tensor
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
    if weight.ndim > 2:
        raise NotImplementedError(
            f"gathered_weight: {local.scale_state.name} {tuple(weight.shape)} is a stack of experts, which only "
            "fully_shard gathers as codes; call redistribute to gather its values, or shard the layer with fully_shard"
        )
    for name, dtype in (("param_dtype", param_dtype), ("reduce_dtype", reduce_dtype)):
        if dtype is not None:
            check_dtype("gathered_weight", name, dtype)
    if reduce_op not in ("sum", "avg"):
        raise ValueError(f"gathered_weight: reduce_op ({quote(reduce_op)}) is not 'sum' or 'avg'; pass one of these")
    if not local.scale_state.has_one_format:
        raise two_formats_error("gathered_weight", local.scale_state.name)
    fmt = local.scale_state.fmt
    if fmt is None:
        raise ValueError(
            f"gathered_weight: {local.scale_state.name} has no recipe since switch_recipe(model, None); call "
            "redistribute where is_converted is False"
        )
    plan = row_shard_plan("gathered_weight", weight, fmt)
    if plan is None or plan.part is not None:
        raise NotImplementedError(
            f"gathered_weight: {local.scale_state.name} {tuple(weight.shape)} (placements {weight.placements}) is not "
            "sharded by rows over one mesh axis; use Shard(0) on one axis and Replicate() on the others"
        )
    dtype = weight.dtype if param_dtype is None else param_dtype
    # The backward pass returns a gradient that is sharded like the weight.
    shard = weight.to_local(grad_placements=weight.placements)
    mesh = weight.device_mesh
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    replicas = [each for each in groups if plan.group is None or each.group_name != plan.group.group_name]
    ranks = mesh.size() if reduce_op == "avg" else 1
    whole: QuantizedTensor = apply_node(_Gather, shard, weight, plan, dtype, reduce_dtype or dtype, replicas, ranks)
    return whole


def is_converted(weight: Any) -> bool:
    """Return True if `weight` is a weight of a `Linear` with a recipe: high precision at rest, gathered as codes.

    Args:
      weight: any object; for a sharded parameter, the DTensor.

    Returns:
      True for the weight of a layer that `convert` has replaced, whole or sharded by FSDP2 or `distribute_tensor`.
      False for biases, weights of other layers, stacks of experts and anything that is not a tensor.

    >>> from qshard.torch_bridge import convert
    >>> layer = convert(torch.nn.Linear(32, 16), "CurrentScaling")
    >>> is_converted(layer.weight), is_converted(layer.bias)
    (True, False)
    """
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        return False
    local = local_of(weight)
    return isinstance(local, ShardedWeight) and local.scale_state.fmt is not None


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


class _Gather(Node):
    """Autograd node: all-gather of codes in forward, reduce-scatter of the gradient in backward."""

    op, degree = "gathered_weight", 1
    instead = "exclude the layer with convert(filter=)"

    @staticmethod
    def forward(
        ctx: Any,
        shard: Tensor,
        weight: DTensor,
        plan: ShardPlan,
        dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        replicas: Sequence[dist.ProcessGroup],
        ranks: int,
    ) -> tuple[QuantizedTensor, tuple[Tensor, ...]]:
        """Gather the codes. The gradient is summed over shards and `replicas`, and divided by `ranks`."""
        ctx.plan, ctx.reduce_dtype, ctx.replicas, ctx.ranks = plan, reduce_dtype, replicas, ranks
        ctx.shard_shape, ctx.dtype = shard.shape, shard.dtype
        codes = gather_codes(weight, plan, observe=True)
        return QuantizedTensor(plan.fmt, plan.shape, dtype, rowwise=codes), ()

    @staticmethod
    def gradients(ctx: Any, saved: list[Tensor], grad: Tensor) -> tuple[Tensor | None, ...]:
        plan: ShardPlan = ctx.plan
        whole = grad.to(ctx.reduce_dtype, copy=plan.group is None)  # Replicas are summed in place.
        if plan.group is not None:
            longest = plan.padded_shape[0]
            missing = longest * plan.group.size() - whole.shape[0]
            padded = torch.nn.functional.pad(whole, (0, 0, 0, missing)).contiguous()
            whole = padded.new_empty((longest, whole.shape[1]))
            reduce_scatter(whole, padded, group=plan.group)
            whole = whole[: ctx.shard_shape[0]]
        whole = whole.contiguous()
        for group in ctx.replicas:
            dist.all_reduce(whole, group=group)
        return (whole / ctx.ranks if ctx.ranks > 1 else whole).to(ctx.dtype), *(None,) * 6
