"""Products of experts on a GPU with a cuBLASLt that has no grouped products.

If the host knows the group sizes, each expert is a GEMM call of its own, as in `linear`. Otherwise PyTorch multiplies
all experts in one call: E4M3 codes with one scale on Hopper, if the result is bfloat16, else bfloat16 values.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from qshard._core import quantize_steps
from qshard._core.quantize_steps import Plane
from qshard.formats import E4M3, Usage
from qshard.layout import is_transposed, multiplies_codes
from qshard.torch_bridge._experts.operands import (
    BatchedOps,
    GroupedOperand,
    OperandList,
    contracts_last_axis,
    product_scale,
)
from qshard.torch_bridge._experts.tiles import Tiles
from qshard.torch_bridge._quantized.gemm import Operand, matmul_into
from qshard.torch_bridge._quantized.plane_programs import transpose


def row_product(
    x: GroupedOperand,
    w: GroupedOperand | OperandList,
    contracted: Usage,
    tiles: Tiles,
    host_stops: Sequence[int] | None,
    columns: int,
    dtype: torch.dtype,
    *,
    fast: bool,
) -> Tensor:
    """Compute `products.row_product`."""
    rows = x.parts.data.shape[0]
    if host_stops is not None:
        y = torch.empty((rows, columns), dtype=dtype, device=x.parts.data.device)
        y[-1].zero_()
        weights = _of_experts(w) if isinstance(w, GroupedOperand) else w.each
        for own, weight, start, stop in zip(
            _of_experts(x, host_stops), weights, (0, *host_stops[:-1]), host_stops, strict=True
        ):
            if weight.usage is not contracted:
                weight = Operand(weight.format, transpose(weight.parts, weight.format), contracted)
            matmul_into(own, weight, y[start:stop], fast=fast)
        return y
    w = w if isinstance(w, GroupedOperand) else w.stacked()
    if _takes_codes(x, w, dtype):
        if w.usage is not contracted:
            w = w._replace(usage=contracted, parts=quantize_steps.transpose_plane(BatchedOps(), w.parts, w.format))
        (a, b), of_x, of_w = _codes(x, w), cast(Tensor, x.expert_scale), cast(Tensor, w.expert_scale)
        of_rows = (
            torch.nn.functional.pad(of_x, (0, 1)).index_select(0, tiles.experts()).repeat_interleave(tiles.tile_rows)
        )
        of_columns = of_w[:, None].expand(-1, b.shape[1]).contiguous()
        y = torch._scaled_grouped_mm(
            a, b.transpose(1, 2), of_rows, of_columns, tiles.stops, out_dtype=dtype, use_fast_accum=fast
        )
    else:
        a, b = x.values(torch.bfloat16), w.values(torch.bfloat16)
        y = torch._grouped_mm(a, b.transpose(1, 2) if contracts_last_axis(w, contracted) else b, offs=tiles.stops)
        if (scale := product_scale(x, w)) is not None:
            tiles.scale_rows(y, scale)
    y[-1].zero_()
    return y.to(dtype)


def expert_products(
    dy: GroupedOperand,
    x: GroupedOperand,
    tiles: Tiles,
    host_stops: Sequence[int] | None,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
) -> Tensor:
    """Compute `products.expert_products`."""
    if host_stops is not None:
        dw = torch.empty(shape, dtype=dtype, device=dy.parts.data.device)
        for of_dy, of_x, out in zip(_of_experts(dy, host_stops), _of_experts(x, host_stops), dw, strict=True):
            matmul_into(of_dy, of_x, out)
        return dw
    if _takes_codes(dy, x, dtype):
        (a, b), scales = _codes(dy, x), (cast(Tensor, dy.expert_scale), cast(Tensor, x.expert_scale))
        of_rows, of_columns = (of.repeat_interleave(size) for of, size in zip(scales, shape[1:], strict=True))
        return torch._scaled_grouped_mm(a, b.t(), of_rows, of_columns, tiles.stops, out_dtype=dtype)
    a, b = (
        side.values(torch.bfloat16) if is_transposed(side.format, side.usage) else side.values(torch.bfloat16).t()
        for side in (dy, x)
    )
    dw = torch._grouped_mm(a, b.t(), offs=tiles.stops)
    if (scale := product_scale(dy, x)) is not None:
        dw.mul_(scale[:, None, None])
    return dw.to(dtype)


def sums_by_expert(grad: Tensor, tiles: Tiles) -> Tensor:
    """Compute `products.sums_by_expert`."""
    assert tiles.ends is not None
    row = torch.arange(grad.shape[0], dtype=torch.int32, device=grad.device)
    experts = torch.arange(tiles.ends.shape[0], device=grad.device)
    is_of = torch.searchsorted(tiles.ends, row, right=True) == experts[:, None]
    return torch.mm(is_of.to(grad.dtype), grad)


def _of_experts(side: GroupedOperand, stops: Sequence[int] | None = None) -> list[Operand]:
    """Split into one operand per expert: stacked weights, or the padded rows that end at `stops`."""
    parts, scale = side.parts, side.expert_scale
    name = "scale_inv" if side.format.per_tensor else "global_scale_inv"
    if scale is not None:
        parts = parts._replace(**{name: None})
    if stops is None:
        each = [itertools.repeat(None) if part is None else part.unbind() for part in parts]
        planes = [Plane(*own) for own in zip(*each, strict=False)]
    else:
        ends = itertools.pairwise((0, *stops))
        rows = [quantize_steps.plane_rows(parts, side.format, side.usage, *own) for own in ends]
        planes = [Plane(*(part if part is None else part.contiguous() for part in own)) for own in rows]
    if scale is not None:
        # Padded to one scale every 16 bytes. Otherwise cuBLASLt copies each to an aligned address.
        scales = torch.nn.functional.pad(scale[:, None], (0, 3))[:, 0].unbind()
        planes = [own._replace(**{name: one}) for own, one in zip(planes, scales, strict=True)]
    return [Operand(side.format, own, side.usage) for own in planes]


def _takes_codes(a: GroupedOperand, b: GroupedOperand, dtype: torch.dtype) -> bool:
    """Return True if `torch._scaled_grouped_mm` takes these codes: E4M3 on Hopper, with a bfloat16 result."""
    device = a.parts.data.device
    return (
        multiplies_codes(a.format, b.format)
        and {a.format.element.name, b.format.element.name} == {E4M3.name}
        and dtype == torch.bfloat16
        and device.type == "cuda"
        and torch.cuda.get_device_capability(device) == (9, 0)
    )


def _codes(*sides: GroupedOperand) -> list[Tensor]:
    return [side.parts.data.view(torch.float8_e4m3fn) for side in sides]
