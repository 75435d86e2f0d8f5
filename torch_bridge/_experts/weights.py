"""Quantized weights of experts: planes of all weights, for the forward and the backward pass.

Weights are one tensor `[E, N, K]` or one `[N, K]` for each expert, as values; or as FSDP2 and ZeRO gather them: one
`QuantizedStack`, or one `QuantizedTensor` for each expert. The number of launches does not grow with the number of
experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from qshard._core import quantize_steps
from qshard._core.flat_shards import FlatSlice
from qshard._core.operands import quantize_operand
from qshard._core.quantize_steps import Philox, Plane
from qshard.formats import Format, Usage
from qshard.layout import source
from qshard.recipes import Recipe, Role
from qshard.torch_bridge._experts.operands import BatchedOps, GroupedOperand, OperandList, stack_tensors
from qshard.torch_bridge._nn.operands import operand_spec, planes_of_weight, values_of
from qshard.torch_bridge._ops.bind import dtype_name
from qshard.torch_bridge._ops.eager import is_compiling
from qshard.torch_bridge._ops.flat_plan import flat_plan
from qshard.torch_bridge._ops.uint64 import xor_uint64
from qshard.torch_bridge._quantized.stack import QuantizedStack
from qshard.torch_bridge._quantized.tensor import QuantizedTensor, format_of


def gathered_weights(weights: Sequence[Tensor], usage: Usage) -> GroupedOperand | OperandList:
    """Return the plane of `usage` of the codes of all experts, or the other one to transpose; raise if neither."""
    if isinstance(weights[0], QuantizedStack):
        return _of_stack(weights[0], usage)
    codes = cast(Sequence[QuantizedTensor], weights)
    if usage is Usage.COLUMNWISE and (parts := QuantizedTensor.lists_of_parts(codes, usage)) is not None:
        return OperandList(format_of(codes[0]), usage, parts)
    rowwise = QuantizedTensor.lists_of_parts(codes, Usage.ROWWISE)
    if rowwise is None or (usage is Usage.COLUMNWISE and source(format_of(codes[0]), usage) is not Usage.ROWWISE):
        for weight in codes:
            planes_of_weight(weight, usage is Usage.COLUMNWISE)  # Raises for the first without the plane.
    assert rowwise is not None
    return OperandList(format_of(codes[0]), Usage.ROWWISE, rowwise)


def _of_stack(stack: QuantizedStack, usage: Usage) -> GroupedOperand:
    fmt, planes = format_of(stack), [(each, stack.parts(each)) for each in Usage.BOTH.planes]
    there = {each: parts for each, parts in planes if parts is not None}
    either = usage if usage in there or not fmt.shares_codes else next(iter(there))
    if either not in there:
        raise ValueError(f"grouped_linear: weights ({fmt}) have no plane {usage}, which the product reads; pass values")
    return GroupedOperand(fmt, either, there[either])


def quantize_weights(
    weights: Sequence[Tensor], recipe: Recipe, usage: Usage, *, seeds: Tensor | None, scale: Tensor | None
) -> tuple[dict[Usage, GroupedOperand], Tensor | None]:
    """Quantize the values of all weights: `weights` are one `[E, N, K]`, or one `[N, K]` for each expert.

    `seeds` and `scale`, and the second result, are as in `quantize_experts`.
    """
    fmt = recipe.weight
    if weights[0].ndim == 2 and scale is None and fmt.gather_refusal is None and not is_compiling():
        rowwise = _cast_list([values_of(weight) for weight in weights], fmt)
        planes = {Usage.ROWWISE: rowwise}
        if Usage.COLUMNWISE in usage:
            planes[Usage.COLUMNWISE] = quantize_steps.transpose_plane(BatchedOps(), rowwise, fmt)
        return {each: GroupedOperand(fmt, each, planes[each]) for each in usage.planes}, None
    each = [values_of(weight) for weight in weights]
    values = each[0] if each[0].ndim == 3 else stack_tensors(each)
    spec = operand_spec(recipe, Role.WEIGHT, usage)
    seeds = spec.seed_of(seeds, xor_uint64)
    philox = None if seeds is None else Philox(seeds, torch.zeros_like(seeds))
    planes, amax = quantize_operand(BatchedOps(), values.contiguous(), spec, scale=scale, philox=philox)
    return {each: GroupedOperand(fmt, each, planes[each]) for each in usage.planes}, amax


def _cast_list(values: Sequence[Tensor], fmt: Format) -> Plane:
    """Quantize separate weights rowwise in a constant number of launches, with the list ops of FSDP2 and ZeRO."""
    one = FlatSlice(tuple(values[0].shape), fmt, dtype_name(values[0].dtype))
    flat, whole = flat_plan((one,) * len(values), values[0].device), [value.reshape(-1) for value in values]
    (scales,) = flat.scales(flat.amaxes(whole))
    where = flat.plan.batches[0].planes[0]
    data = torch.empty((len(values), *where.data_shape), dtype=torch.uint8, device=values[0].device)
    flat.cast([*data.unbind()], whole, [scales.scale], pieces=False)
    return Plane(data, scales.scale_inv.view(len(values), *where.scale_shape), scales.global_scale_inv)
