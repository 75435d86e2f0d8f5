"""`gather`: the whole of a weight that FSDP has cut, by moving its codes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from qshard.jax._array import Plane, QuantizedArray, columnwise_is_transposed

__all__ = ["Spec", "gather", "scatter_gradient"]

Spec = PartitionSpec | NamedSharding | None


def gather(q: QuantizedArray, axis_name: str, *, spec: Spec = None) -> QuantizedArray:
    """Gives every device the whole of a tensor that is cut along a mesh axis. Codes travel, never values.

    What is gathered is pinned: the codes are seen as uint8 and held to their place on both sides of the gather. XLA is
    free to move a gather past a cast or a product, to where it costs 2 or 4 bytes an element in place of 1.

    Args:
      q: cut along `axis_name`.
      axis_name: the mesh axis to gather over.
      spec: how the tensor is cut: by rows along `axis_name` if not given. Types of Explicit meshes say it. A
        NamedSharding also names the mesh, where neither `jax.set_mesh` nor an array does.

    Returns:
      The tensor, no longer cut along `axis_name`; cuts along other mesh axes stay.

    Raises:
      ValueError: no mesh is known, `axis_name` is not in `spec`, or shards have scales of their own.

    >>> from qshard.formats import FP8_E4M3
    >>> from qshard.jax import quantize
    >>> mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> w = jax.device_put(jnp.ones((64, 32)), NamedSharding(mesh, PartitionSpec("fsdp")))
    >>> gather(quantize(w, FP8_E4M3), "fsdp").rowwise.data.sharding.is_fully_replicated
    True
    """
    planes: dict[str, Any] = {}
    for name in ("rowwise", "columnwise"):
        if (plane := getattr(q, name)) is not None:
            transposed = name == "columnwise" and columnwise_is_transposed(q.format)
            planes[name] = _gather_plane(
                plane, axis_name, _transposed_spec(axis_name, spec, len(q.axes)) if transposed else spec
            )
    if not planes:
        raise ValueError(f"gather: {q} holds nothing to gather; quantize with a usage")
    return dataclasses.replace(q, **planes)


def _gather_plane(plane: Plane, axis_name: str, spec: Spec) -> Plane:
    """`gather` of one plane, whose data is cut by `spec`."""
    mesh = _mesh_of(plane.data, spec)
    if axis_name not in mesh.axis_names:
        raise ValueError(
            f"gather: axis_name ({axis_name!r}) is not an axis of the mesh {mesh.axis_names}; "
            "enter the mesh with jax.set_mesh, or give spec as a NamedSharding"
        )
    codes = lax.bitcast_convert_type(plane.data, jnp.uint8)
    explicit = axis_name in mesh.explicit_axes
    cut = jax.typeof(codes).sharding.spec if explicit else _cut_spec(axis_name, spec)
    axis, whole = _cut_axis(axis_name, cut, codes.ndim), _without_axis(cut, axis_name)
    if axis_name in mesh.manual_axes:
        if axis_name in jax.typeof(plane.scale_inv).manual_axis_type.varying:
            raise ValueError(
                f"gather: scale_inv (varying over {axis_name!r}) is not one scale for the whole tensor; "
                f"quantize with axis_name={axis_name!r}, or give it the scales"
            )
        codes = lax.all_gather(codes, axis_name, axis=axis, tiled=True)
    elif explicit:
        codes = jax.sharding.reshard(codes, NamedSharding(mesh, whole))
    else:
        codes = lax.with_sharding_constraint(codes, NamedSharding(mesh, cut))
        codes = lax.with_sharding_constraint(codes, NamedSharding(mesh, whole))
    return dataclasses.replace(plane, data=lax.bitcast_convert_type(codes, plane.data.dtype))


def scatter_gradient(dw: jax.Array, axis_name: str | None, spec: Spec) -> jax.Array:
    """The gradient of a weight, summed over devices and cut as the weight is. On Explicit meshes its type says that."""
    if axis_name is None and spec is None:
        return dw
    mesh, cut = _mesh_of(dw, spec), _cut_spec(axis_name, spec)
    if axis_name is not None and axis_name in mesh.manual_axes:
        scattered: jax.Array = lax.psum_scatter(
            dw, axis_name, scatter_dimension=_cut_axis(axis_name, cut, dw.ndim), tiled=True
        )
        return scattered
    constrained: jax.Array = lax.with_sharding_constraint(dw, NamedSharding(mesh, cut))
    return constrained


def _mesh_of(x: jax.Array, spec: Spec) -> Any:
    """The mesh by the type of `x`, else of `spec`, else of the context."""
    for mesh in (jax.typeof(x).sharding.mesh, getattr(spec, "mesh", None)):
        if mesh is not None and not mesh.empty:
            return mesh
    return jax.sharding.get_abstract_mesh()


def _cut_spec(axis_name: str | None, spec: Spec) -> PartitionSpec:
    """By rows, where nothing else is said."""
    if spec is None:
        return PartitionSpec(axis_name)
    return spec.spec if isinstance(spec, NamedSharding) else spec


def _transposed_spec(axis_name: str, spec: Spec, ndim: int) -> Spec:
    """How the transposed plane of a tensor is cut: its first axis is the tensor's last, its last all the others."""
    cut = _cut_spec(axis_name, spec)
    entries = (*cut, *(None,) * ndim)[:ndim]
    if any(axis_name in _names(entry) for entry in entries[1:-1]):
        raise ValueError(
            f"gather: spec ({cut}) does not cut the first or the last axis along {axis_name!r}, so that pieces of a "
            "transposed plane do not follow one another; gather the rowwise plane"
        )
    transposed = PartitionSpec(entries[-1] if ndim > 1 else None, entries[0] if ndim else None)
    return NamedSharding(spec.mesh, transposed) if isinstance(spec, NamedSharding) else transposed


def _cut_axis(axis_name: str, spec: PartitionSpec, ndim: int) -> int:
    """The array axis that a mesh axis cuts."""
    for axis, entry in enumerate(spec[:ndim]):
        if axis_name in _names(entry):
            return axis
    raise ValueError(
        f"gather: spec ({spec}) does not have axis_name ({axis_name!r}); name the axis that cuts the tensor"
    )


def _without_axis(spec: PartitionSpec, axis_name: str) -> PartitionSpec:
    return PartitionSpec(*(tuple(name for name in _names(entry) if name != axis_name) or None for entry in spec))


def _names(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
