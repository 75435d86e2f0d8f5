"""Padded rows of experts, and quantization into them.

The rows of each expert are padded to whole tiles. A tile has as many rows (`tile_rows`) as the tallest block of the
recipe, at least 16, and as the product that contracts rows needs. So blocks end where the rows of an expert end, and
codes are the same as if the rows of each expert were quantized alone. Per-tensor formats and NVFP4 have a scale for
each expert.

Rows are quantized from x straight into padded rows (`_core/operands.py`).

The host does not know the group sizes, so there are as many tiles as any sizes could need. An expert without rows has
one tile of zeros. Unused tiles at the end belong to no expert.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qshard import gemm_dispatch
from qshard._core.operands import OperandSpec, quantize_rows
from qshard.formats import Usage
from qshard.layout import block_alignment
from qshard.recipes import Recipe, Role
from qshard.torch_bridge._distributed.token_exchange import TokenExchange
from qshard.torch_bridge._experts.fusion import Fusion
from qshard.torch_bridge._experts.operands import GroupedOperand
from qshard.torch_bridge._ops.bind import ops
from qshard.torch_bridge._ops.padded_rows import experts_of_strips
from qshard.torch_bridge._ops.uint64 import xor_uint64
from qshard.torch_bridge._quantized.gemm import grouped_runs_on

_LEAST_TILE_ROWS = 16
"""Minimum row alignment. Grouped GEMMs require contracted rows in runs of 16 bytes."""


class Tiles(NamedTuple):
    """The assignment of T rows of x to P padded rows: the results of op `group_rows`, for E experts.

    Attributes:
      tile_rows: rows per tile.
      stops: for each expert, the end of its padded rows, int32 `[E]`.
      ends: for each expert, the end of its rows of x, int32 `[E]`; None if x is not sorted by expert.
      rows: for each padded row, the row of x, int32 `[P]`; a number outside of x for padding.
      place: for each row of x, its padded row, int32 `[T]`; the last one for rows of no expert. `[T, k]` if each row of
        x has k padded rows, as tokens have; None if x is the padded rows.
    """

    tile_rows: int
    stops: Tensor
    ends: Tensor | None
    rows: Tensor
    place: Tensor | None

    @property
    def number(self) -> int:
        return self.rows.shape[0] // self.tile_rows

    def gather(self, rows: Tensor) -> Tensor:
        """Gather padded rows into the order of x, and add the rows that have the same row of x, in fp32.

        Rows of no expert read the last row, which products set to zeros.
        """
        if self.place is None:
            return rows
        place = self.place[:, None] if self.place.ndim == 1 else self.place
        # Also for one row each: the kernel loads vectors.
        sums: Tensor = ops.combine_rows(rows, place, torch.ones(place.shape, dtype=torch.float32, device=rows.device))
        return sums

    def experts(self) -> Tensor:
        """Return the expert of each tile; E for unused tiles."""
        return experts_of_strips(self.stops, self.tile_rows, self.number)

    def scale_rows(self, y: Tensor, of_experts: Tensor) -> None:
        """Multiply the padded rows of each expert by a number, in place. Unused rows stay."""
        factors = torch.nn.functional.pad(of_experts, (0, 1), value=1.0).index_select(0, self.experts())
        y.view(self.number, self.tile_rows, y.shape[1]).mul_(factors[:, None, None])

    def add_to_rows(self, y: Tensor, of_experts: Tensor) -> None:
        """Add a row `[E, columns]` to the rows of each expert in a result of `gather`, in place. Other rows stay."""
        each = torch.nn.functional.pad(of_experts.to(y.dtype), (0, 0, 0, 1))
        if self.place is None:
            y.view(self.number, self.tile_rows, y.shape[1]).add_(each.index_select(0, self.experts())[:, None])
            return
        y.add_(each.index_select(0, torch.searchsorted(self.stops, self.place, right=True)))


class Transfer(NamedTuple):
    """An exchange of rows around one grouped product.

    `role` is the operand that is dispatched: the activation, and then its gradient is combined; or the gradient of the
    result, and then the result is combined.
    """

    exchange: TokenExchange
    role: Role


class GroupedRows(NamedTuple):
    """The padded rows of one grouped product: as rows of x, and as rows of the result.

    With expert parallelism, `transfer` is the exchange of either with other ranks. `fusion` are ops for the autograd
    node of the product. With SwiGLU, `grouped_linear` then returns a pair: h, and the amax of each of its rows.
    """

    x: Tiles
    y: Tiles
    transfer: Transfer | None = None
    fusion: Fusion | None = None


def tile_rows_of(device: torch.device, *recipes: Recipe) -> int:
    """Return the rows per tile for the blocks of activations and gradients of all recipes, and for their products."""
    tile_rows = _LEAST_TILE_ROWS
    for recipe in recipes:
        kind = gemm_dispatch.grouped_kind_of(recipe.gradient, recipe.activation, by_k=True)
        by_codes = kind is not None and grouped_runs_on(kind, device)
        contracted = gemm_dispatch.contracted_unit(kind if by_codes else None)
        tile_rows = math.lcm(tile_rows, block_alignment(recipe.activation, recipe.gradient), contracted)
    return tile_rows


def tiles_of(tile_rows: int, rows: int, group_sizes: Tensor) -> tuple[Tiles, Tensor]:
    """Assign the T rows of x to `T // tile_rows + E + 1` tiles, enough for any group sizes.

    Also returns the int32 `[1]` that is 0 if group sizes are negative or exceed T.
    """
    tiles = rows // tile_rows + group_sizes.shape[0] + 1
    *made, fits = ops.group_rows(group_sizes.to(torch.int32), tiles=tiles, tokens=rows, tile_rows=tile_rows)
    return Tiles(tile_rows, *made), fits


def quantize_experts(
    x: Tensor,
    spec: OperandSpec,
    tiles: Tiles,
    *,
    seeds: Tensor | None = None,
    scale: Tensor | None = None,
    row_amaxes: Tensor | None = None,
) -> tuple[dict[Usage, GroupedOperand], Tensor | None]:
    """Quantize the rows of x `[T, K]` into padded rows, with the scales of each expert.

    For stochastic rounding `seeds` are int32 `[E, 2]`: a uint64 per expert as two words, low word first. Under delayed
    scaling `scale` is fp32 `[E]`, and the second result is the amax of each expert, fp32 `[E]`. `row_amaxes` are the
    amaxes of the rows of x, fp32 `[T]`, if known.
    """
    fmt, usage = spec.format, spec.usage
    if usage is Usage.COLUMNWISE:
        spec = spec._replace(usage=Usage.BOTH)
    seeds = spec.seed_of(seeds, xor_uint64)
    known: dict[str, Any] = {"scale": scale, "seeds": seeds, "row_amaxes": row_amaxes}
    planes, amax = quantize_rows(ops, x.contiguous(), spec, tiles.rows, tiles.stops, **known)
    return {each: GroupedOperand(fmt, each, planes[each]) for each in usage.planes}, amax
