"""Operands of grouped products: planes of all experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qshard._core import quantize_steps
from qshard._core.quantize_steps import Plane
from qshard.formats import Format, Usage
from qshard.layout import is_transposed
from qshard.torch_bridge._ops.bind import ops
from qshard.torch_bridge._ops.eager import are_plain
from qshard.torch_bridge._quantized.gemm import Operand


class GroupedOperand(NamedTuple):
    """One operand of the grouped products: a plane of all padded rows, or of all weights as `[E, ...]`.

    Formats with a per-tensor scale have one for each expert in `parts`, fp32 `[E]`.
    """

    format: Format
    usage: Usage
    parts: Plane

    @property
    def expert_scale(self) -> Tensor | None:
        """The per-tensor scale of each expert, fp32 `[E]`; None if the format has none."""
        if self.format.per_tensor:
            scales: Tensor = self.parts.scale_inv
            return scales
        return self.parts.global_scale_inv if self.format.tensor_scaled else None

    def values(self, dtype: torch.dtype) -> Tensor:
        """Dequantize without the per-tensor scales of experts, which is exact in bfloat16."""
        parts = self.parts
        if self.format.tensor_scaled:
            one = torch.ones((), device=parts.data.device)
            parts = parts._replace(**{"scale_inv" if self.format.per_tensor else "global_scale_inv": one})
        values: Tensor = quantize_steps.dequantize(ops, parts, self.format, self.usage, dtype)
        return values


def stack_weights(weights: Sequence[Operand]) -> GroupedOperand:
    """Stack the planes of all weights as `[E, ...]`."""
    parts = [None if part[0] is None else stack_tensors(part) for part in zip(*(w.parts for w in weights), strict=True)]
    return GroupedOperand(weights[0].format, weights[0].usage, Plane(*parts))


def stack_transposed(weights: Sequence[Operand]) -> GroupedOperand:
    """Transpose the rowwise planes of all weights into columnwise planes `[E, ...]`, in one launch."""
    parts, fmt = [weight.parts for weight in weights], weights[0].format
    assert fmt.transposes
    assert fmt.element.codes_per_byte == 1

    def room(of: Sequence[Tensor]) -> Tensor:
        return of[0].new_empty((len(of), *of[0].shape[::-1]))

    data, scales = [own.data for own in parts], [own.scale_inv for own in parts]
    if fmt.per_tensor:
        data_t, scales_t = room(data), stack_tensors(scales)
        ops.transpose_each(data, [*data_t.unbind()])
    else:
        data_t, scales_t = room(data), room(scales)
        ops.transpose_each([*data, *scales], [*data_t.unbind(), *scales_t.unbind()])
    return GroupedOperand(fmt, Usage.COLUMNWISE, Plane(data_t, scales_t))


def stack_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Stack tensors: a view if they lie one after the other in one storage, as codes in a unit of ZeRO, else a copy."""
    first = tensors[0]
    if not are_plain(*tensors) or not all(tensor.is_contiguous() for tensor in tensors):
        return torch.stack([*tensors])
    size, begin, storage = first.numel(), first.storage_offset(), first.untyped_storage().data_ptr()
    for i, tensor in enumerate(tensors):
        if tensor.untyped_storage().data_ptr() != storage or tensor.storage_offset() != begin + i * size:
            return torch.stack([*tensors])
    return first.as_strided((len(tensors), *first.shape), (size, *first.stride()))


def contracts_last_axis(w: GroupedOperand, contracted: Usage) -> bool:
    """Return True if a product that contracts an axis of the weights contracts the last one of the stored plane."""
    return contracted is Usage.ROWWISE or (w.usage is contracted and is_transposed(w.format, w.usage))


def product_scale(a: GroupedOperand, b: GroupedOperand) -> Tensor | None:
    scales = [side.expert_scale for side in (a, b) if side.expert_scale is not None]
    return scales[0] * scales[1] if len(scales) == 2 else scales[0] if scales else None


class BatchedOps:
    """`ops` that treat the first axis as a batch of matrices instead of as rows."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        op, axis = getattr(ops, name), _BATCH_AXIS.get(name)

        def run(*operands: Any, outer: int = 0, **attributes: Any) -> Any:
            if axis is not None:
                attributes[axis] = max(1, attributes.get(axis, 0))
            return op(*operands, **attributes)

        return run


_BATCH_AXIS = {
    "amax_tensor": "lead",
    "cast_delayed": "lead",
    "cast_transpose": "batch",
    "cast_transpose_delayed": "batch",
    "transpose": "batch",
}
"""Ops that have an attribute for the number of batch axes, and its name."""
