"""`gather`: the whole of a weight that FSDP has cut, by moving its codes; and weights as `linear` takes them."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from qshard.formats import Format, Usage
from qshard.jax.arguments import check_spec
from qshard.jax.array import QuantizedArray
from qshard.jax.cuts import Cut, Spec
from qshard.layout import is_transposed, stored_block
from qshard.names import shown
from qshard.pipeline import Plane


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
    if not isinstance(q, QuantizedArray):
        raise TypeError(f"gather: q ({shown(q)}) is not a QuantizedArray; quantize it first")
    check_spec("gather", "spec", spec)
    if not q.planes:
        raise ValueError(f"gather: {q} holds nothing to gather; quantize with a usage")
    return CutWeight(cut_of(q, axis_name, spec, op="gather", name="axis_name"), axis_name).gather(q)


class Shards(Protocol):
    """How a weight lies over devices; hashable, as it is static."""

    def gather(self, codes: Any) -> QuantizedArray:
        """The whole weight, of what one device has of it."""

    def scatter(self, gradient: jax.Array) -> jax.Array:
        """What one device keeps of the gradient of the whole weight."""


@dataclass(frozen=True)
class CutWeight:
    """`Shards` of a weight that FSDP has cut along a mesh axis, or that is whole (None)."""

    cut: Cut
    axis: str | None

    def gather(self, codes: QuantizedArray) -> QuantizedArray:
        if self.axis is None:
            return codes
        planes = {}
        for usage, plane in codes.planes.items():
            cut = _transposed(self.cut, self.axis) if is_transposed(codes.format, usage) else self.cut
            planes[usage] = _gather_plane(plane, codes.format, usage, self.axis, cut)
        return codes.with_planes(planes)

    def scatter(self, gradient: jax.Array) -> jax.Array:
        """Summed over devices and cut as the weight is. On Explicit meshes its type says that."""
        cut, made = self.cut, gradient
        if cut.local and self.axis is not None and not cut.mesh.explicit_axes:
            made = lax.psum_scatter(made, self.axis, scatter_dimension=_cut_axis(self.axis, cut), tiled=True)
        elif cut.entries and not cut.mesh.explicit_axes:
            made = lax.with_sharding_constraint(made, NamedSharding(cut.mesh, cut.spec))
        return made


@functools.partial(jax.tree_util.register_dataclass, data_fields=["codes", "sink"], meta_fields=["shards"])
@dataclass(frozen=True, eq=False)
class CodedWeight:
    """A weight `[N, K]` for `linear` that is codes already, and where its gradient goes.

    Attributes:
      codes: a `QuantizedArray` of the whole weight; or a pytree that `shards.gather` makes one of, which `linear` then
        calls in the forward and again in the backward pass.
      sink: an array. The gradient with respect to it is `shards.scatter` of that of the whole weight; the values of it
        are not used. None: the weight has no gradient.
      shards: static. None: the weight is a `QuantizedArray`, cut as the call of `linear` says.
    """

    codes: Any
    sink: jax.Array | None
    shards: Any


def cut_of(q: QuantizedArray, axis_name: str, spec: Spec, *, op: str, name: str, spec_name: str = "spec") -> Cut:
    usage = Usage.COLUMNWISE if q.rowwise is None else Usage.ROWWISE
    turned = is_transposed(q.format, usage)
    data = q.plane(usage).data
    turned_axes = len(q.axes) if turned else None
    return Cut.along(data, axis_name, spec, op=op, name=name, spec_name=spec_name, transposed_of=turned_axes)


def _gather_plane(plane: Plane, fmt: Format, usage: Usage, axis_name: str, cut: Cut) -> Plane:
    (data, grid, global_scale_inv), block = plane, stored_block(fmt, usage)
    axis = _cut_axis(axis_name, cut)
    in_rows = axis == data.ndim - 1
    if block is None:  # The one scale does not travel: shards have it in common.
        _check_shared(grid, axis_name)
    else:
        size = data.shape[-1] * fmt.element.codes_per_byte if in_rows else math.prod(data.shape[axis:-1])
        mine = size if cut.local else -(-size // cut.count(cut.entries[axis]))
        unit, shards = block[1] if in_rows else block[0], cut.mesh.shape[axis_name]
        if mine % unit == 0 or shards == 1:
            ends = (cut.entries[0], cut.entries[-1])[-grid.ndim :]
            grid_cut = cut if grid.ndim == data.ndim else dataclasses.replace(cut, entries=ends)
            grid = _gather_array(grid, axis_name, grid_cut)
        elif cut.local:
            fits = grid.shape[-1 if in_rows else axis] == -(-size * shards // unit)
            _check_shared(grid, axis_name, fits)
    if global_scale_inv is not None and fmt.scaling.global_scale == "row" and not in_rows:  # Shards have rows.
        by_row = dataclasses.replace(cut, entries=cut.entries[:-1])
        global_scale_inv = _gather_array(global_scale_inv, axis_name, by_row)
    elif global_scale_inv is not None:
        _check_shared(global_scale_inv, axis_name)
    return Plane(_gather_array(data, axis_name, cut), grid, global_scale_inv)


def _gather_array(x: jax.Array, axis_name: str, cut: Cut) -> jax.Array:
    """All of `x` along one of the mesh axes that cut it: moved and pinned as integers."""
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    if cut.local:
        bits = lax.all_gather(bits, axis_name, axis=_cut_axis(axis_name, cut), tiled=True)
        return lax.bitcast_convert_type(bits, x.dtype)
    entries = tuple(tuple(name for name in names if name != axis_name) for names in cut.entries)
    whole = NamedSharding(cut.mesh, dataclasses.replace(cut, entries=entries).spec)
    if axis_name in cut.mesh.explicit_axes:
        bits = jax.sharding.reshard(bits, whole)
    else:
        bits = lax.with_sharding_constraint(bits, NamedSharding(cut.mesh, cut.spec))
        bits = lax.with_sharding_constraint(bits, whole)
    return lax.bitcast_convert_type(bits, x.dtype)


def _check_shared(scale: jax.Array, axis_name: str, fits: bool = True) -> None:
    """Raises unless a scale that is not gathered fits and is the same on all devices, as far as its type tells."""
    if not fits or axis_name in jax.typeof(scale).manual_axis_type.varying:
        what = f"varying over {axis_name!r}" if fits else f"of shape {scale.shape}"
        raise ValueError(
            f"gather: scale_inv ({what}) is not one scale for the whole tensor; "
            f"quantize with axis_name={axis_name!r}, or give it the scales"
        )


def _transposed(cut: Cut, axis_name: str) -> Cut:
    """How the transposed plane of a tensor is cut: its first axis is the tensor's last, its last all the others."""
    if any(axis_name in names for names in cut.entries[1:-1]):
        raise ValueError(
            f"gather: spec ({cut.spec}) does not cut the first or the last axis along {axis_name!r}, so that pieces of "
            "a transposed plane do not follow one another; gather the rowwise plane"
        )
    return cut.transposed


def _cut_axis(axis_name: str, cut: Cut) -> int:
    return next(axis for axis, names in enumerate(cut.entries) if axis_name in names)
