"""`gather`: the whole of a weight that FSDP has cut, by moving its codes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from qshard.formats import Format, Usage
from qshard.jax.array import Plane, QuantizedArray
from qshard.jax.cuts import Cut, Spec
from qshard.layout import is_transposed, stored_block

__all__ = ["cut_of", "gather", "gather_cut", "scatter_gradient"]


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
    >>> w = jax.device_put(jnp.ones((64, 32)), NamedSharding(mesh, jax.P("fsdp")))
    >>> gather(quantize(w, FP8_E4M3), "fsdp").rowwise.data.sharding.is_fully_replicated
    True
    """
    if q.rowwise is None and q.columnwise is None:
        raise ValueError(f"gather: {q} holds nothing to gather; quantize with a usage")
    return gather_cut(q, axis_name, cut_of(q, axis_name, spec, op="gather", name="axis_name"))


def gather_cut(q: QuantizedArray, axis_name: str, cut: Cut) -> QuantizedArray:
    """`gather` of a tensor that is cut so."""
    planes: dict[str, Any] = {}
    for usage in Usage.BOTH.planes:
        name = str(usage.name).lower()
        if (plane := getattr(q, name)) is not None:
            turned = is_transposed(q.format, usage)
            own = _transposed(cut, axis_name) if turned else cut
            planes[name] = _gather_plane(plane, q.format, usage, axis_name, own)
    return dataclasses.replace(q, **planes)


def cut_of(q: QuantizedArray, axis_name: str, spec: Spec, *, op: str, name: str) -> Cut:
    """`Cut.along`, of the tensor that `q` stands for."""
    usage = Usage.COLUMNWISE if q.rowwise is None else Usage.ROWWISE
    turned = is_transposed(q.format, usage)
    data = q.plane(usage).data
    return Cut.along(data, axis_name, spec, op=op, name=name, transposed_of=len(q.axes) if turned else None)


def _gather_plane(plane: Plane, fmt: Format, usage: Usage, axis_name: str, cut: Cut) -> Plane:
    """`gather` of one plane, whose data is cut so."""
    data = plane.data
    axis = _cut_axis(axis_name, cut)
    scale_inv, global_scale_inv = plane.scale_inv, plane.global_scale_inv
    block = stored_block(fmt, usage)
    if block is not None:
        grid = plane.scale_inv
        by_rows = grid.ndim == data.ndim
        grid_axis = axis if by_rows else (0 if axis == 0 else grid.ndim - 1)
        unit = block[1] if axis == data.ndim - 1 else block[0]
        size = _size_along(data, axis, fmt)
        shards = cut.mesh.shape[axis_name]
        mine = size if cut.local else -(-size // cut.counts[axis])
        if mine % unit == 0 or shards == 1:
            ends = dataclasses.replace(cut, entries=(cut.entries[0], cut.entries[-1])[-grid.ndim :])
            scale_inv = _gather_array(grid, axis_name, grid_axis, cut if by_rows else ends)
        elif cut.local:
            whole = -(-size * shards // unit)
            if grid.shape[grid_axis] != whole:
                raise ValueError(_own_scales(axis_name, f"of shape {grid.shape}"))
            _check_shared(grid, axis_name)
    else:
        _check_shared(scale_inv, axis_name)
    if global_scale_inv is not None and global_scale_inv.ndim == data.ndim - 1 > 0:  # One a row.
        if axis != data.ndim - 1:
            by_row = dataclasses.replace(cut, entries=cut.entries[:-1])
            global_scale_inv = _gather_array(global_scale_inv, axis_name, axis, by_row)
    elif global_scale_inv is not None:
        _check_shared(global_scale_inv, axis_name)
    return Plane(_gather_array(data, axis_name, axis, cut), scale_inv, global_scale_inv)


def _size_along(data: jax.Array, axis: int, fmt: Format) -> int:
    """How many elements of the tensor lie along an axis of a plane's data; those of leading axes are rows together."""
    if axis == data.ndim - 1:
        return data.shape[-1] * fmt.element.codes_per_byte
    return math.prod(data.shape[axis:-1])


def _gather_array(x: jax.Array, axis_name: str, axis: int, cut: Cut) -> jax.Array:
    """All of `x` along one of the mesh axes that cut it: moved and pinned as integers."""
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    if cut.local:
        return lax.bitcast_convert_type(lax.all_gather(bits, axis_name, axis=axis, tiled=True), x.dtype)
    entries = tuple(tuple(name for name in names if name != axis_name) for names in cut.entries)
    whole = NamedSharding(cut.mesh, dataclasses.replace(cut, entries=entries).spec)
    if axis_name in cut.mesh.explicit_axes:
        bits = jax.sharding.reshard(bits, whole)
    else:
        bits = lax.with_sharding_constraint(bits, NamedSharding(cut.mesh, cut.spec))
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


def scatter_gradient(dw: jax.Array, axis_name: str | None, cut: Cut) -> jax.Array:
    """The gradient of a weight, summed over devices and cut as the weight is. On Explicit meshes its type says that."""
    if not cut.entries or cut.mesh.explicit_axes:
        return dw
    if cut.local and axis_name is not None:
        axis = _cut_axis(axis_name, cut)
        scattered: jax.Array = lax.psum_scatter(dw, axis_name, scatter_dimension=axis, tiled=True)
        return scattered
    constrained: jax.Array = lax.with_sharding_constraint(dw, NamedSharding(cut.mesh, cut.spec))
    return constrained


def _transposed(cut: Cut, axis_name: str) -> Cut:
    """How the transposed plane of a tensor is cut: its first axis is the tensor's last, its last all the others."""
    if any(axis_name in names for names in cut.entries[1:-1]):
        raise ValueError(
            f"gather: spec ({cut.spec}) does not cut the first or the last axis along {axis_name!r}, so that pieces of "
            "a transposed plane do not follow one another; gather the rowwise plane"
        )
    return cut.transposed


def _cut_axis(axis_name: str, cut: Cut) -> int:
    """The array axis that a mesh axis cuts."""
    for axis, names in enumerate(cut.entries):
        if axis_name in names:
            return axis
    raise ValueError(
        f"gather: spec ({cut.spec}) does not have axis_name ({axis_name!r}); name the axis that cuts the tensor"
    )
