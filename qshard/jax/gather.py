"""`gather`: the whole of a weight that FSDP has cut, by moving its codes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from qshard.formats import Format, Usage
from qshard.jax.array import Plane, QuantizedArray
from qshard.jax.cuts import Spec, mesh_of, spec_of
from qshard.jax.ops import names_of
from qshard.layout import stores_transposed

__all__ = ["gather", "scatter_gradient"]


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
    for usage in Usage.BOTH:
        name = str(usage.name).lower()
        if (plane := getattr(q, name)) is not None:
            turned = usage is Usage.COLUMNWISE and stores_transposed(q.format)
            own = _transposed_spec(axis_name, spec, len(q.axes)) if turned else spec
            planes[name] = _gather_plane(plane, q.format, usage, axis_name, own)
    if not planes:
        raise ValueError(f"gather: {q} holds nothing to gather; quantize with a usage")
    return dataclasses.replace(q, **planes)


def _gather_plane(plane: Plane, fmt: Format, usage: Usage, axis_name: str, spec: Spec) -> Plane:
    """`gather` of one plane, whose data is cut by `spec`."""
    mesh = mesh_of(plane.data, spec)
    if axis_name not in mesh.axis_names:
        raise ValueError(
            f"gather: axis_name ({axis_name!r}) is not an axis of the mesh {mesh.axis_names}; "
            "enter the mesh with jax.set_mesh, or give spec as a NamedSharding"
        )
    data = plane.data
    if axis_name in mesh.explicit_axes:
        spec = jax.typeof(data).sharding.spec
    cut = (*spec_of(spec, axis_name), *[None] * data.ndim)[: data.ndim]
    axis = _cut_axis(axis_name, PartitionSpec(*cut), data.ndim)
    scale_inv, global_scale_inv = plane.scale_inv, plane.global_scale_inv
    if fmt.block is not None:
        grid = plane.scale_inv
        by_rows = grid.ndim == data.ndim
        grid_axis = axis if by_rows else (0 if axis == 0 else grid.ndim - 1)
        turned = usage is Usage.COLUMNWISE and stores_transposed(fmt)
        block = fmt.block if turned else fmt.block_of(usage)
        assert block is not None
        unit = block[1] if axis == data.ndim - 1 else block[0]
        size = _size_along(data, axis, fmt)
        shards = mesh.shape[axis_name]
        local = axis_name in mesh.manual_axes
        mine = size if local else -(-size // math.prod(mesh.shape[name] for name in names_of(cut[axis])))
        if mine % unit == 0 or shards == 1:
            grid_cut = cut if by_rows else (cut[0], cut[-1])[-grid.ndim :]
            scale_inv = _gather_array(grid, mesh, axis_name, grid_axis, PartitionSpec(*grid_cut))
        elif local:
            whole = -(-size * shards // unit)
            if grid.shape[grid_axis] != whole:
                raise ValueError(_own_scales(axis_name, f"of shape {grid.shape}"))
            _check_shared(grid, axis_name)
    else:
        _check_shared(scale_inv, axis_name)
    if fmt.global_scale == "row":
        if axis != data.ndim - 1:
            assert global_scale_inv is not None
            row_cut = PartitionSpec(*cut[:-1])
            global_scale_inv = _gather_array(global_scale_inv, mesh, axis_name, axis, row_cut)
    elif global_scale_inv is not None:
        _check_shared(global_scale_inv, axis_name)
    codes = _gather_array(data, mesh, axis_name, axis, PartitionSpec(*cut))
    return Plane(codes, scale_inv, global_scale_inv)


def _size_along(data: jax.Array, axis: int, fmt: Format) -> int:
    """How many elements of the tensor lie along an axis of a plane's data; those of leading axes are rows together."""
    if axis == data.ndim - 1:
        return data.shape[-1] * fmt.element.codes_per_byte
    return math.prod(data.shape[axis:-1])


def _gather_array(x: jax.Array, mesh: Any, axis_name: str, axis: int, cut: PartitionSpec) -> jax.Array:
    """All of `x`, which is cut by `cut`, along one of its mesh axes: moved and pinned as integers."""
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    whole = NamedSharding(mesh, _without_axis(cut, axis_name))
    if axis_name in mesh.manual_axes:
        bits = lax.all_gather(bits, axis_name, axis=axis, tiled=True)
    elif axis_name in mesh.explicit_axes:
        bits = jax.sharding.reshard(bits, whole)
    else:
        bits = lax.with_sharding_constraint(bits, NamedSharding(mesh, cut))
        bits = lax.with_sharding_constraint(bits, whole)
    return lax.bitcast_convert_type(bits, x.dtype)


def _check_shared(scale: jax.Array, axis_name: str) -> None:
    """Raises unless a scale that is not gathered is the same on all devices, as far as its type tells."""
    if axis_name in jax.typeof(scale).manual_axis_type.varying:
        raise ValueError(_own_scales(axis_name, f"varying over {axis_name!r}"))


def _own_scales(axis_name: str, what: str) -> str:
    return (
        f"gather: scale_inv ({what}) is not one scale for the whole tensor; "
        f"quantize with axis_name={axis_name!r}, or give it the scales"
    )


def scatter_gradient(dw: jax.Array, axis_name: str | None, spec: Spec) -> jax.Array:
    """The gradient of a weight, summed over devices and cut as the weight is. On Explicit meshes its type says that."""
    if axis_name is None and spec is None:
        return dw
    mesh, cut = mesh_of(dw, spec), spec_of(spec, axis_name)
    if axis_name is not None and axis_name in mesh.manual_axes:
        scattered: jax.Array = lax.psum_scatter(
            dw, axis_name, scatter_dimension=_cut_axis(axis_name, cut, dw.ndim), tiled=True
        )
        return scattered
    constrained: jax.Array = lax.with_sharding_constraint(dw, NamedSharding(mesh, cut))
    return constrained


def _transposed_spec(axis_name: str, spec: Spec, ndim: int) -> Spec:
    """How the transposed plane of a tensor is cut: its first axis is the tensor's last, its last all the others."""
    cut = spec_of(spec, axis_name)
    entries = (*cut, *(None,) * ndim)[:ndim]
    if any(axis_name in names_of(entry) for entry in entries[1:-1]):
        raise ValueError(
            f"gather: spec ({cut}) does not cut the first or the last axis along {axis_name!r}, so that pieces of a "
            "transposed plane do not follow one another; gather the rowwise plane"
        )
    transposed = PartitionSpec(entries[-1] if ndim > 1 else None, entries[0] if ndim else None)
    return NamedSharding(spec.mesh, transposed) if isinstance(spec, NamedSharding) else transposed


def _cut_axis(axis_name: str, spec: PartitionSpec, ndim: int) -> int:
    """The array axis that a mesh axis cuts."""
    for axis, entry in enumerate(spec[:ndim]):
        if axis_name in names_of(entry):
            return axis
    raise ValueError(
        f"gather: spec ({spec}) does not have axis_name ({axis_name!r}); name the axis that cuts the tensor"
    )


def _without_axis(spec: PartitionSpec, axis_name: str) -> PartitionSpec:
    return PartitionSpec(*(tuple(name for name in names_of(entry) if name != axis_name) or None for entry in spec))
