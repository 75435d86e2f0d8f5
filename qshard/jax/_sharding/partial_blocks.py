"""Partial blocks: blocks that shard boundaries split.

A device that has a whole block quantizes it alone. A block that a boundary splits is divided into equal subblocks, as
large as possible, such that no boundary splits a subblock. Amaxes of subblocks are merged into amaxes of blocks, on
every device that has a part of the block, and each subblock is cast with the scale of its block. This works for shards
of rows and of columns, in `shard_map` and where XLA shards whole arrays. Flat slices, which ZeRO uses for masters,
support neither columns nor XLA's sharding. The core instead pads shards to whole blocks (`_core.placement`), which
needs shard starts that are known in Python.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from qshard.jax._ops.amaxes import as_bits, as_float, max_over
from qshard.jax._ops.mesh import reshape, vary_alike
from qshard.jax._sharding.shard_spec import Block, ShardSpec, fold_axes, pin, reshard
from qshard.layout import PlaneLayout, Shape


@dataclass(frozen=True)
class PartialBlocks:
    """The subblocks of the blocks of an array. The blocks tile its last two axes.

    Attributes:
      grid: the sharding of a grid with one value for each block. It equals `spec`, the sharding of the array, except
        along axes where shards split blocks: there the grid is unsharded.
      size: rows and columns of a subblock.
      each: for each axis of the grid, the number of subblocks in a block.
      rows: None, unless blocks continue from one matrix of `[*outer, M, K]` or `[K, *outer, M]` to the next. Then the
        range `(start, stop)` of array axes that are rows. The grid has one axis for them.
    """

    spec: ShardSpec
    grid: ShardSpec
    size: Block
    each: Shape
    rows: tuple[int, int] | None = None

    @classmethod
    def of(cls, spec: ShardSpec, shape: Shape, block: Block, *, rows: tuple[int, int] | None = None) -> PartialBlocks:
        """Divide the blocks of a local array of this shape into subblocks."""
        size, ones = spec.unsplit(shape, block, rows), (1,) * (len(shape) - 2)
        each = (block[0] // size[0], block[1] // size[1])
        grid = spec.of_blocks(shape, (*ones, *block)) if spec.entries else spec
        if rows is None:
            return cls(spec, grid, size, (*ones, *each))
        folded_rows = (*grid.entries[: rows[0]], (), *grid.entries[rows[1] :])
        return cls(spec, dataclasses.replace(grid, entries=folded_rows), size, each, rows)

    @classmethod
    def of_plane(cls, where: PlaneLayout, spec: ShardSpec, shape: Shape) -> PartialBlocks | None:
        """Return the partial blocks of a plane of `[*outer, M, K]`, or None if its blocks are whole or it has none.

        A plane that is stored transposed is `[K, *outer, M]`. 2-D blocks are quantized first and transposed afterwards.
        """
        if where.format.per_tensor:
            return None
        assert where.block is not None
        last, transposed = len(shape) - 1, where.transposed and not where.format.shares_codes
        goes_on = last > 1 and shape[-2] % where.block[transposed] != 0
        if transposed:
            spec = dataclasses.replace(spec, entries=(*spec.entries[-1:], *spec.entries[:-1]))
            shape = (shape[-1], *shape[:-1])
        rows = (int(transposed), last + transposed) if goes_on else None
        return cls.of(spec, shape, where.block, rows=rows) if spec.splits(shape, where.block, rows) else None

    @property
    def of_whole(self) -> PartialBlocks:
        """A copy with an unsharded grid."""
        return dataclasses.replace(self, grid=self.grid.without(self.grid.axes))

    @property
    def shared_axes(self) -> list[tuple[str, ...]]:
        """For each axis of the grid, the mesh axes over which devices share its blocks."""
        if self.rows is not None:
            return [()] * len(self.each)
        ends = zip(self.spec.entries, self.grid.entries, strict=True)
        return [tuple(name for name in names if name not in kept) for names, kept in ends]

    def count(self, shape: Shape) -> Shape:
        """Return the number of subblocks along each axis of an array of this shape."""
        return (*shape[:-2], *(-(-size // side) for size, side in zip(shape[-2:], self.size, strict=True)))

    def merge(self, amax: jax.Array, *, reduce: bool = True) -> jax.Array:
        """Merge the amaxes of subblocks into the amaxes of blocks.

        Without `reduce`, the result in `shard_map` has this shard's amaxes only, and 0 for other blocks.
        """
        bits, shared = as_bits(amax), self.shared_axes
        if self.spec.local:
            shape = tuple(size * self.spec.count(names) for size, names in zip(bits.shape, shared, strict=True))
            whole, bits = vary_alike(jnp.zeros(shape, bits.dtype), bits)
            bits = lax.dynamic_update_slice(whole, bits, _starts(shared, bits.shape))
        elif self.rows is not None:
            start, stop = self.rows
            entries = (*self.grid.entries[:start], *[()] * (stop - start), *self.grid.entries[start + 1 :])
            bits = fold_axes(pin(bits, dataclasses.replace(self.grid, entries=entries)), start, stop)
        else:
            bits = pin(bits, self.grid)
        for axis, each in enumerate(self.each):
            if each > 1:
                ends = [(0, -size % each if i == axis else 0) for i, size in enumerate(bits.shape)]
                bits = jnp.max(_split(jnp.pad(bits, ends), axis, each), axis=axis + 1, initial=0)
        axes = tuple(name for names in shared for name in names)
        return max_over(axes)(as_float(bits)) if self.spec.local and reduce else as_float(bits)

    def own(self, grid: jax.Array) -> jax.Array:
        """Return this shard's part of a grid of the whole array."""
        return reshard(grid, self.of_whole.grid, self.grid) if self.spec.local else pin(grid, self.grid)

    def spread(self, grid: jax.Array, shape: Shape) -> jax.Array:
        """Repeat the value of each block for its subblocks: the inverse of `merge`.

        `shape` is the number of subblocks along each axis of the array.
        """
        full = shape
        if self.rows is not None:
            start, stop = self.rows
            shape = (*shape[:start], math.prod(shape[start:stop]), *shape[stop:])
        for axis, (each, shared) in enumerate(zip(self.each, self.shared_axes, strict=True)):
            if each > 1:
                grid = repeat_axis(grid, axis, each)
                size, local = shape[axis], self.spec.local and bool(shared)
                missing = max(0, size * (self.spec.count(shared) if local else 1) - grid.shape[axis])
                grid = jnp.pad(grid, [(0, missing if i == axis else 0) for i in range(grid.ndim)])
                start_of_shard = lax.axis_index(shared) * size if local else 0
                grid = lax.dynamic_slice_in_dim(grid, start_of_shard, size, axis)
        grid = pin(grid, self.grid)  # Without this constraint XLA shards the repeated grid and then moves it.
        entries = list(jax.typeof(grid).sharding.spec)
        if self.rows is not None:
            entries[start : start + 1] = [None] * (stop - start)
        return reshape(grid, full, entries)


def _starts(shared: list[tuple[str, ...]], shape: Shape) -> list[jax.Array | int]:
    return [lax.axis_index(names) * size if names else 0 for names, size in zip(shared, shape, strict=True)]


def _split(x: jax.Array, axis: int, each: int) -> jax.Array:
    sizes, entries = list(x.shape), list(jax.typeof(x).sharding.spec)
    sizes[axis : axis + 1] = [sizes[axis] // each, each]
    return reshape(x, sizes, [*entries[: axis + 1], None, *entries[axis + 1 :]])


def repeat_axis(x: jax.Array, axis: int, each: int) -> jax.Array:
    """Repeat each element of an unsharded axis `each` times."""
    sizes, entries = list(x.shape), list(jax.typeof(x).sharding.spec)
    wider = [*sizes[: axis + 1], each, *sizes[axis + 1 :]]
    x = lax.broadcast_in_dim(x, wider, [i + (i > axis) for i in range(len(sizes))])
    sizes[axis] *= each
    return reshape(x, sizes, entries)
