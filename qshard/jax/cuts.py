"""Where an array is of a whole: how a tensor is cut over devices, and the blocks that its cuts run through.

A block is quantized by whoever holds all of it. Where shards cut blocks, the unit is a *piece*: the largest divisor of
a block that is not cut. Amaxes of pieces are merged into those of blocks, on every device, and each piece is cast with
the scale of its block. Pieces serve cuts of rows and of columns, in `shard_map` and where XLA cuts whole arrays; flat
slices, which are how ZeRO cuts masters, serve neither columns nor XLA.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from qshard.jax.arguments import check_spec_fits
from qshard.jax.ops import names_of, reshaped
from qshard.layout import Shape

AxisName = str | Sequence[str] | None
Spec = PartitionSpec | NamedSharding | None


@dataclass(frozen=True)
class Cut:
    """How a tensor `[*lead, K]` is cut over devices, so which part of it an array in hand is.

    Attributes:
      entries: the mesh axes that cut each axis of the tensor; empty if nothing says how it is cut.
      mesh: the mesh that has these axes.
      local: arrays in hand are shards, as in `shard_map`; else they are whole.
      own_blocks: blocks end where a shard ends, in `shard_map`; else they are those of the whole.
    """

    entries: tuple[tuple[str, ...], ...] = ()
    mesh: Any = None
    local: bool = False
    own_blocks: bool = False

    @classmethod
    def of(
        cls,
        x: jax.Array,
        axis_names: tuple[str, ...] = (),
        spec: Spec = None,
        *,
        ndim: int | None = None,
        own_blocks: bool = False,
    ) -> Cut:
        """The cut of `x` `[*lead, K]`: by its type, by `spec`, or in `shard_map` over `axis_names`.

        There, it is by rows unless `spec` says else. `ndim` says how many axes the tensor has, if `x` has others.
        """
        mesh, local, ndim = mesh_of(x, spec), bool(axis_names), x.ndim if ndim is None else ndim
        named = {name for entry in spec_of(spec, None) for name in names_of(entry)}
        if mesh.explicit_axes and not local and named.isdisjoint(mesh.auto_axes):
            cut = jax.typeof(x).sharding.spec
        elif local or spec is not None:
            cut = spec_of(spec, axis_names)
        else:
            return cls()
        entries = [names_of(entry) for entry in (*cut, *[None] * ndim)[:ndim]]
        if local:
            entries = [tuple(name for name in names if name in axis_names) for names in entries]
        return cls(tuple(entries), mesh, local, own_blocks and local)

    @classmethod
    def along(
        cls,
        x: jax.Array,
        axis_name: str,
        spec: Spec,
        *,
        op: str,
        name: str,
        spec_name: str = "spec",
        transposed_of: int | None = None,
    ) -> Cut:
        """The cut of `x` that is gathered along a mesh axis: by its type, by `spec`, or by rows along that axis.

        With `transposed_of`, `x` is the transpose of a tensor of so many axes, and `spec` and the cut are of that.

        Raises:
          TypeError, ValueError: what `op` calls `name` is no axis of the mesh, or cuts no axis of `x`.
        """
        mesh = mesh_of(x, spec)
        if not isinstance(axis_name, str):
            raise TypeError(f"{op}: {name} ({axis_name!r}) is not the name of one mesh axis; gather over one at a time")
        if axis_name not in mesh.axis_names:
            raise ValueError(
                f"{op}: {name} ({axis_name!r}) is not an axis of the mesh {mesh.axis_names}; "
                f"enter the mesh with jax.set_mesh, or pass {spec_name} as a NamedSharding"
            )
        ndim = x.ndim if transposed_of is None else transposed_of
        check_spec_fits(op, spec_name, spec, mesh, ndim)
        if transposed_of is not None and axis_name in mesh.explicit_axes:
            cut = cls.of(x).transposed
        else:
            local = (axis_name,) if axis_name in mesh.manual_axes else ()
            cut = cls.of(x, local, PartitionSpec(axis_name) if spec is None else spec, ndim=ndim)
        if not any(axis_name in names for names in cut.entries):
            raise ValueError(
                f"{op}: {spec_name} ({cut.spec}) does not have {name} ({axis_name!r}); name what cuts the tensor"
            )
        return cut

    @property
    def row_axes(self) -> tuple[str, ...]:
        """The mesh axes that cut the rows of the tensor as a matrix `[M, K]`, so that those of a shard are together."""
        return self.entries[0] if len(self.entries) > 1 else ()

    @property
    def col_axes(self) -> tuple[str, ...]:
        return self.entries[-1] if self.entries else ()

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes over which shards differ."""
        return tuple(name for names in self.entries for name in names)

    @property
    def shards(self) -> tuple[int, int]:
        return self.count(self.row_axes), self.count(self.col_axes)

    def count(self, axes: tuple[str, ...]) -> int:
        return math.prod(int(self.mesh.shape.get(name, 1)) for name in axes)

    @property
    def spec(self) -> PartitionSpec:
        return PartitionSpec(*(names or None for names in self.entries))

    @property
    def inner(self) -> Cut:
        """The cut of the last two axes: of the matrices `[M, K]` that a tensor `[*outer, M, K]` is made of."""
        return dataclasses.replace(self, entries=self.entries[-2:])

    @property
    def transposed(self) -> Cut:
        return dataclasses.replace(self, entries=(self.col_axes, self.row_axes))

    def whole(self, shape: Shape) -> Shape:
        """The shape of the tensor whose blocks `x` `[*lead, K]` has: of the whole, unless shards have their own."""
        if not self.local or self.own_blocks or not shape:
            return shape
        return tuple(size * self.count(axes) for size, axes in zip(shape, self.entries, strict=True))

    def pieces(self, shape: Shape, block: tuple[int, int]) -> tuple[int, int]:
        """The largest divisors of a block that no shard of a matrix cuts; `block` itself, if none is cut.

        An op on whole arrays is cut only if all its blocks are whole, so blocks at an edge count as cut too.
        """
        if self.own_blocks or self.shards == (1, 1):
            return block
        parts = shape if self.local else tuple(-(-size // n) for size, n in zip(shape, self.shards, strict=True))
        rows, cols = (
            unit if self.local and n == 1 else math.gcd(part, size, unit)
            for part, size, unit, n in zip(parts, shape, block, self.shards, strict=True)
        )
        return rows, cols

    def start(self, shape: Shape) -> tuple[Any, Any]:
        """Where a shard of this shape begins in the whole, in `shard_map`."""
        return tuple(  # type: ignore[return-value]
            lax.axis_index(axes) * size if axes else 0
            for axes, size in zip((self.row_axes, self.col_axes), shape, strict=True)
        )

    def merged(self, amax: jax.Array, parts: Shape, *, reduce: bool = True) -> jax.Array:
        """The amaxes of the blocks of the whole from those of pieces, `parts` of them along each axis.

        On every device the same, but for axes along which nothing is merged where types say how they are cut; in
        `shard_map` without `reduce`, what each shard has to say of it.
        """
        bits = as_bits(amax)
        outer = bits.ndim - 2
        if self.local:
            size = tuple(size * n for size, n in zip(bits.shape[outer:], self.shards, strict=True))
            whole, bits = vary_alike(jnp.zeros((*bits.shape[:outer], *size), bits.dtype), bits)
            bits = lax.dynamic_update_slice(whole, bits, (0,) * outer + self.start(bits.shape[outer:]))
        else:
            bits = self.everywhere(bits, *self.kept(parts, bits.ndim))
        for axis, part in zip((outer, outer + 1), parts, strict=True):
            if part > 1:
                bits = _max_of_parts(bits, axis, part)
        merged = as_float(bits)
        return max_over(self.axes)(merged) if self.local and reduce else merged

    def rows_as_one(self, amax: jax.Array, transposed: bool) -> jax.Array:
        """Amaxes of pieces of `[*outer, M, K]`, or of its transpose `[K, *outer, M]`, as those of a matrix."""
        start, stop = (1, amax.ndim) if transposed else (0, amax.ndim - 1)
        return as_float(folded(self.everywhere(as_bits(amax), 0 if transposed else amax.ndim - 1), start, stop))

    def rows_apart(self, grid: jax.Array, parts: Shape, shape: Shape, transposed: bool) -> jax.Array:
        """`of_pieces` for `rows_as_one`: the values of the blocks of a matrix, for pieces of this shape."""
        rows = shape[1:] if transposed else shape[:-1]
        count = math.prod(rows)
        fine = self.of_pieces(grid, parts, (shape[0], count) if transposed else (count, shape[-1]))
        (first, last), none = jax.typeof(fine).sharding.spec, [None] * len(rows)
        return reshaped(fine, shape, (first, *none) if transposed else (*none, last))

    @staticmethod
    def kept(parts: Shape, ndim: int) -> tuple[int, ...]:
        """Of a grid of so many axes, those along which blocks are whole."""
        return (*range(ndim - 2), *(ndim - 2 + i for i in (0, 1) if parts[i] == 1))

    def everywhere(self, x: Any, *kept: int) -> Any:
        """Arrays of small size, whole on every device and held there. In `shard_map`, they are as they are.

        On Explicit meshes, axes `kept` stay cut, as their types say.
        """
        if self.local:
            return x

        def pinned(array: jax.Array) -> Any:
            if not self.mesh.explicit_axes:
                return lax.with_sharding_constraint(array, NamedSharding(self.mesh, PartitionSpec()))
            entries = jax.typeof(array).sharding.spec
            spec = PartitionSpec(*(entry if i in kept else None for i, entry in enumerate(entries)))
            return jax.sharding.reshard(array, NamedSharding(self.mesh, spec))

        return jax.tree.map(pinned, x)

    def of_pieces(self, grid: jax.Array, parts: Shape, shape: Shape) -> jax.Array:
        """The value of its block for each piece of this shard, or of the whole: the inverse of `merged`.

        `shape`: how many pieces there are along the last two axes.
        """
        outer = grid.ndim - 2
        for axis, part in zip((outer, outer + 1), parts, strict=True):
            grid = repeated(grid, axis, part)
        if self.local:
            start = self.start(shape)
            missing = [(0, max(0, n * s - f)) for n, s, f in zip(self.shards, shape, grid.shape[outer:], strict=True)]
            padded = jnp.pad(grid, [(0, 0)] * outer + missing)
            return lax.dynamic_slice(padded, (0,) * outer + start, (*grid.shape[:outer], *shape))
        for axis, size in zip((outer, outer + 1), shape, strict=True):
            if grid.shape[axis] > size:
                grid = lax.slice_in_dim(grid, 0, size, axis=axis)
        return grid


def repeated(grid: jax.Array, axis: int, count: int) -> jax.Array:
    """Each value `count` times along an axis, and cut as before."""
    if count == 1:
        return grid
    sizes, entries = list(grid.shape), jax.typeof(grid).sharding.spec
    apart = [*sizes[: axis + 1], count, *sizes[axis + 1 :]]
    made = lax.broadcast_in_dim(grid, apart, [i for i in range(len(apart)) if i != axis + 1])
    sizes[axis] *= count
    return reshaped(made, sizes, entries)


def _max_of_parts(bits: jax.Array, axis: int, part: int) -> jax.Array:
    """The maximum of each `part` neighbours along an axis that is not cut."""
    missing = -bits.shape[axis] % part
    if missing:
        bits = jnp.pad(bits, [(0, missing if i == axis else 0) for i in range(bits.ndim)])
    entries = jax.typeof(bits).sharding.spec
    sizes = (*bits.shape[:axis], bits.shape[axis] // part, part, *bits.shape[axis + 1 :])
    return jnp.max(reshaped(bits, sizes, (*entries[: axis + 1], None, *entries[axis + 1 :])), axis=axis + 1, initial=0)


def max_over(axes: tuple[str, ...]) -> Callable[[jax.Array], jax.Array]:
    """The maximum of fp32 amaxes over manual mesh axes, of their bits as integers: so it is exact, and NaN wins."""
    return lambda amax: as_float(lax.pmax(as_bits(amax), axes)) if axes else amax


def as_bits(amax: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(amax, jnp.int32)


def as_float(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def vary_alike(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays, typed as varying over every manual axis over which any of them does."""
    own = [frozenset(jax.typeof(a).manual_axis_type.varying) for a in arrays]
    missing = [tuple(sorted(frozenset().union(*own) - axes)) for axes in own]
    return tuple(lax.pcast(a, m, to="varying") if m else a for a, m in zip(arrays, missing, strict=True))


def matrix_of(x: jax.Array, added: int = 0) -> jax.Array:
    """`x` `[*lead, K]` as a matrix `[M, K]`, after `added` axes. On Explicit meshes, only its ends stay cut."""
    own = x.ndim - added
    if own < 2:
        front, last = x.shape[:added], x.shape[added:]
        entries = jax.typeof(x).sharding.spec
        return reshaped(x, (*front, 1, *(last or (1,))), (*entries[:added], None, *(entries[added:] or (None,))))
    return folded(x, added, x.ndim - 1)


def folded(x: jax.Array, start: int, stop: int) -> jax.Array:
    """`x` with the axes from `start` up to `stop` as one. On Explicit meshes it is cut as the first of them is."""
    if stop - start == 1:
        return x
    sharding = jax.typeof(x).sharding
    entries = sharding.spec
    kept = PartitionSpec(*entries[: start + 1], *[None] * (stop - start - 1), *entries[stop:])
    if kept != entries and sharding.mesh.explicit_axes:
        x = jax.sharding.reshard(x, NamedSharding(sharding.mesh, kept))
    sizes = (*x.shape[:start], math.prod(x.shape[start:stop]), *x.shape[stop:])
    return reshaped(x, sizes, (*entries[: start + 1], *entries[stop:]))


def shaped(y: jax.Array, shape: tuple[int, ...], added: int = 0) -> jax.Array:
    """A matrix, or what has one value a block of it, in the shape of a tensor: the inverse of `matrix_of`."""
    entries = jax.typeof(y).sharding.spec
    first, last = entries[added:] if y.ndim - added == 2 else (None, None)
    return reshaped(y, shape, (*entries[:added], *_ends(first, last, len(shape) - added)))


def cuts_rows(x: jax.Array, spec: Spec = None) -> bool:
    """Whether the rows of `x` `[*lead, K]`, in `shard_map` of the shard, may be cut, by its type or by `spec`."""
    sharding = jax.typeof(x).sharding
    if sharding.mesh.size == 1 or set(sharding.mesh.axis_types) <= {AxisType.Manual}:
        return False
    if sharding.mesh.auto_axes:
        return True  # They may: what XLA cuts, no type says.
    return any(entry is not None for cut in (sharding.spec, spec_of(spec, None)) for entry in cut[: x.ndim - 1])


def _ends(first: Any, last: Any, ndim: int) -> tuple[Any, ...]:
    return (first, *[None] * (ndim - 2), last) if ndim > 1 else (last,)[:ndim]


def mesh_of(x: jax.Array, spec: Spec) -> Any:
    """The mesh by the type of `x`, else of `spec`, else of the context."""
    for mesh in (jax.typeof(x).sharding.mesh, getattr(spec, "mesh", None)):
        if mesh is not None and not mesh.empty:
            return mesh
    return jax.sharding.get_abstract_mesh()


def spec_of(spec: Spec, axis_names: str | tuple[str, ...] | None) -> PartitionSpec:
    """By rows, where nothing else is said."""
    if spec is None:
        return PartitionSpec(axis_names)
    return spec.spec if isinstance(spec, NamedSharding) else spec
