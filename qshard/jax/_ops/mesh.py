"""The mesh of an array: its axes, their kinds, and the types that tell how arrays are sharded over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

AxisName = str | Sequence[str] | None

Spec = PartitionSpec | NamedSharding | None


def may_be_cut(x: jax.Array) -> bool:
    """Whether XLA, or an Explicit mesh, may cut `x` over devices."""
    mesh = mesh_of(x)
    if mesh.empty:
        return jax.device_count() > 1
    return mesh.size > 1 and set(mesh.axis_types) != {AxisType.Manual}


def reshaped(x: jax.Array, sizes: Sequence[int], entries: Sequence[Any]) -> jax.Array:
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
