"""Grouped products of experts: rows by the weights of their experts, and contracted rows by expert.

`qshard.gemm_dispatch` has the rules, as for `linear`. One op multiplies all experts on a CPU, and on a GPU where
cuBLASLt has grouped products: on Hopper FP8 codes with one scale for each expert or in blocks of 128, otherwise
dequantized values in bfloat16 (float32 on a CPU); on Blackwell codes of MXFP8 and NVFP4. In all other cases
`fallback.py` multiplies.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor

from qshard import gemm_dispatch
from qshard._core import quantize_steps
from qshard.formats import Format, Usage
from qshard.gemm_dispatch import Kind, Sizes
from qshard.layout import is_transposed
from qshard.torch_bridge._experts import fallback
from qshard.torch_bridge._experts.operands import (
    BatchedOps,
    GroupedOperand,
    OperandList,
    contracts_last_axis,
    product_scale,
)
from qshard.torch_bridge._experts.tiles import Tiles
from qshard.torch_bridge._ops.bind import ops
from qshard.torch_bridge._quantized.gemm import grouped_runs_on


def multiplies_codes(a: Format, b: Format, device: torch.device) -> bool:
    """Return True if grouped products of these formats read codes, so that the weight is transposed for dgrad."""
    kind = gemm_dispatch.grouped_kind_of(a, b)
    return kind is not None and grouped_runs_on(kind, device)


def host_stops(sizes: Sequence[int] | None, tile_rows: int) -> tuple[int, ...] | None:
    """Return the stops of padded rows, if the host knows the group sizes."""
    if sizes is None:
        return None
    return tuple(itertools.accumulate(max(1, -(-size // tile_rows)) * tile_rows for size in sizes))


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
    """Multiply each row by the weight of its expert: `[T, columns]`, in the rows that `tiles.gather` returns.

    Rows of no expert are zeros. `x` is a rowwise plane of the padded rows, and `tiles` have the rows of the result. The
    product contracts K of the weights if `contracted` is `ROWWISE`, N if it is `COLUMNWISE`. `w` is the plane that it
    reads, or the plane to transpose for it, of all weights or of each. `fast` is as for `matmul`. `host_stops` are the
    stops, if the host knows them.
    """
    rows, per_byte = x.parts.data.shape[0], x.format.element.codes_per_byte
    device, sizes = x.parts.data.device, (rows, columns, x.parts.data.shape[1] * per_byte)
    kind = gemm_dispatch.grouped_kind_of(x.format, w.format)
    experts = tiles.stops.shape[0]
    in_order = gemm_dispatch.contracts_last(w.format, contracted)
    if kind is not None and in_order and _takes(kind, sizes, tiles.tile_rows, device):
        how: dict[str, Any] = {"dtype": dtype, "fast": fast}
        how["workspace"] = _workspace(device, experts, sizes, x.format, w.format)
        # With one scale for each expert, the product writes sorted rows without padding, and no pass gathers them.
        is_sorted = tiles.ends is not None and tiles.place is not None and tiles.place.ndim == 1
        if unpads := kind == "tensors" and is_sorted:
            how |= {"ends": tiles.ends, "tokens": cast(Tensor, tiles.place).shape[0]}
        # NVFP4 has no op on lists: its codes, half a byte for each weight, are copied next to each other.
        if isinstance(w, OperandList) and w.usage is contracted and kind != "nvfp4" and w.is_addressable():
            y = _list_product(x, w, tiles.stops, columns, **how)
        else:
            stacked = _contracting(w, contracted)
            y = gemm_dispatch.multiply_grouped(ops, x.parts, x.format, stacked.parts, w.format, tiles.stops, **how)
        return y if unpads else tiles.gather(y)
    if not _takes("values", sizes, tiles.tile_rows, device):
        y = fallback.row_product(x, w, contracted, tiles, host_stops, columns, dtype, fast=fast)
        return tiles.gather(y)
    w = w if isinstance(w, GroupedOperand) else w.stacked()
    # Weights are stored as [E, N, K] or transposed.
    layout: Literal["nt", "nn"] = "nt" if contracts_last_axis(w, contracted) else "nn"
    size = _workspace(device, experts, sizes)
    kinds = _value_dtypes(device, dtype)
    y = gemm_dispatch.multiply_grouped_values(
        ops, x.values(kinds[0]), w.values(kinds[0]), tiles.stops, layout=layout, dtype=kinds[1], workspace=size
    )
    if (scale := product_scale(x, w)) is not None:
        tiles.scale_rows(y, scale)
    return tiles.gather(y.to(dtype))


def expert_products(
    dy: GroupedOperand,
    x: GroupedOperand,
    tiles: Tiles,
    host_stops: Sequence[int] | None,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
) -> Tensor:
    """Compute all weight gradients, `shape` `[E, N, K]`, from columnwise planes of padded rows.

    Other arguments as in `row_product`.
    """
    device, sizes = dy.parts.data.device, (*shape[1:], tiles.rows.shape[0])
    kind, experts = gemm_dispatch.grouped_kind_of(dy.format, x.format, by_k=True), shape[0]
    if kind is not None and _takes(kind, sizes, tiles.tile_rows, device, by_k=True):
        size = _workspace(device, experts, sizes, dy.format, x.format, by_k=True)
        dw: Tensor = gemm_dispatch.multiply_grouped_k(
            ops, dy.parts, dy.format, x.parts, x.format, tiles.stops, dtype=dtype, workspace=size
        )
        return dw
    if not _takes("values", sizes, tiles.tile_rows, device, by_k=True):
        return fallback.expert_products(dy, x, tiles, host_stops, shape, dtype)
    size = _workspace(device, experts, sizes, by_k=True)
    kinds = _value_dtypes(device, dtype)
    a, b = (
        side.values(kinds[0]).t().contiguous() if is_transposed(side.format, side.usage) else side.values(kinds[0])
        for side in (dy, x)
    )
    dw = gemm_dispatch.multiply_grouped_values(ops, a, b, tiles.stops, layout="tn", dtype=kinds[1], workspace=size)
    if (scale := product_scale(dy, x)) is not None:
        dw.mul_(scale[:, None, None])
    return dw.to(dtype)


def sums_by_expert(grad: Tensor, tiles: Tiles) -> Tensor:
    """Sum sorted rows of each expert, `[T, N]` to `[E, N]`, in float32: a product that contracts rows with ones."""
    assert tiles.ends is not None
    device, experts = grad.device, tiles.ends.shape[0]
    sizes = (gemm_dispatch.UNIT, grad.shape[1], grad.shape[0])
    if (device.type != "cpu" and grad.dtype == torch.float32) or not _takes("values", sizes, 1, device, by_k=True):
        return fallback.sums_by_expert(grad, tiles)
    ones, size = grad.new_ones((grad.shape[0], sizes[0])), _workspace(device, experts, sizes, by_k=True)
    sums: Tensor = gemm_dispatch.multiply_grouped_values(
        ops, ones, grad.contiguous(), tiles.ends, layout="tn", dtype=torch.float32, workspace=size
    )
    return sums[:, 0]


def _list_product(
    x: GroupedOperand,
    w: OperandList,
    stops: Tensor,
    columns: int,
    *,
    dtype: torch.dtype,
    fast: bool,
    workspace: int,
    ends: Tensor | None = None,
    tokens: int | None = None,
) -> Tensor:
    """Multiply the codes of rows by the codes of each expert where they are. Only scales are stacked: they are few."""
    data, scales = x.parts.data, torch.stack(w.parts.scale_inv)
    out: Tensor = data.new_empty((data.shape[0] if tokens is None else tokens, columns), dtype=dtype)
    buffers = out, data.new_empty(workspace, dtype=torch.uint8)
    how = gemm_dispatch.grouped_options(x.format, w.format, fast)
    operands = data, x.parts.scale_inv, scales, stops
    if w.format.per_tensor:
        ops.gemm_grouped_list(*operands, stops if ends is None else ends, *buffers, w.parts.data, **how)
    else:
        how["b_rows"] = w.format.block_shape()[0]
        ops.gemm_grouped_block_list(*operands, *buffers, w.parts.data, **how)
    return out


def _contracting(w: GroupedOperand | OperandList, contracted: Usage) -> GroupedOperand:
    """Return the plane of all weights that a product contracts, transposed if it is not there."""
    if isinstance(w, OperandList):
        return w.stacked() if w.usage is contracted else w.transposed()
    if w.usage is contracted:
        return w
    return w._replace(usage=contracted, parts=quantize_steps.transpose_plane(BatchedOps(), w.parts, w.format))


def _takes(kind: Kind, sizes: Sizes, tile_rows: int, device: torch.device, *, by_k: bool = False) -> bool:
    runs: bool = grouped_runs_on(kind, device)
    return runs and (device.type == "cpu" or gemm_dispatch.grouped_fits(kind, sizes, tile_rows, by_k=by_k))


def _value_dtypes(device: torch.device, dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of dequantized operands and of their product."""
    if device.type == "cpu":
        return torch.float32, torch.float32
    return torch.bfloat16, torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def _workspace(
    device: torch.device,
    experts: int,
    sizes: Sizes,
    a: Format | None = None,
    b: Format | None = None,
    *,
    by_k: bool = False,
) -> int:
    return 0 if device.type == "cpu" else gemm_dispatch.grouped_workspace_size(experts, sizes, a, b, by_k=by_k)
