"""How a tensor is cut over devices, and the blocks that its cuts run through.

A block is quantized by whoever holds all of it. Where shards cut blocks, the unit is a *piece*: the largest divisor of
a block that is not cut. Amaxes of pieces are merged into those of blocks, on every device, and each piece is cast with
the scale of its block.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from qshard.jax.ops import names_of

__all__ = ["Cut", "Spec", "cuts_rows", "matrix_of", "mesh_of", "shaped", "spec_of", "vary_alike"]

Spec = PartitionSpec | NamedSharding | None
Size = tuple[int, ...]
_UNCUT: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cut:
    """How a matrix `[M, K]` is cut.

    Attributes:
      rows, cols: how many shards there are along each axis.
      row_axes, col_axes: the mesh axes that make them.
      local: whether arrays are shards, as in `shard_map`, or whole.
      mesh: of whole arrays that are cut, else None.
    """

    rows: int = 1
    cols: int = 1
    row_axes: tuple[str, ...] = _UNCUT
    col_axes: tuple[str, ...] = _UNCUT
    local: bool = False
    mesh: Any = None

    @classmethod
    def of(cls, x: jax.Array, axis_names: tuple[str, ...] = (), spec: Spec = None) -> Cut:
        """The cut of `x` `[*lead, K]`: by its type, by `spec`, or in `shard_map` over `axis_names`.

        There, it is by rows unless `spec` says else. Only cuts of the first and the last axis keep a shard's rows
        together. Other leading axes count as whole here, and XLA gathers what it must.
        """
        own, mesh = jax.typeof(x).sharding.spec, mesh_of(x, spec)
        local = bool(axis_names)
        if mesh.explicit_axes and not local:
            cut = own
        elif local or spec is not None:
            cut = spec_of(spec, axis_names)
        else:
            return cls()
        entries = [names_of(entry) for entry in (*cut, *[None] * x.ndim)[: x.ndim]]
        if local:
            entries = [tuple(name for name in names if name in axis_names) for names in entries]
        last = entries.pop() if entries else ()
        first = entries[0] if entries else ()
        rows, cols = (math.prod(_size(mesh, name) for name in names) for names in (first, last))
        return cls(rows, cols, first, last, local, None if local else mesh)

    @property
    def swapped(self) -> Cut:
        """That of the transpose."""
        return dataclasses.replace(self, rows=self.cols, cols=self.rows, row_axes=self.col_axes, col_axes=self.row_axes)

    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the whole of `x` `[*lead, K]`."""
        if not self.local or not shape:
            return shape
        *lead, cols = shape
        return (*(size * (self.rows if i == 0 else 1) for i, size in enumerate(lead)), cols * self.cols)

    def shard(self, rows: int, cols: int) -> tuple[int, int]:
        """The rows and columns of one shard of a matrix of this shape, or of the matrix if that is a shard."""
        return (rows, cols) if self.local else (-(-rows // self.rows), -(-cols // self.cols))

    def pieces(self, shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
        """The largest divisors of a block that no shard of a matrix cuts; `block` itself, if none is cut.

        An op on whole arrays is cut only if all its blocks are whole, so blocks at an edge count as cut too.
        """
        mine = self.shard(*shape)
        if self.rows * self.cols == 1:
            return block
        if self.local:
            shards = (self.rows, self.cols)
            broken = [n > 1 and size % unit > 0 for n, size, unit in zip(shards, mine, block, strict=True)]
        else:
            broken = [max(size % unit, all_ % unit) > 0 for size, all_, unit in zip(mine, shape, block, strict=True)]
        gcds = (math.gcd(size, all_, unit) for size, all_, unit in zip(mine, shape, block, strict=True))
        rows, cols = (gcd if cut else unit for gcd, cut, unit in zip(gcds, broken, block, strict=True))
        return rows, cols

    def start(self, shape: Size) -> tuple[Any, Any]:
        """Where a shard of this shape begins in the whole, in `shard_map`; else (0, 0)."""
        if not self.local:
            return 0, 0
        return tuple(  # type: ignore[return-value]
            lax.axis_index(axes) * size if axes else 0
            for axes, size in zip((self.row_axes, self.col_axes), shape, strict=True)
        )

    def merged(self, bits: jax.Array, parts: Size, *, reduce: bool = True) -> jax.Array:
        """The integer maximum over the pieces of each block of the whole, `parts` of them along each axis.

        On every device the same; in `shard_map` without `reduce`, what each shard has to say of it.
        """
        if self.local:
            whole = jnp.zeros((bits.shape[0] * self.rows, bits.shape[1] * self.cols), bits.dtype)
            whole, bits = vary_alike(whole, bits)
            bits = lax.dynamic_update_slice(whole, bits, self.start(bits.shape))
        else:
            bits = self.everywhere(bits)
        padding = [(0, -size % part) for size, part in zip(bits.shape, parts, strict=True)]
        padded = jnp.pad(bits, padding)
        rows, cols = (size // part for size, part in zip(padded.shape, parts, strict=True))
        merged = jnp.max(padded.reshape(rows, parts[0], cols, parts[1]), axis=(1, 3), initial=0)
        axes = self.row_axes + self.col_axes
        return lax.pmax(merged, axes) if self.local and axes and reduce else merged

    def everywhere(self, x: jax.Array) -> jax.Array:
        """An array of small size, whole on every device and held there. In `shard_map`, it is as it is."""
        if self.local or self.mesh is None or self.mesh.empty:
            return x
        pin = jax.sharding.reshard if self.mesh.explicit_axes else lax.with_sharding_constraint
        whole: jax.Array = pin(x, NamedSharding(self.mesh, PartitionSpec()))
        return whole

    def of_pieces(self, grid: jax.Array, parts: Size, shape: Size) -> jax.Array:
        """The value of its block for each piece of this shard, or of the whole: the inverse of `merged`."""
        fine = jnp.repeat(jnp.repeat(grid, parts[0], axis=0), parts[1], axis=1)
        if self.local:
            start = self.start(shape)
            fine = jnp.pad(
                fine,
                [(0, max(0, n * s - f)) for n, s, f in zip((self.rows, self.cols), shape, fine.shape, strict=True)],
            )
            return lax.dynamic_slice(fine, start, shape)
        return fine[: shape[0], : shape[1]]


def vary_alike(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays, typed as varying over every manual axis over which any of them does."""
    own = [frozenset(jax.typeof(a).manual_axis_type.varying) for a in arrays]
    missing = [tuple(sorted(frozenset().union(*own) - axes)) for axes in own]
    return tuple(lax.pcast(a, m, to="varying") if m else a for a, m in zip(arrays, missing, strict=True))


def matrix_of(x: jax.Array, added: int = 0) -> jax.Array:
    """`x` `[*lead, K]` as a matrix `[M, K]`, after `added` axes. On Explicit meshes, only its ends stay cut."""
    if x.ndim - added == 2:
        return x
    front, own = x.shape[:added], x.shape[added:]
    shape = (*front, math.prod(own[:-1]), own[-1] if own else 1)
    sharding = jax.typeof(x).sharding
    if not sharding.mesh.explicit_axes:
        return x.reshape(shape)
    entries = sharding.spec[added:]
    first, last = (entries[0] if len(own) > 1 else None), (entries[-1] if own else None)
    kept = (*sharding.spec[:added], *_ends(first, last, len(own)))
    if PartitionSpec(*kept) != sharding.spec:
        x = jax.sharding.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*kept)))
    cut = PartitionSpec(*sharding.spec[:added], first, last)
    return lax.reshape(x, shape, out_sharding=NamedSharding(sharding.mesh, cut))


def shaped(y: jax.Array, shape: tuple[int, ...], added: int = 0) -> jax.Array:
    """A matrix, or what has one value a block of it, in the shape of a tensor: the inverse of `matrix_of`."""
    if y.shape == shape:
        return y
    sharding = jax.typeof(y).sharding
    if not sharding.mesh.explicit_axes:
        return y.reshape(shape)
    first, last = sharding.spec[added:] if y.ndim - added == 2 else (None, None)
    cut = PartitionSpec(*sharding.spec[:added], *_ends(first, last, len(shape) - added))
    return lax.reshape(y, shape, out_sharding=NamedSharding(sharding.mesh, cut))


def cuts_rows(x: jax.Array, spec: Spec = None) -> bool:
    """Whether the rows of `x` `[*lead, K]`, in `shard_map` of the shard, may be cut, by its type or by `spec`."""
    sharding = jax.typeof(x).sharding
    if sharding.mesh.size == 1 or set(sharding.mesh.axis_types) <= {AxisType.Manual}:
        return False
    if sharding.mesh.auto_axes:
        return True  # They may: what XLA cuts, no type says.
    return any(entry is not None for cut in (sharding.spec, spec_of(spec, None)) for entry in cut[: x.ndim - 1])


def _ends(first: Any, last: Any, ndim: int) -> tuple[Any, ...]:
    """Entries of a PartitionSpec that cut the first and the last of `ndim` axes."""
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


def _size(mesh: Any, name: str) -> int:
    return int(mesh.shape.get(name, 1))
