"""Tiles of rows that are sorted by expert: their quantization and their products.

Each tile has rows of one expert, and as many rows (`unit`) as the tallest block of the recipe, at least 16. So blocks
end where the rows of an expert end. Zeros pad the last tile of an expert. Codes are therefore the same as if the rows
of each expert were quantized alone. The ops that quantize one matrix quantize the tiles of all experts in one launch.

Per-tensor formats and NVFP4 have a per-tensor scale for each expert (`expert_scale`).

The host does not know the group sizes, so there are as many tiles as any sizes could need. An expert without rows gets
one tile of zeros, so that its weight gradient is a sum of zeros. Unused tiles at the end belong to no expert.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from qshard._core import quantize_steps
from qshard._core.operands import OperandSpec, quantize_operand
from qshard._core.placement import Box
from qshard._core.quantize_steps import Plane
from qshard.formats import E4M3, Format, Usage
from qshard.layout import block_alignment, is_transposed, multiplies_codes
from qshard.recipes import Recipe
from qshard.torch_bridge._ops.bind import ops
from qshard.torch_bridge._ops.uint64 import xor_words
from qshard.torch_bridge._quantized.gemm import Operand, matmul_into
from qshard.torch_bridge._quantized.plane_programs import transpose

_LEAST_UNIT = 16
"""Minimum row alignment. PyTorch's grouped GEMMs require contracted rows in runs of 16 bytes."""


class Tiles(NamedTuple):
    """The assignment of rows to tiles. M is the number of rows of x, E the number of experts.

    Attributes:
      unit: rows per tile.
      experts: the expert of each tile; E for unused tiles.
      first: the index of each tile's first row among the rows of its expert.
      place: for each row of x, the row of the tiles; the last row of the tiles for rows of no expert.
      starts: for each expert, its first row in the tiles.
      stops: for each expert, the end of its rows in the tiles, with padding.
    """

    unit: int
    sizes: Tensor
    experts: Tensor
    first: Tensor
    place: Tensor
    starts: Tensor
    stops: Tensor

    @property
    def number(self) -> int:
        return self.experts.shape[0]

    def scatter(self, x: Tensor) -> Tensor:
        """Scatter the rows of x into zero-padded tiles `[tiles, unit, columns]`."""
        rows = x.new_zeros((self.number * self.unit, x.shape[1])).index_copy_(0, self.place, x)
        return rows.view(self.number, self.unit, x.shape[1])

    def gather(self, rows: Tensor) -> Tensor:
        """Gather rows of the tiles into the order of x. The last row becomes zeros, which rows of no expert read."""
        rows[-1].zero_()
        return rows.index_select(0, self.place)

    def to_tiles(self, of_experts: Tensor) -> Tensor:
        return of_experts.index_select(0, self.experts.clamp(max=of_experts.shape[0] - 1))

    def to_rows(self, of_experts: Tensor) -> Tensor:
        return self.to_tiles(of_experts).repeat_interleave(self.unit)

    def max_by_expert(self, amax: Tensor) -> Tensor:
        """Reduce one amax per tile to one per expert. The maximum is over integers, so it is exact and keeps NaN."""
        table = torch.zeros(self.sizes.shape[0] + 1, dtype=torch.int32, device=amax.device)
        table.scatter_reduce_(0, self.experts, amax.contiguous().view(torch.int32), "amax")
        return table[:-1].view(torch.float32)


def tiles_of(recipe: Recipe, rows: int, group_sizes: Tensor) -> Tiles:
    """Assign the M rows of x to `M // unit + E + 1` tiles, enough for any group sizes.

    `unit` follows from the blocks of activations and gradients. The sum of `group_sizes` is not compared with M.
    """
    unit = max(_LEAST_UNIT, block_alignment(recipe.activation, recipe.gradient))
    sizes, experts, device = group_sizes.to(torch.int64), group_sizes.shape[0], group_sizes.device
    padded = ((sizes + unit - 1) // unit).clamp(min=1) * unit
    ends, stops = sizes.cumsum(0), padded.cumsum(0)
    count = rows // unit + experts + 1
    row, begin = torch.arange(rows, device=device), torch.arange(0, count * unit, unit, device=device)
    of_row = torch.searchsorted(ends, row, right=True)
    shift = torch.cat([stops - padded - (ends - sizes), stops.new_zeros(1)])
    place = torch.where(of_row < experts, row + shift[of_row], count * unit - 1).clamp(max=count * unit - 1)
    of_tile = torch.searchsorted(stops, begin, right=True)
    first = begin - torch.cat([stops - padded, stops.new_zeros(1)])[of_tile]
    return Tiles(unit, sizes, of_tile, first, place, stops - padded, stops)


class GroupedOperand(NamedTuple):
    """One operand of the grouped products: a plane of all tiles as a matrix, or of all weights as `[E, ...]`.

    Attributes:
      parts: the plane, with 1 as its per-tensor scale.
      expert_scale: the per-tensor scale of each expert, fp32 `[E]`; None if the format has none.
    """

    format: Format
    usage: Usage
    parts: Plane
    expert_scale: Tensor | None

    def values(self, dtype: torch.dtype) -> Tensor:
        """Dequantize without the per-tensor scales of experts, which is exact in bfloat16."""
        return quantize_steps.dequantize(ops, self.parts, self.format, self.usage, dtype)  # type: ignore[no-any-return]

    def by_expert(self, stops: Sequence[int] | None = None) -> list[Operand]:
        """Split into one operand per expert: stacked weights, or the rows of tiles that end at `stops`."""
        if stops is None:
            parts = [part.unbind() if part is not None and part.ndim else itertools.repeat(part) for part in self.parts]
            planes = [Plane(*each) for each in zip(*parts, strict=False)]
        else:
            ends = itertools.pairwise((0, *stops))
            rows = [quantize_steps.plane_rows(self.parts, self.format, self.usage, *each) for each in ends]
            planes = [Plane(*(part if part is None else part.contiguous() for part in each)) for each in rows]
        if self.expert_scale is not None:
            # Padded to one scale every 16 bytes. Otherwise cuBLASLt copies each to an aligned address.
            scales = torch.nn.functional.pad(self.expert_scale[:, None], (0, 3))[:, 0].unbind()
            name = "scale_inv" if self.format.per_tensor else "global_scale_inv"
            planes = [each._replace(**{name: scale}) for each, scale in zip(planes, scales, strict=True)]
        return [Operand(self.format, each, self.usage) for each in planes]


def make_operand(fmt: Format, usage: Usage, parts: Plane, scales: Tensor | None = None) -> GroupedOperand:
    """Build an operand from planes of all experts. Their per-tensor scales are `scales`, or else those in `parts`."""
    if not fmt.tensor_scaled:
        return GroupedOperand(fmt, usage, parts, None)
    one = torch.ones((), device=parts.data.device)
    if fmt.per_tensor:
        return GroupedOperand(fmt, usage, Plane(parts.data, one), parts.scale_inv if scales is None else scales)
    scales = parts.global_scale_inv if scales is None else scales
    return GroupedOperand(fmt, usage, parts._replace(global_scale_inv=one), scales)


def stack_weights(weights: Sequence[Operand]) -> GroupedOperand:
    parts = [None if part[0] is None else torch.stack(part) for part in zip(*(w.parts for w in weights), strict=True)]
    return make_operand(weights[0].format, weights[0].usage, Plane(*parts))


def quantize_tiles(
    tiled: Tensor, spec: OperandSpec, tiles: Tiles, *, seeds: Tensor | None = None, scale: Tensor | None = None
) -> tuple[dict[Usage, GroupedOperand], Tensor | None]:
    """Quantize tiles `[tiles, unit, columns]`, with one per-tensor scale per expert.

    For stochastic rounding `seeds` are int32 `[E, 2]`: a uint64 per expert as two words, low word first. Under delayed
    scaling `scale` is fp32 `[E]`, and the second result is the amax of each expert, fp32 `[E]`.
    """
    fmt, usage = spec.format, spec.usage
    found: list[Tensor] = []

    def merged(amax: Tensor) -> Tensor:
        if amax.ndim > 1:  # Amaxes per row need no reduction.
            return amax
        found.append(tiles.max_by_expert(amax))
        return tiles.to_tiles(found[-1])

    # Ops take all tiles as one matrix. An op with a global scale has one per matrix, so there each tile is a matrix.
    is_batched = fmt.tensor_scaled and not fmt.per_tensor
    over = _BatchedOps() if is_batched else ops
    computed = usage
    if fmt.transposes and fmt.stochastic:
        computed = Usage.ROWWISE  # The columnwise plane is the transposed rowwise plane, as for a matrix.
    draws, seeds = None, spec.seed_of(seeds, xor_words)
    if seeds is not None:
        tile = Box(tuple(tiled.shape[1:]), (tiles.first, 0), tuple(tiled.shape[1:]))
        # A uint64 is two int32 words, low word first.
        draws = tile.draws(tiles.to_tiles(seeds).contiguous(), lambda first: first.view(torch.int32).view(-1, 2))
    amax = None
    if fmt.tensor_scaled and not fmt.rotates(computed):
        amax = ops.amax_tensor(tiled, lead=1)
    given: dict[str, Any] = {"scale": None if scale is None else tiles.to_tiles(scale), "draws": draws, "amax": amax}
    planes, _ = quantize_operand(over, tiled, spec._replace(usage=computed), **given, reduce_max=merged)
    sides = {}
    for each, parts in planes.items():
        of_tiles = parts.scale_inv if fmt.per_tensor else parts.global_scale_inv
        scales = None if of_tiles is None else of_tiles.index_select(0, tiles.starts // tiles.unit)
        matrices = Plane(*(_as_matrix(part, fmt, each, is_batched) for part in parts))
        sides[each] = make_operand(fmt, each, matrices, scales)
    if computed is not usage:
        rowwise = sides[Usage.ROWWISE]
        parts = quantize_steps.transpose_plane(ops, rowwise.parts, fmt)
        sides[Usage.COLUMNWISE] = rowwise._replace(usage=Usage.COLUMNWISE, parts=parts)
    return {each: sides[each] for each in usage.planes}, found[-1] if scale is not None else None


class _BatchedOps:
    """`ops` that treat the first axis as a batch of matrices instead of as rows."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        op = getattr(ops, name)
        return lambda *operands, outer=0, **attributes: op(*operands, **attributes)


def _as_matrix(part: Tensor | None, fmt: Format, usage: Usage, is_batched: bool) -> Tensor | None:
    if part is None or part.ndim < 2:
        return part
    if part.ndim == 2:
        return part.flatten()
    if not is_transposed(fmt, usage):
        return part.flatten(0, 1)
    return (part.transpose(0, 1).contiguous() if is_batched else part).flatten(1)


def row_product(
    x: GroupedOperand,
    w: GroupedOperand | Sequence[Operand],
    contracted: Usage,
    tiles: Tiles,
    stops: Sequence[int] | None,
    columns: int,
    dtype: torch.dtype,
    *,
    fast: bool,
) -> Tensor:
    """Multiply each row by the weight of its expert: `[rows of tiles, columns]`, where padding rows are undefined.

    `x` is a rowwise plane of the tiles. The product contracts K of the weights if `contracted` is `ROWWISE`, N if it is
    `COLUMNWISE`. `w` is the plane that it reads, or the plane to transpose for it. If the host knows `stops`, for each
    expert the end of its rows in the tiles, each expert is a GEMM call of its own, and `w` may be one operand per
    expert, which avoids stacking them. Else there is one grouped call. `fast` is as for `matmul`.
    """
    needs_transpose = isinstance(w, GroupedOperand) and w.usage is not contracted and w.format.per_tensor
    if isinstance(w, GroupedOperand) and needs_transpose and (stops is not None or _grouped_codes(x, w, dtype)):
        w = w._replace(usage=contracted, parts=w.parts._replace(data=ops.transpose(w.parts.data, batch=1)))
    if stops is not None:
        y = torch.empty((x.parts.data.shape[0], columns), dtype=dtype, device=x.parts.data.device)
        weights = w.by_expert() if isinstance(w, GroupedOperand) else w
        for rows, weight, start, stop in zip(x.by_expert(stops), weights, (0, *stops[:-1]), stops, strict=True):
            if weight.usage is not contracted:
                weight = Operand(weight.format, transpose(weight.parts, weight.format), contracted)
            matmul_into(rows, weight, y[start:stop], fast=fast)
        return y
    assert isinstance(w, GroupedOperand)
    ends = tiles.stops.to(torch.int32)
    if _grouped_codes(x, w, dtype):
        (a, b), of_x, of_w = _codes(x, w), cast(Tensor, x.expert_scale), cast(Tensor, w.expert_scale)
        of_columns = of_w[:, None].expand(-1, b.shape[1]).contiguous()
        return torch._scaled_grouped_mm(
            a, b.transpose(1, 2), tiles.to_rows(of_x), of_columns, ends, out_dtype=dtype, use_fast_accum=fast
        )
    a, b = x.values(torch.bfloat16), w.values(torch.bfloat16)
    # Weights are stored as [E, N, K] or transposed. `_grouped_mm` contracts their second axis.
    contracts_last = contracted is Usage.ROWWISE or (w.usage is contracted and is_transposed(w.format, w.usage))
    y = torch._grouped_mm(a, b.transpose(1, 2) if contracts_last else b, offs=ends)
    if (scale := _product_scale(x, w)) is not None:
        y.mul_(tiles.to_rows(scale)[:, None])
    return y.to(dtype)


def expert_products(
    dy: GroupedOperand,
    x: GroupedOperand,
    tiles: Tiles,
    stops: Sequence[int] | None,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
) -> Tensor:
    """Compute all weight gradients, `[E, N, K]`, from columnwise planes of tiles. Arguments as in `row_product`."""
    if stops is not None:
        dw = torch.empty(shape, dtype=dtype, device=dy.parts.data.device)
        for of_dy, of_x, out in zip(dy.by_expert(stops), x.by_expert(stops), dw, strict=True):
            matmul_into(of_dy, of_x, out)
        return dw
    ends = tiles.stops.to(torch.int32)
    if _grouped_codes(dy, x, dtype):
        (a, b), scales = _codes(dy, x), (cast(Tensor, dy.expert_scale), cast(Tensor, x.expert_scale))
        of_rows, of_columns = (of.repeat_interleave(size) for of, size in zip(scales, shape[1:], strict=True))
        return torch._scaled_grouped_mm(a, b.t(), of_rows, of_columns, ends, out_dtype=dtype)
    a, b = (
        side.values(torch.bfloat16) if is_transposed(side.format, side.usage) else side.values(torch.bfloat16).t()
        for side in (dy, x)
    )
    dw = torch._grouped_mm(a, b.t(), offs=ends)
    if (scale := _product_scale(dy, x)) is not None:
        dw.mul_(scale[:, None, None])
    return dw.to(dtype)


def _product_scale(a: GroupedOperand, b: GroupedOperand) -> Tensor | None:
    if a.expert_scale is None or b.expert_scale is None:
        return b.expert_scale if a.expert_scale is None else a.expert_scale
    return a.expert_scale * b.expert_scale


def _grouped_codes(a: GroupedOperand, b: GroupedOperand, dtype: torch.dtype) -> bool:
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
