"""Quantizing a shard of a weight as the part of the whole that it is, wherever ranks cut blocks.

A scale needs the amax of its whole block. So each rank puts the amaxes of the parts that it holds into the grid of the
whole weight, zeros elsewhere; a maximum over ranks completes the grid; every rank makes the same scales of it; and each
casts its shard with its part of them. The result is the rows, or columns, of the whole weight quantized at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from qshard import pipeline
from qshard.formats import Format, Usage
from qshard.layout import plane
from qshard.pipeline import Scales
from qshard.torch_bridge._ops import into, ops

__all__ = ["Cut", "amax_into", "cast_into", "codes_width", "grid_shape", "refusal", "scales_of"]


class Cut(NamedTuple):
    """Where a shard is in the whole weight: it begins at `start` along `axis` (0 for rows, 1 for columns)."""

    axis: int
    start: int


def refusal(fmt: Format) -> str | None:
    """Why weights of a format cannot be quantized before they are gathered; None if they can."""
    if not fmt.square:
        return "its planes are different numbers, and which of them is needed when, FSDP2 does not tell"
    if fmt.four_over_six is not None or fmt.rounding != "nearest":
        return f"its codes depend on more than amaxes (four_over_six={fmt.four_over_six}, rounding={fmt.rounding})"
    return None


def grid_shape(fmt: Format, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of the amaxes, and the scales, of a whole weight."""
    return plane(fmt, shape, Usage.ROWWISE, op="fully_shard").scale_shape


def codes_width(fmt: Format, columns: int) -> int:
    """Bytes of a row of codes."""
    return columns // fmt.element.codes_per_byte


def amax_into(fmt: Format, shard: Tensor, cut: Cut, grid: Tensor) -> None:
    """Writes what one rank knows of the amaxes of a weight into `grid`, which holds zeros."""
    if fmt.block is None:
        pipeline.global_amax(into(grid), shard, fmt)
    elif cut.axis == 0:
        for rows, blocks in _row_runs(cut.start, shard.shape[0], fmt.block[0]):
            pipeline.block_amax(into(grid[blocks]), shard[rows], fmt.block)
    elif shard.numel():
        part, before, blocks = _column_parts(cut.start, shard.shape[1], fmt.block[1])
        found = pipeline.block_amax(ops, shard, (fmt.block[0], part))
        ratio = fmt.block[1] // part
        if ratio > 1:
            after = -(before + found.shape[1]) % ratio
            found = pipeline.block_amax(ops, torch.nn.functional.pad(found, (before, after)), (1, ratio))
        grid[:, blocks] = found


def scales_of(fmt: Format, grid: Tensor) -> Scales:
    """The scales that the amaxes of a whole weight make."""
    whole = grid if fmt.block is None else None
    if fmt.global_scale is not None:
        whole = ops.amax_tensor(grid)  # The amax of amaxes is that of the tensor.
    return pipeline.scales(ops, fmt, grid, whole)


def cast_into(fmt: Format, shard: Tensor, cut: Cut, scale: Tensor, codes: Tensor) -> None:
    """Writes the codes of a shard of a weight whose scales are `scale`; 4-bit codes are packed."""
    if fmt.block is None:
        pipeline.cast_per_tensor(into(codes), shard, fmt, Usage.ROWWISE, Scales(scale, scale))
    elif cut.axis == 0:
        for rows, blocks in _row_runs(cut.start, shard.shape[0], fmt.block[0]):
            pipeline.cast(into(codes[rows]), shard[rows], fmt, scale[blocks], fmt.block)
    elif shard.numel():
        part, before, blocks = _column_parts(cut.start, shard.shape[1], fmt.block[1])
        parts = scale[:, blocks].repeat_interleave(fmt.block[1] // part, dim=1)
        count = -(-shard.shape[1] // part)
        scale = parts[:, before : before + count].contiguous()
        pipeline.cast(into(codes), shard, fmt, scale, (fmt.block[0], part))


def _row_runs(start: int, rows: int, block: int) -> Iterator[tuple[slice, slice]]:
    """The rows of a shard in runs that begin a block of the whole or end in one: where they are, and their blocks."""
    head = min(rows, -start % block)
    if head:
        yield slice(0, head), slice(start // block, start // block + 1)
    if rows > head:
        first = (start + head) // block
        yield slice(head, rows), slice(first, first + -(-(rows - head) // block))


def _column_parts(start: int, columns: int, block: int) -> tuple[int, int, slice]:
    """Of a shard of columns: how wide parts of blocks are that it holds whole, how many of them its first block has
    before it, and its blocks."""
    part = math.gcd(start, block)
    return part, start % block // part, slice(start // block, -(-(start + columns) // block))
