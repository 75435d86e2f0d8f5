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

        There, it is by rows unless `spec` says else. Only cuts of the first and the last axis keep a shard's rows
        together. Other leading axes count as whole here, and XLA gathers what it must. `ndim` says how many axes the
        tensor has, if `x` has others.
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
        """The mesh axes that cut the rows of the tensor as a matrix `[M, K]`."""
        return self.entries[0] if len(self.entries) > 1 else ()

    @property
    def col_axes(self) -> tuple[str, ...]:
        return self.entries[-1] if self.entries else ()

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes over which shards of the matrix differ."""
        return self.row_axes + self.col_axes

    @property
    def shards(self) -> tuple[int, int]:
        return self.count(self.row_axes), self.count(self.col_axes)

    def count(self, axes: tuple[str, ...]) -> int:
        return math.prod(int(self.mesh.shape.get(name, 1)) for name in axes)

    @property
    def spec(self) -> PartitionSpec:
        return PartitionSpec(*(names or None for names in self.entries))

    @property
    def transposed(self) -> Cut:
        return dataclasses.replace(self, entries=(self.col_axes, self.row_axes))

    def whole(self, shape: Shape) -> Shape:
        """The shape of the tensor whose blocks `x` `[*lead, K]` has: of the whole, unless shards have their own."""
        if not self.local or self.own_blocks or not shape:
            return shape
        (rows, cols), last = self.shards, len(shape) - 1
        return tuple(size * (cols if i == last else rows if i == 0 else 1) for i, size in enumerate(shape))

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

        On every device the same; in `shard_map` without `reduce`, what each shard has to say of it.
        """
        bits = as_bits(amax)
        if self.local:
            shape = tuple(size * n for size, n in zip(bits.shape, self.shards, strict=True))
            whole, bits = vary_alike(jnp.zeros(shape, bits.dtype), bits)
            bits = lax.dynamic_update_slice(whole, bits, self.start(bits.shape))
        else:
            bits = self.everywhere(bits)
        padded = jnp.pad(bits, [(0, -size % part) for size, part in zip(bits.shape, parts, strict=True)])
        rows, cols = (size // part for size, part in zip(padded.shape, parts, strict=True))
        merged = as_float(jnp.max(padded.reshape(rows, parts[0], cols, parts[1]), axis=(1, 3), initial=0))
        return max_over(self.axes)(merged) if self.local and reduce else merged

    def everywhere(self, x: Any) -> Any:
        """Arrays of small size, whole on every device and held there. In `shard_map`, they are as they are."""
        if self.local:
            return x
        pin = jax.sharding.reshard if self.mesh.explicit_axes else lax.with_sharding_constraint
        return jax.tree.map(lambda array: pin(array, NamedSharding(self.mesh, PartitionSpec())), x)

    def of_pieces(self, grid: jax.Array, parts: Shape, shape: Shape) -> jax.Array:
        """The value of its block for each piece of this shard, or of the whole: the inverse of `merged`."""
        fine = jnp.repeat(jnp.repeat(grid, parts[0], axis=0), parts[1], axis=1)
        if self.local:
            start = self.start(shape)
            missing = [(0, max(0, n * s - f)) for n, s, f in zip(self.shards, shape, fine.shape, strict=True)]
            return lax.dynamic_slice(jnp.pad(fine, missing), start, shape)
        return fine[: shape[0], : shape[1]]


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
    if x.ndim - added == 2:
        return x
    front, own, sharding = x.shape[:added], x.shape[added:], jax.typeof(x).sharding
    entries = sharding.spec
    first, last = (entries[added] if len(own) > 1 else None), (entries[-1] if own else None)
    kept = PartitionSpec(*entries[:added], *_ends(first, last, len(own)))
    if kept != entries:
        x = jax.sharding.reshard(x, NamedSharding(sharding.mesh, kept))
    return reshaped(x, (*front, math.prod(own[:-1]), own[-1] if own else 1), (*entries[:added], first, last))


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
