"""All-gather of weights and reduce-scatter of gradients as codes, and the weight types that `linear` accepts."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from qshard._core import quantize_steps
from qshard._core.quantize_steps import Plane
from qshard._core.validation import WeightLayout, join_names, quote
from qshard.formats import Format, Usage
from qshard.jax._ops.mesh import MeshAxes, Spec, is_auto, sum_over
from qshard.jax._ops.validation import as_names, check_spec
from qshard.jax._quantized.array import QuantizedArray
from qshard.jax._sharding import partitionable_ops
from qshard.jax._sharding.shard_spec import ShardSpec, reshard
from qshard.layout import Shape, is_transposed, matrix_shape, stored_block, whole_units


def gather(q: QuantizedArray, axis_name: str | Sequence[str], *, spec: Spec = None) -> QuantizedArray:
    """All-gather a sharded quantized tensor over mesh axes. Codes go on the wire, never values.

    XLA may move a gather past a cast or a product, where it sends 2 or 4 bytes an element instead of 1. To prevent
    that, the codes are viewed as uint8 with a sharding constraint on both sides of the gather.

    Args:
      q: the tensor, sharded along `axis_name`.
      axis_name: one mesh axis, or several.
      spec: the sharding of the tensor. None: rows are sharded along `axis_name`. On Explicit meshes the type of `q`
        gives it. A NamedSharding also gives the mesh, if neither `jax.set_mesh` nor an array does.

    Returns:
      The tensor, no longer sharded along `axis_name`. It stays sharded along other mesh axes.

    Raises:
      TypeError: `q` is not a QuantizedArray, or `axis_name` is not one mesh axis name or several.
      ValueError: `q` has no plane, no mesh is known, `axis_name` is not in `spec`, each shard has scales of its own, or
        the shards to gather are not contiguous in the tensor.

    >>> import jax.numpy as jnp
    >>> from qshard.formats import FP8_E4M3
    >>> from qshard.jax import quantize
    >>> mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> w = jax.device_put(jnp.ones((64, 32)), NamedSharding(mesh, jax.P("fsdp")))
    >>> gather(quantize(w, FP8_E4M3), "fsdp").rowwise.data.sharding.is_fully_replicated
    True
    """
    if not isinstance(q, QuantizedArray):
        raise TypeError(f"gather: q ({quote(q)}) is not a QuantizedArray; quantize it first")
    check_spec("gather", "spec", spec)
    if not q.planes:
        raise ValueError(f"gather: {q} has no plane to gather; quantize with a usage")
    axes = as_names("gather", "axis_name", axis_name)
    return WeightSharding(spec_of_codes(q, axes, spec, op="gather", name="axis_name"), axes).gather(q)


class Shards(Protocol):
    """A way to store a weight on devices, for `CodedWeight`. Hashable, because it is static."""

    def gather(self, codes: Any) -> QuantizedArray:
        """Return the whole weight.

        Args:
          codes: the codes on one device: the pytree in `CodedWeight.codes`.
        """

    def scatter(self, gradient: jax.Array) -> jax.Array:
        """Reduce the gradient of the whole weight over devices, and return the part of this device.

        Args:
          gradient: the gradient that this device computed, in the shape of the whole weight.
        """


@dataclass(frozen=True)
class WeightSharding:
    """`Shards` of a weight that FSDP shards along `gather_axes`, or of an unsharded weight if these are empty.

    `spec` is in the axis order of `layout`, like the gradient and the codes, and is empty if the sharding is unknown.
    With `grad_format`, the gradient is sent as codes of that format, in `shard_map`.
    """

    spec: ShardSpec = ShardSpec()
    gather_axes: MeshAxes = ()
    layout: WeightLayout = "NK"
    grad_format: Format | None = None

    @property
    def contracted(self) -> Usage:
        """The plane of the stored `w` that the forward product reads: it contracts K."""
        return Usage.ROWWISE if self.layout == "NK" else Usage.COLUMNWISE

    @property
    def contracted_back(self) -> Usage:
        """The plane of the stored `w` that the product for dx reads: it contracts N."""
        return Usage.COLUMNWISE if self.layout == "NK" else Usage.ROWWISE

    @property
    def columns(self) -> int:
        """The number of shards of the last axis of the gathered `w`."""
        return self.count("K" if self.layout == "NK" else "N")

    def count(self, axis: Literal["N", "K"]) -> int:
        """Return the number of shards of axis N or K of the gathered `w`, and so of `y` or `x`.

        It is 1 in `shard_map`, where arrays are local, and where no spec gives it.
        """
        spec, at = self.spec, self.layout.index(axis)
        if spec.local or len(spec.entries) <= at:
            return 1
        return spec.count(tuple(name for name in spec.entries[at] if name not in self.gather_axes))

    @property
    def contracts_whole_k(self) -> bool:
        """True if the gradient of `w` is known to be unsharded along K on an Auto mesh.

        If so, `x` is gathered along a sharded K.
        """
        spec, at = self.spec, self.layout.index("K")
        return not spec.local and len(spec.entries) > at and not spec.entries[at] and is_auto(spec.mesh)

    @property
    def by_rows(self) -> bool:
        """True if `w` is gathered along every mesh axis, as in FSDP alone, where `x` is sharded by rows."""
        names = self.gather_axes
        return bool(names) and all(name in names for name, size in self.spec.mesh.shape.items() if size > 1)

    @property
    def scatters_locally(self) -> bool:
        """True if `scatter` itself sums the gradient over the mesh axes to gather along, which are manual."""
        return self.spec.local and set(self.gather_axes).isdisjoint(self.spec.mesh.explicit_axes)

    def whole_shape(self, shape: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the shape of the gathered weight, given the local shape. A size of None stays None."""
        if not (self.spec.local and self.gather_axes):
            return shape
        counts = (self.spec.count(tuple(n for n in names if n in self.gather_axes)) for names in self.spec.entries)
        return tuple(None if size is None else size * n for size, n in zip(shape, counts, strict=True))

    def gather(self, codes: QuantizedArray) -> QuantizedArray:
        spec, names = self.spec, self.gather_axes
        if not names:
            return codes
        _check_adjacent(spec, names)
        planes = {}
        for usage, plane in codes.planes.items():
            if not set(names).isdisjoint(spec.mesh.explicit_axes):
                own = ShardSpec.of(plane.data)
            else:
                own = _transpose_spec(spec, names) if is_transposed(codes.format, usage) else spec
            planes[usage] = _gather_plane(plane, codes.format, usage, names, own)
        gathered = codes.with_planes(planes)
        if len(codes.axes) > 2:
            gathered = dataclasses.replace(gathered, axes=self.whole_shape(codes.axes))
        return gathered

    def gather_values(self, values: jax.Array) -> jax.Array:
        if not self.gather_axes:
            return values
        _check_adjacent(self.spec, self.gather_axes)
        return reshard(values, self.spec, self.spec.without(self.gather_axes))

    def scatter(self, gradient: jax.Array) -> jax.Array:
        """Sum the gradient over devices and shard it like the weight. On Explicit meshes its type requests that."""
        spec = self.spec
        if self.scatters_locally:
            shared = (tuple(name for name in names if name in self.gather_axes) for names in spec.entries)
            scattered = [(axis, names) for axis, names in enumerate(shared) if names]
            if self.grad_format is None:
                return sum_over(gradient, scattered)
            for axis, names in scattered:
                gradient = scatter_codes(gradient, axis, names, self.grad_format)
            return gradient
        if spec.entries and not spec.mesh.explicit_axes:
            gradient = lax.with_sharding_constraint(gradient, NamedSharding(spec.mesh, spec.spec))
        return gradient


def scatter_codes(x: jax.Array, axis: int, names: MeshAxes, fmt: Format) -> jax.Array:
    """Reduce-scatter `x` along `axis` over manual mesh axes: each device sends codes, and adds in order in float32.

    Blocks are consecutive elements of the part for a device, which is padded with zeros to whole blocks. bfloat16 has
    every value of an 8-bit code from 2^-126 up.
    """
    parts = jnp.stack(jnp.split(x, lax.axis_size(names), axis))
    shape, block = parts.shape[1:], whole_units(fmt, Usage.ROWWISE)[1]
    flat = parts.reshape(len(parts), -1)
    flat = jnp.pad(flat, ((0, 0), (0, -flat.shape[1] % block)))
    plane = quantize_steps.quantize(partitionable_ops, flat.reshape(-1, block), fmt, Usage.ROWWISE)[Usage.ROWWISE]
    assert plane.scale_inv is not None
    arrays = []
    for array in (plane.data, plane.scale_inv):
        sent = lax.bitcast_convert_type(array, jnp.uint8).reshape(len(parts), -1)
        received = lax.all_to_all(sent, names, 0, 0, tiled=True).reshape(array.shape)
        arrays.append(lax.bitcast_convert_type(received, array.dtype))
    values = quantize_steps.dequantize(partitionable_ops, Plane(*arrays), fmt, Usage.ROWWISE, "bfloat16")
    values = values.reshape(flat.shape)[:, : math.prod(shape)].astype(jnp.float32)
    total: jax.Array = functools.reduce(jnp.add, list(values))
    return total.reshape(shape).astype(x.dtype)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["codes", "sink"], meta_fields=["shards"])
@dataclass(frozen=True, eq=False)
class CodedWeight:
    """A weight `[N, K]` for `linear` that is already quantized, with the array that receives its gradient.

    Attributes:
      codes: a `QuantizedArray` of the whole weight, or the pytree that `shards.gather` converts to one. `linear` calls
        `shards.gather` in the forward pass and again in the backward pass.
      sink: an array of unused values. Its gradient is `shards.scatter` of the gradient of the whole weight. None: the
        weight has no gradient.
      shards: static. None: `codes` is a `QuantizedArray`, sharded as the call of `linear` says.
    """

    codes: Any
    sink: jax.Array | None
    shards: Any


def spec_of_codes(
    q: QuantizedArray, axes: tuple[str, ...], spec: Spec, *, op: str, name: str, spec_name: str = "spec"
) -> ShardSpec:
    """Return the sharding of a quantized tensor that is gathered along the mesh axes `axes`. It has at least one plane.

    `op`, `name` and `spec_name` are for errors: the public function, and its arguments that give `axes` and `spec`.
    """
    usage = Usage.COLUMNWISE if q.rowwise is None else Usage.ROWWISE
    transposed = is_transposed(q.format, usage)
    data = q.plane(usage).data
    axis_count = len(q.axes) if transposed else None
    return ShardSpec.along(data, axes, spec, op=op, name=name, spec_name=spec_name, transposed_of=axis_count)


def _gather_plane(plane: Plane, fmt: Format, usage: Usage, axes: tuple[str, ...], shard_spec: ShardSpec) -> Plane:
    (data, grid, global_scale_inv), block = plane, stored_block(fmt, usage)
    after = shard_spec.without(axes)
    gathered = reshard(data, shard_spec, after)
    if fmt.per_tensor:  # All shards have the one scale already.
        _check_shared(grid, axes)
    else:
        assert block is not None
        of_grid, shape = _of_grid(data, fmt, grid.ndim, block, shard_spec, axes)
        _check_shared(grid, axes, of_grid.axes, grid.shape == shape)
        grid = reshard(grid, of_grid, _of_grid(gathered, fmt, grid.ndim, block, after, axes)[0])
    if global_scale_inv is not None and fmt.row_scaled:
        by_row = dataclasses.replace(shard_spec, entries=shard_spec.entries[:-1])
        _check_shared(global_scale_inv, axes, by_row.axes)
        global_scale_inv = reshard(global_scale_inv, by_row, by_row.without(axes))
    elif global_scale_inv is not None:
        _check_shared(global_scale_inv, axes)
    return Plane(gathered, grid, global_scale_inv)


def _of_grid(
    data: jax.Array, fmt: Format, ndim: int, block: tuple[int, int], shard_spec: ShardSpec, axes: tuple[str, ...]
) -> tuple[ShardSpec, Shape]:
    """Return the sharding of a grid of scales with `ndim` axes, and the local shape that it should have."""
    shape = (*data.shape[:-1], data.shape[-1] * fmt.element.codes_per_byte)
    if ndim != data.ndim:
        if shard_spec.local:
            _check_rows_follow(shard_spec, axes, "scales of rows")
        shape, shard_spec = matrix_shape(shape), shard_spec.matrix
    units = (*(1,) * (ndim - 2), *block[-ndim:])
    of_grid = shard_spec.of_blocks(shape, units)
    whole = shard_spec.without(of_grid.axes).whole(shape)
    return of_grid, tuple(-(-size // unit) for size, unit in zip(whole, units, strict=True))


def _check_shared(scale: jax.Array, axes: tuple[str, ...], sharded_by: tuple[str, ...] = (), fits: bool = True) -> None:
    """Raise ValueError if a scale has the wrong shape, or if its type shows different values on the devices of `axes`.

    The mesh axes in `sharded_by` shard the scale, so values may differ along them.
    """
    own = jax.typeof(scale)
    varying = own.manual_axis_type.varying
    differs = [
        name for name in axes if name in varying and name not in sharded_by and own.sharding.mesh.shape[name] > 1
    ]
    if differs or not fits:
        what = f"of shape {scale.shape}" if not fits else f"varying over {', '.join(map(repr, differs))}"
        raise ValueError(
            f"gather: scale_inv ({what}) is not one scale for the whole tensor; quantize with "
            f"axis_name={(axes[0] if len(axes) == 1 else axes)!r}, or pass scales="
        )


def _check_adjacent(shard_spec: ShardSpec, axes: tuple[str, ...]) -> None:
    """Raise ValueError if the shards that `shard_map` would gather are not contiguous in the tensor."""
    for axis, names in enumerate(shard_spec.entries if shard_spec.local else ()):
        sizeable = [name for name in names if shard_spec.count((name,)) > 1]
        kept = [name for name in sizeable if name not in axes]
        if sizeable[: len(kept)] != kept:
            raise ValueError(
                f"gather: axis {axis} is sharded over {names}, so shards gathered over {axes} alone are not adjacent; "
                f"gather over {kept[-1]!r} too, or first"
            )


def _transpose_spec(shard_spec: ShardSpec, axes: tuple[str, ...]) -> ShardSpec:
    """Return the sharding of the transposed plane: its first axis is the tensor's last, its last all the others."""
    _check_rows_follow(shard_spec, axes, "a transposed plane")
    return shard_spec.transposed


def _check_rows_follow(shard_spec: ShardSpec, axes: tuple[str, ...], what: str) -> None:
    """Raise ValueError if the gathered rows are not contiguous in an array that has all rows in one axis."""
    if inner := [name for name in axes if name in shard_spec.inner_axes]:
        raise ValueError(
            f"gather: spec ({shard_spec.spec}) does not shard the first or last axis over "
            f"{join_names(map(repr, inner))}, so shards of {what} are not adjacent; gather the rowwise plane, in a "
            "format with 1-D blocks"
        )
