"""The mesh of an array: which kind it is of, what types tell of shardings, and mesh axes for the axes of arrays.

`MeshKind.of` decides between Auto, Explicit and manual meshes, and `assign_mesh_axes` gives mesh axes to array axes
for products and rows alike. Other modules read the kind of one axis where they need it.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

AxisName = str | Sequence[str] | None
Spec = PartitionSpec | NamedSharding | None
Names = tuple[str, ...]
Scattered = tuple[tuple[int, str], ...]


def may_be_sharded(x: jax.Array) -> bool:
    """Whether XLA, or an Explicit mesh, may cut `x` over devices."""
    mesh = mesh_of(x)
    if mesh.empty:
        return jax.device_count() > 1
    return mesh.size > 1 and set(mesh.axis_types) != {AxisType.Manual}


def reshape(x: jax.Array, sizes: Sequence[int], entries: Sequence[Any]) -> jax.Array:
    """`x` in another shape, and on Explicit meshes cut so."""
    if x.shape == tuple(sizes):
        return x
    mesh = jax.typeof(x).sharding.mesh
    return lax.reshape(
        x, sizes, out_sharding=NamedSharding(mesh, PartitionSpec(*entries)) if mesh.explicit_axes else None
    )


def names_of(entry: Any) -> tuple[str, ...]:
    """The mesh axes of an entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


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


def mesh_of(x: jax.Array, spec: Spec = None) -> Any:
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


def explicit_sharding(x: jax.Array) -> NamedSharding | None:
    """The sharding that the type of `x` has on a mesh with Explicit axes."""
    sharding = jax.typeof(x).sharding
    return sharding if sharding.mesh.explicit_axes else None


def is_auto(mesh: Any) -> bool:
    """Whether XLA alone decides how the axes of a mesh shard arrays."""
    return set(mesh.axis_types) == {AxisType.Auto}


class MeshKind(enum.Enum):
    """The way in which arrays are sharded.

    Attributes:
      LOCAL: on one device, and in `shard_map` over all mesh axes: arrays are what a device has.
      AUTO: on Auto meshes, and where none is known: XLA decides after tracing.
      EXPLICIT: on Explicit meshes: types tell.
      MIXED: on meshes with axes of several kinds.
    """

    LOCAL = enum.auto()
    AUTO = enum.auto()
    EXPLICIT = enum.auto()
    MIXED = enum.auto()

    @classmethod
    def of(cls, x: jax.Array) -> MeshKind:
        """The kind of the mesh of `x`."""
        if not may_be_sharded(x):
            return cls.LOCAL
        kinds = set(mesh_of(x).axis_types)
        if len(kinds) > 1:
            return cls.MIXED
        return cls.EXPLICIT if kinds == {AxisType.Explicit} else cls.AUTO


def count_shards(sizes: Mapping[str, int], names: Iterable[str]) -> int:
    """The number of shards that mesh axes make, given the size of each mesh axis."""
    return math.prod(int(sizes[name]) for name in names)


def assign_mesh_axes(
    sizes: Mapping[str, int], requests: Iterable[tuple[Iterable[str], int, int]], used: Iterable[str] = ()
) -> list[Names]:
    """Mesh axes for array axes: each mesh axis once, and only where shards are whole blocks.

    Args:
      sizes: of mesh axes.
      requests: for each array axis, the first served first: mesh axes wanted, its size, and the size of a block.
      used: mesh axes that are taken already.
    """
    taken, found = set(used), []
    for wanted, size, block in requests:
        names: Names = ()
        for name in wanted:
            if name not in taken and size % (count_shards(sizes, (*names, name)) * block) == 0:
                names = (*names, name)
                taken.add(name)
        found.append(names)
    return found


def assign_scatter(
    sizes: Mapping[str, int], wanted: Iterable[Any], local: Sequence[int], summed: Collection[str]
) -> Scattered:
    """The axes of a sum over devices that are reduce-scattered, as (array axis, mesh axis).

    Args:
      wanted: entries of the sharding that the sum is to have.
      local: its local shape.
      summed: the mesh axes that it sums over.
    """
    left, found = list(local), []
    for axis, entry in enumerate(wanted):
        for name in names_of(entry):
            if name in summed and left[axis] % sizes[name] == 0:
                found.append((axis, name))
                left[axis] //= sizes[name]
    return tuple(found)
