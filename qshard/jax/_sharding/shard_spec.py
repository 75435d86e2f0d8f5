"""Where an array is of a whole: how a tensor is cut over devices, and how arrays go from one cut to another."""

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

from qshard.jax._ops.bind import names_of, reshaped
from qshard.jax._ops.validation import check_spec_fits
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
        axes: tuple[str, ...],
        spec: Spec,
        *,
        op: str,
        name: str,
        spec_name: str = "spec",
        transposed_of: int | None = None,
    ) -> Cut:
        """The cut of `x` that is gathered along mesh axes: by its type, by `spec`, or by rows along those axes.

        In `shard_map`, `spec` tells all that cuts the tensor. With `transposed_of`, `x` is the transpose of a tensor of
        so many axes, and `spec` and the cut are of that.

        Raises:
          ValueError: one of what `op` calls `name` is no axis of the mesh, or cuts no axis of `x`.
        """
        mesh = mesh_of(x, spec)
        for axis in axes:
            if axis not in mesh.axis_names:
                raise ValueError(
                    f"{op}: {name} ({axis!r}) is not an axis of the mesh {mesh.axis_names}; "
                    f"enter the mesh with jax.set_mesh, or pass {spec_name} as a NamedSharding"
                )
        ndim = x.ndim if transposed_of is None else transposed_of
        check_spec_fits(op, spec_name, spec, mesh, ndim)
        told = {name for entry in spec_of(spec, None) for name in names_of(entry)}
        if transposed_of is not None and not set(axes).isdisjoint(mesh.explicit_axes):
            cut = cls.of(x).transposed
        else:
            spec = PartitionSpec(axes) if spec is None and axes else spec
            named = told.union(axes)
            local = () if named.isdisjoint(mesh.manual_axes) else tuple(mesh.manual_axes)
            cut = cls.of(x, local, spec, ndim=ndim)
        for axis in axes:
            # Types leave out mesh axes of one device, and those of inner cuts, which a transposed plane cannot have.
            whole = axis in mesh.explicit_axes and (mesh.shape[axis] == 1 or axis in told)
            if not whole and axis not in cut.axes:
                raise ValueError(
                    f"{op}: {spec_name} ({cut.spec}) does not have {name} ({axis!r}); name what cuts the tensor"
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
    def inner_axes(self) -> tuple[str, ...]:
        """The mesh axes that cut leading axes other than the first: a shard's rows do not follow one another."""
        return tuple(name for names in self.entries[1:-1] for name in names if self.count((name,)) > 1)

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
    def matrix(self) -> Cut:
        """Of the tensor as a matrix, its leading axes folded into rows."""
        return dataclasses.replace(self, entries=(self.row_axes, self.col_axes))

    @property
    def transposed(self) -> Cut:
        return dataclasses.replace(self, entries=(self.col_axes, self.row_axes))

    def without(self, axes: Sequence[str]) -> Cut:
        """Not cut along these mesh axes."""
        left = tuple(tuple(name for name in names if name not in axes) for names in self.entries)
        return dataclasses.replace(self, entries=left)

    def of_blocks(self, shape: Shape, block: Shape) -> Cut:
        """The cut of a grid of scales, of an array of this shape: along an axis as the array, or not at all.

        Not at all where shards cut blocks. So no grid is cut unevenly, which XLA answers with sums of scales.
        """
        held = (
            n == 1 or size % (unit if self.local else n * unit) == 0
            for size, unit, n in zip(shape, block, map(self.count, self.entries), strict=True)
        )
        kept = tuple(names if whole else () for names, whole in zip(self.entries, held, strict=True))
        return dataclasses.replace(self, entries=kept)

    def whole(self, shape: Shape) -> Shape:
        """The shape of the tensor whose blocks `x` `[*lead, K]` has: of the whole, unless shards have their own."""
        if not self.local or self.own_blocks or not shape:
            return shape
        return tuple(size * self.count(axes) for size, axes in zip(shape, self.entries, strict=True))

    def start(self, shape: Shape) -> tuple[Any, Any]:
        """Where a shard of this shape begins in the whole matrix, in `shard_map`."""
        return tuple(  # type: ignore[return-value]
            lax.axis_index(axes) * size if axes else 0
            for axes, size in zip((self.row_axes, self.col_axes), shape, strict=True)
        )


def moved(x: jax.Array, before: Cut, after: Cut) -> jax.Array:
    """`x`, cut as `before`, as `after` says: gathered along some mesh axes, sliced along others; as integers.

    XLA replicates some arrays by adding zeros to them, which is not exact for bytes that are no numbers to it: those of
    a scale. It is free to move a gather past a cast, but not past both pins.
    """
    integer = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    bits = lax.bitcast_convert_type(x, integer)
    if before.local:
        return lax.bitcast_convert_type(_moved(bits, before, after), x.dtype)
    if not _explicit(before):
        bits = _pinned(bits, before)
        if x.dtype == integer:  # Shardy gives all who read an array the last of the pins in a row on it: here, no row.
            bits = lax.bitcast_convert_type(bits, jnp.dtype(f"int{8 * x.dtype.itemsize}"))
    return lax.bitcast_convert_type(_pinned(bits, after), x.dtype)


def _moved(bits: jax.Array, before: Cut, after: Cut) -> jax.Array:
    """In `shard_map`."""
    for axis, (had, has) in enumerate(zip(before.entries, after.entries, strict=True)):
        if gathered := tuple(name for name in had if name not in has):
            bits = lax.all_gather(bits, gathered, axis=axis, tiled=True)
        if has and not had:
            size = bits.shape[axis] // before.count(has)
            bits = lax.dynamic_slice_in_dim(bits, lax.axis_index(has) * size, size, axis)
    return bits


def pinned(x: jax.Array, cut: Cut) -> jax.Array:
    """`x` held to a cut, as integers. In `shard_map` it is as it is."""
    if cut.local:
        return x
    return _pinned(x, cut) if jnp.issubdtype(x.dtype, jnp.integer) else moved(x, cut, cut)


def _pinned(bits: jax.Array, cut: Cut) -> jax.Array:
    # Outside of `jit`, JAX takes only what is cut evenly.
    even = [names if size % cut.count(names) == 0 else () for size, names in zip(bits.shape, cut.entries, strict=True)]
    sharding = NamedSharding(cut.mesh, PartitionSpec(*(names or None for names in even)))
    held: jax.Array = (jax.sharding.reshard if _explicit(cut) else lax.with_sharding_constraint)(bits, sharding)
    return held


def whole_along(x: jax.Array, axis: int, mesh: Any) -> jax.Array:
    """`x`, whole along one axis on an Auto mesh, and cut along the others as XLA likes. It moves as integers."""
    free = PartitionSpec.UNCONSTRAINED
    spec = PartitionSpec(*(None if i == axis % x.ndim else free for i in range(x.ndim)))
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    return lax.bitcast_convert_type(lax.with_sharding_constraint(bits, NamedSharding(mesh, spec)), x.dtype)


def _explicit(cut: Cut) -> bool:
    return bool(cut.mesh.explicit_axes) and set(cut.axes).isdisjoint(cut.mesh.auto_axes)


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


def types_tell(axes: Sequence[str] | None = None) -> bool:
    """Whether types say over which mesh axes an array varies, all manual ones or these: not under `check_vma=False`."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = [axis for axis in mesh.manual_axes if mesh.shape[axis] > 1] if axes is None else axes
    return all(axis in jax.typeof(lax.axis_index(axis)).manual_axis_type.varying for axis in axes)


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
