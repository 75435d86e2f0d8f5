"""`QuantizedArray`: the codes and scales of a tensor as one pytree."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from qshard import layout
from qshard._core import quantize_steps
from qshard._core.quantize_steps import Plane
from qshard._core.validation import as_plane
from qshard.formats import Format, Usage
from qshard.jax._ops.mesh import count_shards, names_of, reshape
from qshard.jax._ops.validation import as_float_name
from qshard.jax._quantized.operators import NoArithmetic
from qshard.jax._sharding import partitionable_ops
from qshard.jax._sharding.partial_blocks import PartialBlocks, repeat_axis
from qshard.jax._sharding.shard_spec import ShardSpec, fold_axes, matrix_of, pin, unfold
from qshard.layout import has_rows_apart, is_transposed, stored_block


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["rowwise", "columnwise"],
    meta_fields=["format", "dtype", "axes"],
)
@dataclass(frozen=True, eq=False, kw_only=True, init=False)
class QuantizedArray(NoArithmetic):
    """A quantized tensor: a pytree of codes and scales, with format, dtype and axes as static data.

    A *plane* is the codes and scales of one usage. A tree transformation may replace the leaves: by shardings, by None,
    by arrays with a new leading axis (`vmap`, `scan`) or by shards (`shard_map`). So no static field depends on a size
    that these change, and `shape` is computed from the arrays.

    It is a container. Arithmetic and array functions raise, because each would have to choose between values and codes.
    The leaves are codes and scales, and `jax.tree.map` passes them to its function. Before sums, averages and norms
    pass the tree through `qshard.jax.dequantize_tree`.

    Attributes:
      format: the storage format.
      dtype: the dtype of the original tensor, and the default of `dequantize`.
      axes: one entry for each axis of the original tensor: its size, or None for the first and the last axis.
      rowwise: the plane for a GEMM that contracts the last axis, or None.
      columnwise: the plane for a GEMM that contracts the other axes, or None.
    """

    format: Format
    dtype: np.dtype[Any]
    axes: tuple[int | None, ...]
    rowwise: Plane | None = None
    columnwise: Plane | None = None

    def __init__(
        self,
        *,
        format: Format,
        dtype: np.dtype[Any],
        axes: tuple[int | None, ...],
        rowwise: Plane | None = None,
        columnwise: Plane | None = None,
    ) -> None:
        # Takes half the time of the `__init__` that `dataclass` generates for a frozen class. Every call of a jitted
        # function that returns quantized arrays constructs them.
        fields = self.__dict__
        fields["format"], fields["dtype"], fields["axes"] = format, dtype, axes
        fields["rowwise"], fields["columnwise"] = rowwise, columnwise

    def __str__(self) -> str:
        planes = " and ".join(str(usage.name).lower() for usage in self.planes)
        return f"QuantizedArray({self.format}, {self.dtype}, {planes or 'no plane'})"

    @property
    def planes(self) -> dict[Usage, Plane]:
        """The stored planes, by usage."""
        planes = {Usage.ROWWISE: self.rowwise, Usage.COLUMNWISE: self.columnwise}
        return {usage: plane for usage, plane in planes.items() if plane is not None}

    def with_planes(self, planes: Mapping[Usage, Plane]) -> QuantizedArray:
        """Return the tensor with these planes only."""
        rowwise, columnwise = map(planes.get, Usage.BOTH.planes)
        return dataclasses.replace(self, rowwise=rowwise, columnwise=columnwise)

    @property
    def shape(self) -> layout.Shape:
        """The shape of the original tensor, after any axes that `vmap` or `scan` added."""
        if self.rowwise is not None or not is_transposed(self.format, Usage.COLUMNWISE):
            data = self.plane(Usage.COLUMNWISE if self.rowwise is None else Usage.ROWWISE).data
            return (*data.shape[:-1], data.shape[-1] * self.format.element.codes_per_byte) if data.ndim else ()
        *added, cols, rows = self.plane(Usage.COLUMNWISE).data.shape
        if len(self.axes) < 2:
            return (*added, cols) if self.axes else tuple(added)
        between = [size for size in self.axes if size is not None]
        first = rows * self.format.element.codes_per_byte // max(1, math.prod(between))
        return (*added, first, *between, cols)

    @property
    def global_scale_inv(self) -> jax.Array | None:
        """The global decode scale of the rowwise plane, else of the columnwise plane; None if the format has none."""
        return next((plane.global_scale_inv for plane in self.planes.values()), None)

    def plane(self, usage: Usage) -> Plane:
        """Return the plane of one usage.

        Args:
          usage: `Usage.ROWWISE` or `Usage.COLUMNWISE`.

        Raises:
          ValueError: the plane is not stored.
        """
        planes = self.planes
        return planes[as_plane(usage, "plane", tuple(planes))]

    def dequantize(self, dtype: Any = None, *, usage: Usage | None = None) -> jax.Array:
        """Compute the values `data * scale_inv`, rounded once to `dtype`.

        Args:
          dtype: float32, bfloat16 or float16. None: the dtype of the original tensor.
          usage: the plane to read. None: the rowwise plane if it is stored, else the columnwise plane.

        Returns:
          The tensor in `dtype`, sharded like the plane, without communication. A rotated columnwise plane gives the
          values of the rotated tensor.

        Raises:
          TypeError: `dtype` is not one of these.
          ValueError: the plane is not stored, or it is a shard with the scales of the whole tensor: gather it first.

        >>> from qshard.formats import FP8_E4M3
        >>> from qshard.jax import quantize
        >>> quantize(jnp.array([1.0, -2.0, 0.3]), FP8_E4M3).dequantize()
        Array([ 1.       , -2.       ,  0.2857143], dtype=float32)
        """
        dtype = as_float_name("dequantize", self.dtype if dtype is None else dtype)
        usage = as_plane(next(iter(self.planes), Usage.ROWWISE) if usage is None else usage, "dequantize", self.planes)
        values: jax.Array = _dequantize(self, dtype, usage)
        return values


def axes_of_shape(shape: layout.Shape) -> tuple[int | None, ...]:
    return tuple(None if i in (0, len(shape) - 1) else size for i, size in enumerate(shape))


@functools.partial(jax.jit, static_argnames=("dtype", "usage"), inline=True)
def _dequantize(q: QuantizedArray, dtype: str, usage: Usage) -> jax.Array:
    plane = q.plane(usage)
    values: jax.Array = plane_values(plane, q.format, usage, dtype, len(q.axes))
    if is_transposed(q.format, usage):
        values = jnp.swapaxes(values, -1, -2).reshape(q.shape)
    return values


def plane_values(plane: Plane, fmt: Format, usage: Usage, dtype: str, ndim: int | None = None) -> jax.Array:
    """Dequantize one plane of a tensor with `ndim` axes, in the axis order of the plane.

    If `data` has one axis more, `vmap` added it.
    """
    if ndim == 0 and not is_transposed(fmt, usage):
        return plane_values(plane._replace(data=plane.data[..., None]), fmt, usage, dtype, 1)[..., 0]
    data, block = plane.data, stored_block(fmt, usage)
    if fmt.per_tensor:  # One scale: neither sharding nor `vmap` can split a block.
        values: jax.Array = quantize_steps.dequantize(partitionable_ops, plane, fmt, usage, dtype)
        return values
    assert block is not None
    transposed = is_transposed(fmt, usage)
    added = 0 if ndim is None or transposed else data.ndim - ndim
    if has_rows_apart(fmt, usage) and data.ndim - added < 2:
        plane = plane._replace(data=data[..., None, :], scale_inv=plane.scale_inv[..., None, :])
    elif data.ndim - added < 2:
        plane = plane._replace(data=matrix_of(data, added))
    elif plane.scale_inv.ndim < data.ndim:
        plane, block = _join_matrices(
            plane, fmt, block, 1 if transposed else added, data.ndim if transposed else data.ndim - 1
        )
    plane, block = _divide_blocks(plane, fmt, block)
    values = quantize_steps.dequantize(partitionable_ops, plane, fmt, usage, dtype, block=block)
    return unfold(values, (*data.shape[:-1], data.shape[-1] * fmt.element.codes_per_byte), added)


def _join_matrices(
    plane: Plane, fmt: Format, block: tuple[int, int], start: int, stop: int
) -> tuple[Plane, tuple[int, int]]:
    """Fold the row axes `start` to `stop` of a plane, where blocks continue from one matrix to the next.

    Where an Explicit mesh shards axes that cannot be folded, divide the blocks into smaller ones instead, each with the
    scale of the block that it is part of. A block spans more than one of these rows.
    """
    sharding, transposed = jax.typeof(plane.data).sharding, stop == plane.data.ndim
    if not any(sharding.spec[start + 1 : stop]):
        return plane._replace(data=fold_axes(plane.data, start, stop)), block
    sizes = list(plane.data.shape[start:stop])
    if transposed:
        sizes[-1] *= fmt.element.codes_per_byte
    side = block[1] if transposed else block[0]
    shards = count_shards(sharding.mesh.shape, names_of(sharding.spec[stop - 1]))
    part = math.gcd(sizes[-1] // shards, side)
    grid = plane.scale_inv
    entries = [None if i == start else entry for i, entry in enumerate(jax.typeof(grid).sharding.spec)]
    grid = jax.sharding.reshard(grid, NamedSharding(sharding.mesh, PartitionSpec(*entries)))
    sizes[-1] //= part
    grid = lax.slice_in_dim(repeat_axis(grid, start, side // part), 0, math.prod(sizes), axis=start)
    shape = (*grid.shape[:start], *sizes, *grid.shape[start + 1 :])
    grid = reshape(grid, shape, (*entries[:start], *[None] * len(sizes), *entries[start + 1 :]))
    return plane._replace(scale_inv=grid), (block[0], part) if transposed else (part, block[1])


def _divide_blocks(plane: Plane, fmt: Format, block: tuple[int, int]) -> tuple[Plane, tuple[int, int]]:
    """Divide blocks that shards of an Explicit mesh split, so that none is split. Parts keep the scale of the block."""
    shape = (*plane.data.shape[:-1], plane.data.shape[-1] * fmt.element.codes_per_byte)
    shard_spec = ShardSpec.of(plane.data)
    if not shard_spec.splits(shape, block):
        return plane, block
    partial, grid = PartialBlocks.of(shard_spec, shape, block), plane.scale_inv
    return plane._replace(scale_inv=partial.spread(pin(grid, partial.grid), partial.count(shape))), partial.size


def _serialize(static: Sequence[Any]) -> bytes:
    fmt, dtype, axes = static
    return json.dumps([fmt.description, np.dtype(dtype).name, axes]).encode()


def _deserialize(text: bytes) -> tuple[Any, ...]:
    description, dtype, axes = json.loads(bytes(text))
    return Format.of(description), jnp.dtype(dtype), tuple(axes)


# Lets programs saved by `jax.export` take and return quantized arrays.
jax.export.register_pytree_node_serialization(
    QuantizedArray,
    serialized_name="qshard.QuantizedArray",
    serialize_auxdata=_serialize,
    deserialize_auxdata=_deserialize,
)
jax.export.register_namedtuple_serialization(Plane, serialized_name="qshard.Plane")
