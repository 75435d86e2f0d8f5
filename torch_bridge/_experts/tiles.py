"""Padded rows of experts, and quantization into them.

The rows of each expert are padded to whole tiles. A tile has as many rows (`unit`) as the tallest block of the recipe,
at least 16. So blocks end where the rows of an expert end, and codes are the same as if the rows of each expert were
quantized alone. Per-tensor formats and NVFP4 have a scale for each expert.

FP8 with one scale and FP8 in 1-D blocks are quantized from x straight into padded rows (`_core/operands.py`). For
other formats x is scattered into tiles of zeros first, and the ops that quantize one matrix quantize all tiles.

The host does not know the group sizes, so there are as many tiles as any sizes could need. An expert without rows has
one tile of zeros. Unused tiles at the end belong to no expert.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from qshard._core import quantize_steps
from qshard._core.operands import OperandSpec, quantize_operand, quantize_rows
from qshard._core.placement import Box
from qshard._core.quantize_steps import Plane
from qshard.formats import Format, Usage
from qshard.layout import block_alignment, is_transposed, takes_rows
from qshard.recipes import Recipe, Role
from qshard.torch_bridge._distributed.token_exchange import TokenExchange
from qshard.torch_bridge._experts.operands import BatchedOps, GroupedOperand
from qshard.torch_bridge._ops.bind import ops
from qshard.torch_bridge._ops.uint64 import xor_words

_LEAST_UNIT = 16
"""Minimum row alignment. Grouped GEMMs require contracted rows in runs of 16 bytes."""


class Tiles(NamedTuple):
    """The assignment of T rows of x to P padded rows: the results of op `group_rows`, for E experts.

    Attributes:
      unit: rows per tile.
      stops: for each expert, the end of its padded rows, int32 `[E]`.
      ends: for each expert, the end of its rows of x, int32 `[E]`; None if x is not sorted by expert.
      rows: for each padded row, the row of x, int32 `[P]`; a number outside of x for padding.
      place: for each row of x, its padded row, int32 `[T]`; the last one for rows of no expert. `[T, k]` if each row of
        x has k padded rows, as tokens have; None if x is the padded rows.
    """

    unit: int
    stops: Tensor
    ends: Tensor | None
    rows: Tensor
    place: Tensor | None

    @property
    def number(self) -> int:
        return self.rows.shape[0] // self.unit

    def scatter(self, x: Tensor) -> Tensor:
        """Scatter the rows of x into zero-padded tiles `[tiles, unit, columns]`."""
        if self.place is not None and self.place.ndim == 1:
            rows = x.new_zeros((self.rows.shape[0], x.shape[1])).index_copy_(0, self.place.to(torch.int64), x)
        else:
            is_row = (self.rows < x.shape[0])[:, None]
            rows = torch.where(is_row, x.index_select(0, self.rows.clamp(max=x.shape[0] - 1)), 0)
        return rows.view(self.number, self.unit, x.shape[1])

    def gather(self, rows: Tensor) -> Tensor:
        """Gather padded rows into the order of x, and add the rows that have the same row of x, in fp32.

        Rows of no expert read the last row, which products set to zeros.
        """
        if self.place is None:
            return rows
        place = self.place[:, None] if self.place.ndim == 1 else self.place
        # Also for one row each: the kernel loads vectors.
        sums: Tensor = ops.combine_rows(rows, place, torch.ones(place.shape, device=rows.device))
        return sums

    def experts(self) -> Tensor:
        """Return the expert of each tile; E for unused tiles."""
        first = torch.arange(0, self.rows.shape[0], self.unit, dtype=torch.int32, device=self.stops.device)
        return torch.searchsorted(self.stops, first, right=True)

    def scale_rows(self, y: Tensor, of_experts: Tensor) -> None:
        """Multiply the padded rows of each expert by a number, in place. Unused rows stay."""
        factors = torch.nn.functional.pad(of_experts, (0, 1), value=1.0).index_select(0, self.experts())
        y.view(self.number, self.unit, y.shape[1]).mul_(factors[:, None, None])

    def add_to_rows(self, y: Tensor, of_experts: Tensor) -> None:
        """Add a row `[E, columns]` to the rows of each expert in a result of `gather`, in place. Other rows stay."""
        each = torch.nn.functional.pad(of_experts.to(y.dtype), (0, 0, 0, 1))
        if self.place is None:
            y.view(self.number, self.unit, y.shape[1]).add_(each.index_select(0, self.experts())[:, None])
            return
        y.add_(each.index_select(0, torch.searchsorted(self.stops, self.place, right=True)))

    def starts(self) -> Tensor:
        """Return the first padded row of each expert."""
        return torch.nn.functional.pad(self.stops[:-1], (1, 0))


class Transfer(NamedTuple):
    """An exchange of rows around one grouped product.

    `role` is the operand that is dispatched: the activation, and then its gradient is combined; or the gradient of the
    result, and then the result is combined.
    """

    exchange: TokenExchange
    role: Role


class GroupedRows(NamedTuple):
    """The padded rows of one grouped product: as rows of x, and as rows of the result.

    With expert parallelism, `transfer` is the exchange of either with other ranks.
    """

    x: Tiles
    y: Tiles
    transfer: Transfer | None = None


def unit_of(*recipes: Recipe) -> int:
    """Return the rows per tile for the blocks of activations and gradients of all recipes."""
    return math.lcm(_LEAST_UNIT, *(block_alignment(recipe.activation, recipe.gradient) for recipe in recipes))


def tiles_of(unit: int, rows: int, group_sizes: Tensor) -> tuple[Tiles, Tensor]:
    """Assign the T rows of x to `T // unit + E + 1` tiles, enough for any group sizes.

    Also returns the int32 `[1]` that is 0 if group sizes are negative or exceed T.
    """
    tiles = rows // unit + group_sizes.shape[0] + 1
    *made, fits = ops.group_rows(group_sizes.to(torch.int32), tiles=tiles, tokens=rows, unit=unit)
    return Tiles(unit, *made), fits


def quantize_experts(
    x: Tensor, spec: OperandSpec, tiles: Tiles, *, seeds: Tensor | None = None, scale: Tensor | None = None
) -> tuple[dict[Usage, GroupedOperand], Tensor | None]:
    """Quantize the rows of x `[T, K]` into padded rows, with the scales of each expert.

    For stochastic rounding `seeds` are int32 `[E, 2]`: a uint64 per expert as two words, low word first. Under delayed
    scaling `scale` is fp32 `[E]`, and the second result is the amax of each expert, fp32 `[E]`.
    """
    fmt, usage = spec.format, spec.usage
    if not takes_rows(fmt):
        return _quantize_tiles(tiles.scatter(x), spec, tiles, seeds), None
    if usage is Usage.COLUMNWISE:
        spec = spec._replace(usage=Usage.BOTH)
    planes, amax = quantize_rows(ops, x.contiguous(), spec, tiles.rows, tiles.stops, scale=scale)
    return {each: GroupedOperand(fmt, each, planes[each]) for each in usage.planes}, amax


def _quantize_tiles(
    tiled: Tensor, spec: OperandSpec, tiles: Tiles, seeds: Tensor | None
) -> dict[Usage, GroupedOperand]:
    """Quantize tiles `[tiles, unit, columns]`, in blocks."""
    fmt, usage, experts = spec.format, spec.usage, tiles.stops.shape[0]
    of_tiles = tiles.experts()

    def to_tiles(of_experts: Tensor) -> Tensor:
        return of_experts.index_select(0, of_tiles.clamp(max=experts - 1))

    def merged(amax: Tensor) -> Tensor:
        if amax.ndim > 1:  # Amaxes per row need no reduction.
            return amax
        # The maximum is over integers, so it is exact and keeps NaN.
        table = torch.zeros(experts + 1, dtype=torch.int32, device=amax.device)
        table.scatter_reduce_(0, of_tiles, amax.contiguous().view(torch.int32), "amax")
        return to_tiles(table[:-1].view(torch.float32))

    # Ops take all tiles as one matrix. An op with a global scale has one per matrix, so there each tile is a matrix.
    over = BatchedOps() if fmt.tensor_scaled else ops
    computed = usage
    if fmt.transposes and fmt.stochastic:
        computed = Usage.ROWWISE  # The columnwise plane is the transposed rowwise plane, as for a matrix.
    draws, seeds = None, spec.seed_of(seeds, xor_words)
    if seeds is not None:
        begin = torch.arange(0, tiles.rows.shape[0], tiles.unit, device=tiled.device)
        tile = Box(tuple(tiled.shape[1:]), (begin - to_tiles(tiles.starts()), 0), tuple(tiled.shape[1:]))
        # A uint64 is two int32 words, low word first.
        draws = tile.draws(to_tiles(seeds).contiguous(), lambda first: first.view(torch.int32).view(-1, 2))
    amax = ops.amax_tensor(tiled, lead=1) if fmt.tensor_scaled and not fmt.rotates(computed) else None
    spec = spec._replace(usage=computed)
    planes, _ = quantize_operand(over, tiled, spec, draws=draws, amax=amax, reduce_max=merged)
    sides = {}
    for each, parts in planes.items():
        matrices = Plane(*(_as_matrix(part, fmt, each) for part in parts))
        if fmt.tensor_scaled:
            assert parts.global_scale_inv is not None
            scales = parts.global_scale_inv.index_select(0, tiles.starts() // tiles.unit)
            matrices = matrices._replace(global_scale_inv=scales)
        sides[each] = GroupedOperand(fmt, each, matrices)
    if computed is not usage:
        rowwise = sides[Usage.ROWWISE]
        parts = quantize_steps.transpose_plane(ops, rowwise.parts, fmt)
        sides[Usage.COLUMNWISE] = rowwise._replace(usage=Usage.COLUMNWISE, parts=parts)
    return {each: sides[each] for each in usage.planes}


def _as_matrix(part: Tensor | None, fmt: Format, usage: Usage) -> Tensor | None:
    if part is None or part.ndim < 2:
        return part
    if part.ndim == 2:
        return part.flatten()
    if not is_transposed(fmt, usage):
        return part.flatten(0, 1)
    return (part.transpose(0, 1).contiguous() if fmt.tensor_scaled else part).flatten(1)
