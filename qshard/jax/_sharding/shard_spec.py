"""The sharding of a tensor, resharding, and the matrix that the blocks of a sharded tensor tile.

The matrix of a tensor `[*lead, K]` is `[M, K]`: all leading axes are folded into one. Leading axes that devices shard,
such as batch and sequence, cannot be folded without communication: XLA would gather all but the first. So they stay
separate, and ops take `[*outer, M, K]`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from qshard import layout
from qshard._core import quantize_steps
from qshard._core.placement import Box
from qshard.formats import Format, Usage
from qshard.jax._ops.mesh import Spec, may_be_sharded, mesh_of, names_of, reshape, spec_of, vary_alike
from qshard.jax._ops.uint64 import Uint64, add_uint64, as_uint64, multiply_uint64
from qshard.jax._ops.validation import check_mesh_axis, check_spec_fits
from qshard.layout import Shape

Block = tuple[int, int]


@dataclass(frozen=True)
class ShardSpec:
    """The sharding of a tensor `[*lead, K]` over a mesh.

    Attributes:
      entries: for each axis of the tensor, the mesh axes that shard it; empty if the sharding is unknown.
      local: whether arrays are local shards, as in `shard_map`, or whole.
      own_blocks: in `shard_map`, whether blocks end where a shard ends. Otherwise they are the blocks of the whole
        tensor.
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
    ) -> ShardSpec:
        """Return the sharding of `x` `[*lead, K]`, from its type, from `spec`, or in `shard_map` from `axis_names`.

        In `shard_map`, `axis_names` shard the rows, unless `spec` says otherwise. `ndim` is the number of axes of the
        tensor, if `x` has a different number.
        """
        mesh, local, ndim = mesh_of(x, spec), bool(axis_names), x.ndim if ndim is None else ndim
        named = {name for entry in spec_of(spec, None) for name in names_of(entry)}
        if mesh.explicit_axes and not local and named.isdisjoint(mesh.auto_axes):
            partition = jax.typeof(x).sharding.spec
        elif local or spec is not None:
            partition = spec_of(spec, axis_names)
        else:
            return cls()
        entries = [names_of(entry) for entry in (*partition, *[None] * ndim)[:ndim]]
        if local:
            entries = [tuple(name for name in names if name in axis_names) for names in entries]
        return cls(tuple(entries), mesh, local, own_blocks and local)

    @classmethod
    def along(
        cls,
        x: jax.Array,
        axes: tuple[str, ...],
        spec: Spec,
        *,
        op: str,
        name: str,
        spec_name: str = "spec",
        transposed_of: int | None = None,
    ) -> ShardSpec:
        """Return the sharding of a tensor that is gathered along the mesh axes `axes`.

        It comes from the type of `x`, from `spec`, or is a sharding of rows along `axes`. In `shard_map`, `spec` names
        all mesh axes that shard the tensor. If `x` is a transpose, `transposed_of` is the number of axes of the
        original tensor, which `spec` and the result describe. `op`, `name` and `spec_name` are for errors, as in
        `spec_of_codes`.
        """
        mesh = mesh_of(x, spec)
        for axis in axes:
            check_mesh_axis(op, f"{name} ({axis!r})", axis, mesh, spec_name)
        ndim = x.ndim if transposed_of is None else transposed_of
        check_spec_fits(op, spec_name, spec, mesh, ndim)
        told = {name for entry in spec_of(spec, None) for name in names_of(entry)}
        if transposed_of is not None and not set(axes).isdisjoint(mesh.explicit_axes):
            shard_spec = cls.of(x).transposed
        else:
            spec = PartitionSpec(axes) if spec is None and axes else spec
            named = told.union(axes)
            local = () if named.isdisjoint(mesh.manual_axes) else tuple(mesh.manual_axes)
            shard_spec = cls.of(x, local, spec, ndim=ndim)
        for axis in axes:
            # Types omit mesh axes of size 1, and mesh axes of inner axes, which cannot shard a transposed plane.
            whole = axis in mesh.explicit_axes and (mesh.shape[axis] == 1 or axis in told)
            if not whole and axis not in shard_spec.axes:
                raise ValueError(
                    f"{op}: {spec_name} ({shard_spec.spec}) does not shard over {name} ({axis!r}); pass the spec that "
                    "the tensor has"
                )
        return shard_spec

    @property
    def row_axes(self) -> tuple[str, ...]:
        """The mesh axes that shard the rows of the matrix `[M, K]` into one range of rows a shard."""
        return self.entries[0] if len(self.entries) > 1 else ()

    @property
    def col_axes(self) -> tuple[str, ...]:
        return self.entries[-1] if self.entries else ()

    @property
    def inner_axes(self) -> tuple[str, ...]:
        """The mesh axes that shard leading axes other than the first, so that the rows of a shard are not one range."""
        return tuple(name for names in self.entries[1:-1] for name in names if self.count((name,)) > 1)

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(name for names in self.entries for name in names)

    @property
    def shards(self) -> tuple[int, int]:
        """The number of shards along rows and along columns of the matrix."""
        return self.count(self.row_axes), self.count(self.col_axes)

    def count(self, axes: tuple[str, ...]) -> int:
        """Return the number of shards along these mesh axes."""
        return math.prod(int(self.mesh.shape.get(name, 1)) for name in axes)

    @property
    def spec(self) -> PartitionSpec:
        return PartitionSpec(*(names or None for names in self.entries))

    @property
    def matrix(self) -> ShardSpec:
        """The sharding of the matrix, which has all leading axes folded into rows."""
        return dataclasses.replace(self, entries=(self.row_axes, self.col_axes))

    @property
    def transposed(self) -> ShardSpec:
        return dataclasses.replace(self, entries=(self.col_axes, self.row_axes))

    def without(self, axes: Sequence[str]) -> ShardSpec:
        left = tuple(tuple(name for name in names if name not in axes) for names in self.entries)
        return dataclasses.replace(self, entries=left)

    def of_blocks(self, shape: Shape, block: Shape) -> ShardSpec:
        """Return the sharding of the grid of scales of an array of this shape.

        It is the sharding of the array, except along axes where shards split blocks: there the grid is unsharded. So no
        grid has uneven shards. XLA replicates uneven shards by summing zero-padded copies, and in E8M0 byte 0 is
        2^-127, so the sum would be wrong.
        """
        held = (
            n == 1 or size % (unit if self.local else n * unit) == 0
            for size, unit, n in zip(shape, block, map(self.count, self.entries), strict=True)
        )
        kept = tuple(names if whole else () for names, whole in zip(self.entries, held, strict=True))
        return dataclasses.replace(self, entries=kept)

    def unsplit(self, shape: Shape, block: Block, rows: tuple[int, int] | None = None) -> Block:
        """Return the largest divisors of a block, in the last two axes, that no shard splits: the block if it is whole.

        An op on whole arrays is sharded only if all its blocks are whole, so truncated blocks at an edge count as split
        too. With `rows`, as in `partial_blocks`, no part of a block is in two matrices.
        """
        shards, size = [self.count(names) for names in self.entries[-2:]], block
        if not self.own_blocks and math.prod(shards) > 1:
            parts = shape[-2:] if self.local else [-(-size // n) for size, n in zip(shape[-2:], shards, strict=True)]
            size = tuple(  # type: ignore[assignment]
                unit if self.local and n == 1 else math.gcd(part, size, unit)
                for part, size, unit, n in zip(parts, shape[-2:], block, shards, strict=True)
            )
        if rows is None:
            return size
        last = rows[1] == len(shape)  # In a transposed plane, the rows of the tensor are the last axis.
        return (size[0], math.gcd(size[1], shape[-1])) if last else (math.gcd(size[0], shape[-2]), size[1])

    def splits(self, shape: Shape, block: Block, rows: tuple[int, int] | None = None) -> bool:
        """True if a shard, or with `rows` a matrix, ends inside a block."""
        return self.unsplit(shape, block, rows) != block

    def whole(self, shape: Shape) -> Shape:
        """Return the shape of the tensor that the blocks of `x` `[*lead, K]` tile.

        That is the whole tensor, or with `own_blocks` the shard.
        """
        if not self.local or self.own_blocks or not shape:
            return shape
        return tuple(size * self.count(axes) for size, axes in zip(shape, self.entries, strict=True))

    def box(self, shape: Shape) -> Box:
        """Return the box that a shard of this shape occupies in the whole tensor. Call it in `shard_map`.

        For `[*outer, M, K]` there is one box for each matrix: starts along outer axes are arrays that broadcast to
        `outer`.
        """
        start, outer = [], len(shape) - 2
        for axis, (size, names) in enumerate(zip(shape, self.entries, strict=True)):
            begin = jnp.asarray(lax.axis_index(names) * size if names else 0, jnp.uint32)
            if axis < outer:
                begin = begin + lax.iota(jnp.uint32, size).reshape(size, *(1,) * (outer - axis - 1))
            start.append(begin)
        whole = tuple(size * self.count(names) for size, names in zip(shape, self.entries, strict=True))
        return Box(whole, tuple(start), shape)


def reshard(x: jax.Array, before: ShardSpec, after: ShardSpec) -> jax.Array:
    """Move `x` from one sharding to another as integers: all-gather it along some mesh axes, slice it along others.

    XLA replicates some arrays by summing zero-padded copies. Such a sum changes bytes of scales, but not integers. XLA
    may move a gather past a cast, but not past a constraint on each side.
    """
    integer = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    bits = lax.bitcast_convert_type(x, integer)
    if before.local:
        return lax.bitcast_convert_type(_reshard_local(bits, before, after), x.dtype)
    if not _explicit(before):
        bits = _pin(bits, before)
        # Shardy applies the last of consecutive constraints on an array to all its readers. A cast separates the two.
        if x.dtype == integer:
            bits = lax.bitcast_convert_type(bits, jnp.dtype(f"int{8 * x.dtype.itemsize}"))
    return lax.bitcast_convert_type(_pin(bits, after), x.dtype)


def _reshard_local(bits: jax.Array, before: ShardSpec, after: ShardSpec) -> jax.Array:
    for axis, (had, has) in enumerate(zip(before.entries, after.entries, strict=True)):
        if gathered := tuple(name for name in had if name not in has):
            bits = lax.all_gather(bits, gathered, axis=axis, tiled=True)
        if has and not had:
            size = bits.shape[axis] // before.count(has)
            bits = lax.dynamic_slice_in_dim(bits, lax.axis_index(has) * size, size, axis)
    return bits


def pin(x: jax.Array, shard_spec: ShardSpec) -> jax.Array:
    """Constrain `x` to a sharding, as integers. In `shard_map` this has no effect."""
    if shard_spec.local:
        return x
    return _pin(x, shard_spec) if jnp.issubdtype(x.dtype, jnp.integer) else reshard(x, shard_spec, shard_spec)


def _pin(bits: jax.Array, shard_spec: ShardSpec) -> jax.Array:
    # Outside of `jit`, JAX accepts even shardings only.
    even = [
        names if size % shard_spec.count(names) == 0 else ()
        for size, names in zip(bits.shape, shard_spec.entries, strict=True)
    ]
    sharding = NamedSharding(shard_spec.mesh, PartitionSpec(*(names or None for names in even)))
    held: jax.Array = (jax.sharding.reshard if _explicit(shard_spec) else lax.with_sharding_constraint)(bits, sharding)
    return held


def whole_along(x: jax.Array, axis: int, mesh: Any) -> jax.Array:
    """Constrain `x` to be unsharded along one axis of an Auto mesh, and leave the others to XLA. It moves integers."""
    free = PartitionSpec.UNCONSTRAINED
    spec = PartitionSpec(*(None if i == axis % x.ndim else free for i in range(x.ndim)))
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    return lax.bitcast_convert_type(lax.with_sharding_constraint(bits, NamedSharding(mesh, spec)), x.dtype)


def _explicit(shard_spec: ShardSpec) -> bool:
    return bool(shard_spec.mesh.explicit_axes) and set(shard_spec.axes).isdisjoint(shard_spec.mesh.auto_axes)


def matrix_of(x: jax.Array, added: int = 0) -> jax.Array:
    """Fold `x` `[*lead, K]` to a matrix `[M, K]`, after `added` axes.

    On Explicit meshes only the first of the leading axes, and K, stay sharded.
    """
    own = x.ndim - added
    if own < 2:
        front, last = x.shape[:added], x.shape[added:]
        entries = jax.typeof(x).sharding.spec
        return reshape(x, (*front, 1, *(last or (1,))), (*entries[:added], None, *(entries[added:] or (None,))))
    return fold_axes(x, added, x.ndim - 1)


def fold_axes(x: jax.Array, start: int, stop: int) -> jax.Array:
    """Fold the axes from `start` up to `stop` into one. On Explicit meshes it has the sharding of the first of them."""
    if stop - start == 1:
        return x
    sharding = jax.typeof(x).sharding
    entries = sharding.spec
    kept = PartitionSpec(*entries[: start + 1], *[None] * (stop - start - 1), *entries[stop:])
    if kept != entries and sharding.mesh.explicit_axes:
        x = jax.sharding.reshard(x, NamedSharding(sharding.mesh, kept))
    sizes = (*x.shape[:start], math.prod(x.shape[start:stop]), *x.shape[stop:])
    return reshape(x, sizes, (*entries[: start + 1], *entries[stop:]))


def unfold(y: jax.Array, shape: tuple[int, ...], added: int = 0) -> jax.Array:
    """Reshape a matrix, or a grid with one value for each block, to the axes of a tensor: inverts `matrix_of`."""
    entries = jax.typeof(y).sharding.spec
    first, last = entries[added:] if y.ndim - added == 2 else (None, None)
    return reshape(y, shape, (*entries[:added], *_ends(first, last, len(shape) - added)))


def may_shard_rows(x: jax.Array, spec: Spec = None) -> bool:
    """True if the rows of `x` `[*lead, K]` may be sharded, by its type or `spec`. In `shard_map`: sharded further."""
    sharding = jax.typeof(x).sharding
    if sharding.mesh.size == 1 or set(sharding.mesh.axis_types) <= {AxisType.Manual}:
        return False
    if sharding.mesh.auto_axes:
        return True  # Types do not show what XLA shards.
    return any(entry is not None for each in (sharding.spec, spec_of(spec, None)) for entry in each[: x.ndim - 1])


def _ends(first: Any, last: Any, ndim: int) -> tuple[Any, ...]:
    return (first, *[None] * (ndim - 2), last) if ndim > 1 else (last,)[:ndim]


def matrices_of(
    x: jax.Array,
    places: dict[Usage, layout.PlaneLayout],
    shard_spec: ShardSpec,
    op: str,
    name: str,
    philox: bool = False,
) -> tuple[jax.Array, ShardSpec]:
    """Return the matrix `[M, K]` that the blocks of `x` tile, and its sharding.

    If a mesh may shard axes that would be folded, return `[*outer, M, K]` instead. It has the same blocks if M is a
    whole number of blocks, and parts of them otherwise. `places` are the layouts of the planes to compute, and `philox`
    says whether random bits are used. Raises ValueError in `shard_map` if shards split blocks such that the rows of a
    block are not contiguous.
    """
    scattered = bool(shard_spec.inner_axes)
    if x.ndim < 3 or not (scattered or may_be_sharded(x)):
        return matrix_of(x), shard_spec.matrix
    sides = {where.format.block_shape(where.usage)[0] for where in places.values()}
    if all(x.shape[-2] % side == 0 for side in sides) or (scattered and not shard_spec.local):
        return x, shard_spec
    if scattered and (philox or not shard_spec.own_blocks):
        raise scattered_rows_error(x, next(iter(places.values())).format, max(sides), shard_spec, op, name)
    return matrix_of(x), shard_spec.matrix


def scattered_rows_error(x: jax.Array, fmt: Format, unit: int, shard_spec: ShardSpec, op: str, name: str) -> ValueError:
    """Return the error for a shard with scattered rows, where blocks or random bits need contiguous rows."""
    return ValueError(
        f"{op}: {name} {x.shape} is a shard ({shard_spec.spec}) whose rows are not adjacent in the whole, and its axis "
        f"of {x.shape[-2]} splits the {unit}-row blocks of {fmt}; shard it on block boundaries"
    )


def philox_of(
    seed: jax.Array | None, fmt: Format, shard_spec: ShardSpec, shape: layout.Shape, transposed: bool = False
) -> quantize_steps.Philox | None:
    """Return the Philox key and offset of a tensor, in `shard_map` of its shard; None if it needs no random bits.

    With `transposed`, the tensor is a transpose and uses the random bits of the original matrix.
    """
    if seed is None or not fmt.stochastic:
        return None
    rows, columns = layout.matrix_shape(shape)
    if transposed:
        of_transpose = philox_of(
            seed, fmt, shard_spec.transposed if shard_spec.entries else shard_spec, (columns, rows)
        )
        return of_transpose and of_transpose.transposed(rows)
    if not shard_spec.local:
        return quantize_steps.Philox(seed, jnp.asarray(as_uint64(0)), columns)
    if not shard_spec.inner_axes:
        shard_spec, shape = shard_spec.matrix, (rows, columns)

    def multiply_add(row: jax.Array, step: int, column: jax.Array) -> Uint64:
        return add_uint64(multiply_uint64(row, step), (column, jnp.zeros_like(column)))

    return shard_spec.box(shape).philox(seed, lambda words: jnp.stack(vary_alike(*words), axis=-1), multiply_add)
