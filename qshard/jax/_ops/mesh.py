"""The mesh of an array, the shardings that types give, and the assignment of mesh axes to array axes and sums.

`MeshKind.of` distinguishes Auto, Explicit and manual meshes. `assign_mesh_axes` assigns mesh axes for products and for
row functions. `assign_scatter` assigns mesh axes for a sum, and `sum_over` computes it. Modules that need the kind of a
single mesh axis read it themselves.
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
MeshAxes = tuple[str, ...]
Scattered = tuple[tuple[int, str], ...]


def may_be_sharded(x: jax.Array) -> bool:
    """True if XLA, or an Explicit mesh, may shard `x` over devices."""
    mesh = mesh_of(x)
    if mesh.empty:
        return jax.device_count() > 1
    return mesh.size > 1 and set(mesh.axis_types) != {AxisType.Manual}


def reshape(x: jax.Array, sizes: Sequence[int], entries: Sequence[Any]) -> jax.Array:
    """Reshape `x`. On Explicit meshes, `entries` is the sharding of the result."""
    if x.shape == tuple(sizes):
        return x
    mesh = jax.typeof(x).sharding.mesh
    return lax.reshape(
        x, sizes, out_sharding=NamedSharding(mesh, PartitionSpec(*entries)) if mesh.explicit_axes else None
    )


def names_of(entry: Any) -> tuple[str, ...]:
    """Return the mesh axes of one entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def vary_alike(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Return the arrays, typed as varying over every manual axis that any of them varies over."""
    own = [frozenset(jax.typeof(a).manual_axis_type.varying) for a in arrays]
    missing = [tuple(sorted(frozenset().union(*own) - axes)) for axes in own]
    return tuple(lax.pcast(a, m, to="varying") if m else a for a, m in zip(arrays, missing, strict=True))


def types_tell(axes: Sequence[str] | None = None) -> bool:
    """True if types show the manual mesh axes that an array varies over, all or `axes`: not under `check_vma=False`."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = [axis for axis in mesh.manual_axes if mesh.shape[axis] > 1] if axes is None else axes
    return all(axis in jax.typeof(lax.axis_index(axis)).manual_axis_type.varying for axis in axes)


def mesh_of(x: jax.Array, spec: Spec = None) -> Any:
    """Return the mesh from the type of `x`, else from `spec`, else from the context."""
    for mesh in (jax.typeof(x).sharding.mesh, getattr(spec, "mesh", None)):
        if mesh is not None and not mesh.empty:
            return mesh
    return jax.sharding.get_abstract_mesh()


def spec_of(spec: Spec, axis_names: str | tuple[str, ...] | None) -> PartitionSpec:
    """Return `spec` as a PartitionSpec. None means that `axis_names` shard the rows."""
    if spec is None:
        return PartitionSpec(axis_names)
    return spec.spec if isinstance(spec, NamedSharding) else spec


def explicit_sharding(x: jax.Array) -> NamedSharding | None:
    """Return the sharding in the type of `x`, if its mesh has Explicit axes."""
    sharding = jax.typeof(x).sharding
    return sharding if sharding.mesh.explicit_axes else None


def is_auto(mesh: Any) -> bool:
    """True if all axes of a mesh are Auto: XLA alone decides how they shard arrays."""
    return set(mesh.axis_types) == {AxisType.Auto}


class MeshKind(enum.Enum):
    """The kind of the mesh of an array, which decides how the array is sharded.

    Attributes:
      LOCAL: there is one device, or `shard_map` is over all mesh axes. Arrays are local.
      AUTO: the mesh is Auto, or unknown. XLA decides after tracing.
      EXPLICIT: the mesh is Explicit. Types give the sharding.
      MIXED: the mesh has axes of several kinds.
    """

    LOCAL = enum.auto()
    AUTO = enum.auto()
    EXPLICIT = enum.auto()
    MIXED = enum.auto()

    @classmethod
    def of(cls, x: jax.Array) -> MeshKind:
        if not may_be_sharded(x):
            return cls.LOCAL
        kinds = set(mesh_of(x).axis_types)
        if len(kinds) > 1:
            return cls.MIXED
        return cls.EXPLICIT if kinds == {AxisType.Explicit} else cls.AUTO


def count_shards(sizes: Mapping[str, int], names: Iterable[str]) -> int:
    """Return the number of shards along mesh axes, given the size of each mesh axis."""
    return math.prod(int(sizes[name]) for name in names)


def assign_mesh_axes(
    sizes: Mapping[str, int], requests: Iterable[tuple[Iterable[str], int, int]], used: Iterable[str] = ()
) -> list[MeshAxes]:
    """Assign mesh axes to array axes: each mesh axis at most once, and only where shards are whole blocks.

    `requests` has for each array axis, in order of priority, the requested mesh axes, its size, and the size of a
    block. Mesh axes in `used` are assigned already. Returns the mesh axes of each array axis, in the order of
    `requests`.
    """
    taken, found = set(used), []
    for wanted, size, block in requests:
        names: MeshAxes = ()
        for name in wanted:
            if name not in taken and size % (count_shards(sizes, (*names, name)) * block) == 0:
                names = (*names, name)
                taken.add(name)
        found.append(names)
    return found


def assign_scatter(
    sizes: Mapping[str, int], wanted: Iterable[Any], local: Sequence[int], summed: Collection[str]
) -> Scattered:
    """Return the pairs (array axis, mesh axis) along which a sum over devices is reduce-scattered.

    `wanted` is the requested sharding of the sum, `local` its local shape, and `summed` the mesh axes that it sums
    over.
    """
    left, found = list(local), []
    for axis, entry in enumerate(wanted):
        for name in names_of(entry):
            if name in summed and left[axis] % sizes[name] == 0:
                found.append((axis, name))
                left[axis] //= sizes[name]
    return tuple(found)


def sum_over(x: jax.Array, scattered: Iterable[tuple[int, Any]], summed: MeshAxes = ()) -> jax.Array:
    """Sum the local term `x` over manual mesh axes. All devices along `summed` get the sum.

    For each pair (array axis, mesh axes) of `scattered`, a device keeps its part of the sum along that array axis.
    """
    for axis, names in scattered:
        x = lax.psum_scatter(x, names, scatter_dimension=axis, tiled=True)
    return lax.psum(x, summed) if summed else x
