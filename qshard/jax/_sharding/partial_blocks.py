"""Blocks that shards cut.

A block is quantized by whoever holds all of it. Where shards cut blocks, the unit is a *piece*: the largest divisor of
a block that is not cut. Amaxes of pieces are merged into those of blocks, on every device that has a part of one, and
each piece is cast with the scale of its block. Pieces serve cuts of rows and of columns, in `shard_map` and where XLA
cuts whole arrays; flat slices, which are how ZeRO cuts masters, serve neither columns nor XLA.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from qshard.jax._ops.bind import reshaped
from qshard.jax._sharding.shard_spec import Cut, as_bits, as_float, folded, max_over, moved, pinned, vary_alike
from qshard.layout import Shape

Block = tuple[int, int]


@dataclass(frozen=True)
class Pieces:
    """Of an array, the largest parts of its blocks, which lie in the last two axes, that no shard cuts.

    Attributes:
      cut: how the array is cut.
      grid: how a grid of values of its blocks is: along each axis as the array, or not at all where shards cut blocks.
      size: rows and columns of a piece.
      each: by axis of the grid, how many pieces a block has.
      rows: where blocks go on from one matrix of an array `[*outer, M, K]`, or `[K, *outer, M]`, to the next: the axes
        of the array, first and after the last, that are rows. The grid has one axis for them.
    """

    cut: Cut
    grid: Cut
    size: Block
    each: Shape
    rows: tuple[int, int] | None = None

    @classmethod
    def of(cls, cut: Cut, shape: Shape, block: Block, *, rows: tuple[int, int] | None = None) -> Pieces | None:
        """Those of an array of this shape, in hand; None if its blocks are whole."""
        size, last = _size(cut, shape, block), len(shape) - 1
        if rows is not None:  # A piece is in one matrix.
            at = rows[1] - last  # Of a block, the rows of the tensor.
            size = (math.gcd(size[0], shape[-2]), size[1]) if at == 0 else (size[0], math.gcd(size[1], shape[-1]))
        if size == block:
            return None
        each, ones = (block[0] // size[0], block[1] // size[1]), (1,) * (last - 1)
        grid = cut.of_blocks(shape, (*ones, *block)) if cut.entries else cut
        if rows is None:
            return cls(cut, grid, size, (*ones, *each))
        folded_rows = (*grid.entries[: rows[0]], (), *grid.entries[rows[1] :])
        return cls(cut, dataclasses.replace(grid, entries=folded_rows), size, each, rows)

    @property
    def of_whole(self) -> Pieces:
        """With a grid that every device has all of."""
        return dataclasses.replace(self, grid=self.grid.without(self.grid.axes))

    @property
    def shared(self) -> list[tuple[str, ...]]:
        """By axis of the grid, the mesh axes over which devices share its blocks."""
        if self.rows is not None:
            return [()] * len(self.each)
        ends = zip(self.cut.entries, self.grid.entries, strict=True)
        return [tuple(name for name in names if name not in kept) for names, kept in ends]

    def count(self, shape: Shape) -> Shape:
        """How many pieces an array of this shape has, by axis."""
        return (*shape[:-2], *(-(-size // piece) for size, piece in zip(shape[-2:], self.size, strict=True)))

    def merged(self, amax: jax.Array, *, reduce: bool = True) -> jax.Array:
        """The amaxes of blocks from those of pieces; in `shard_map` without `reduce`, what this shard says of them."""
        bits, shared = as_bits(amax), self.shared
        if self.cut.local:
            shape = tuple(size * self.cut.count(names) for size, names in zip(bits.shape, shared, strict=True))
            whole, bits = vary_alike(jnp.zeros(shape, bits.dtype), bits)
            bits = lax.dynamic_update_slice(whole, bits, _starts(shared, bits.shape))
        elif self.rows is not None:
            start, stop = self.rows
            entries = (*self.grid.entries[:start], *[()] * (stop - start), *self.grid.entries[start + 1 :])
            bits = folded(pinned(bits, dataclasses.replace(self.grid, entries=entries)), start, stop)
        else:
            bits = pinned(bits, self.grid)
        for axis, each in enumerate(self.each):
            if each > 1:
                ends = [(0, -size % each if i == axis else 0) for i, size in enumerate(bits.shape)]
                bits = jnp.max(_split(jnp.pad(bits, ends), axis, each), axis=axis + 1, initial=0)
        axes = tuple(name for names in shared for name in names)
        return max_over(axes)(as_float(bits)) if self.cut.local and reduce else as_float(bits)

    def own(self, grid: jax.Array) -> jax.Array:
        """What this shard needs of a grid of the whole."""
        return moved(grid, self.of_whole.grid, self.grid) if self.cut.local else pinned(grid, self.grid)

    def spread(self, grid: jax.Array, shape: Shape) -> jax.Array:
        """The value of its block for each piece of the array, of which there are `shape`: the inverse of `merged`."""
        full = shape
        if self.rows is not None:
            start, stop = self.rows
            shape = (*shape[:start], math.prod(shape[start:stop]), *shape[stop:])
        for axis, (each, shared) in enumerate(zip(self.each, self.shared, strict=True)):
            if each > 1:
                grid = repeated(grid, axis, each)
                size, local = shape[axis], self.cut.local and bool(shared)
                missing = max(0, size * (self.cut.count(shared) if local else 1) - grid.shape[axis])
                grid = jnp.pad(grid, [(0, missing if i == axis else 0) for i in range(grid.ndim)])
                start_of_shard = lax.axis_index(shared) * size if local else 0
                grid = lax.dynamic_slice_in_dim(grid, start_of_shard, size, axis)
        grid = pinned(grid, self.grid)  # Else XLA cuts what it repeats, and moves it to its place.
        entries = list(jax.typeof(grid).sharding.spec)
        if self.rows is not None:
            entries[start : start + 1] = [None] * (stop - start)
        return reshaped(grid, full, entries)


def _size(cut: Cut, shape: Shape, block: Block) -> Block:
    """The largest divisors of a block that no shard of the last two axes cuts.

    An op on whole arrays is cut only if all its blocks are whole, so blocks at an edge count as cut too.
    """
    shards = [cut.count(names) for names in cut.entries[-2:]]
    if cut.own_blocks or math.prod(shards) == 1:
        return block
    parts = shape[-2:] if cut.local else [-(-size // n) for size, n in zip(shape[-2:], shards, strict=True)]
    rows, cols = (
        unit if cut.local and n == 1 else math.gcd(part, size, unit)
        for part, size, unit, n in zip(parts, shape[-2:], block, shards, strict=True)
    )
    return rows, cols


def _starts(shared: list[tuple[str, ...]], shape: Shape) -> list[jax.Array | int]:
    return [lax.axis_index(names) * size if names else 0 for names, size in zip(shared, shape, strict=True)]


def _split(x: jax.Array, axis: int, each: int) -> jax.Array:
    """An axis that is not cut, as two."""
    sizes, entries = list(x.shape), list(jax.typeof(x).sharding.spec)
    sizes[axis : axis + 1] = [sizes[axis] // each, each]
    return reshaped(x, sizes, [*entries[: axis + 1], None, *entries[axis + 1 :]])


def repeated(x: jax.Array, axis: int, each: int) -> jax.Array:
    """Each element of an axis that is not cut, so many times."""
    sizes, entries = list(x.shape), list(jax.typeof(x).sharding.spec)
    wider = [*sizes[: axis + 1], each, *sizes[axis + 1 :]]
    x = lax.broadcast_in_dim(x, wider, [i + (i > axis) for i in range(len(sizes))])
    sizes[axis] *= each
    return reshaped(x, sizes, entries)
