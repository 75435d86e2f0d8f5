"""Operands of grouped products: planes of all experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qshard._core import quantize_steps
from qshard._core.quantize_steps import Plane
from qshard.formats import Format, Usage
from qshard.gemm_dispatch import UNIT
from qshard.layout import is_transposed
from qshard.torch_bridge._ops.bind import ops
from qshard.torch_bridge._ops.eager import are_plain, is_compiling
from qshard.torch_bridge._ops.flat_plan import adjacent_view
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
            one = torch.ones((), dtype=torch.float32, device=parts.data.device)
            parts = parts._replace(**{"scale_inv" if self.format.per_tensor else "global_scale_inv": one})
        values: Tensor = quantize_steps.dequantize(ops, parts, self.format, self.usage, dtype)
        return values


class OperandList(NamedTuple):
    """One plane of all weights, in separate memory for each expert, as FSDP2 gathers them. `parts` has lists."""

    format: Format
    usage: Usage
    parts: Plane

    @property
    def each(self) -> list[Operand]:
        """The plane of each expert."""
        planes = zip(*(part or [None] * len(self.parts.data) for part in self.parts), strict=True)
        return [Operand(self.format, Plane(*parts), self.usage) for parts in planes]

    def stacked(self) -> GroupedOperand:
        """Stack the planes as `[E, ...]`."""
        parts = [None if part is None else stack_tensors(part) for part in self.parts]
        return GroupedOperand(self.format, self.usage, Plane(*parts))

    def transposed(self) -> GroupedOperand:
        """Transpose the rowwise planes into columnwise planes `[E, ...]`, in one launch each for codes and scales.

        Codes of NVFP4, which share bytes, are stacked first.
        """
        assert self.format.shares_codes
        data, scales, global_scales = self.parts
        if global_scales is not None:
            whole = self.stacked()
            parts = quantize_steps.transpose_plane(BatchedOps(), whole.parts, self.format)
            return whole._replace(usage=Usage.COLUMNWISE, parts=parts)
        assert self.format.element.codes_per_byte == 1
        scales_t = torch.stack(scales) if self.format.per_tensor else _stack_transposed(scales)
        return GroupedOperand(self.format, Usage.COLUMNWISE, Plane(_stack_transposed(data), scales_t))

    def is_addressable(self) -> bool:
        """Return True if products can read the codes of each expert where they are, without a copy."""
        data = self.parts.data
        if not are_plain(*data):
            return False
        # Also on a CPU, although only a GPU needs it: one rule. Not a generator: every call runs this.
        return all([codes.is_contiguous() and codes.data_ptr() % UNIT == 0 for codes in data])  # noqa: C419


def _stack_transposed(matrices: Sequence[Tensor]) -> Tensor:
    """Transpose matrices `[rows, columns]` into one `[E, columns, rows]`."""
    first = matrices[0]
    if is_compiling():  # Inductor may return new memory for a result of an op in place.
        return torch.stack([*matrices]).transpose(1, 2).contiguous()
    stacked: Tensor = ops.transpose_stack(first.new_empty((len(matrices), *first.shape[::-1])), matrices)
    return stacked


def stack_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Stack tensors: a view if they lie one after the other in one storage, as codes in a unit of ZeRO, else a copy."""
    whole = None
    if are_plain(*tensors) and all(tensor.is_contiguous() for tensor in tensors):
        whole = adjacent_view(tensors)
    return torch.stack([*tensors]) if whole is None else whole.view(len(tensors), *tensors[0].shape)


def contracts_last_axis(w: GroupedOperand, contracted: Usage) -> bool:
    """Return True if a product that contracts an axis of the weights contracts the last one of the stored plane."""
    return (contracted is Usage.ROWWISE) != is_transposed(w.format, w.usage)


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
