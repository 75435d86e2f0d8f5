"""`QuantizedArray`: codes and scales as one pytree."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from qshard import layout
from qshard.formats import ELEMENTS, Format, Usage
from qshard.jax import ops
from qshard.jax._runs import reshape_as, split_rows

__all__ = ["Plane", "QuantizedArray", "columnwise_is_transposed"]


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["data", "scale_inv", "global_scale_inv"], meta_fields=[]
)
@dataclass(frozen=True, eq=False)
class Plane:
    """The codes of a tensor and the scales that decode them, in the shapes of `qshard.layout.plane`.

    Attributes:
      data: codes, in the element's own dtype.
      scale_inv: `value = data * scale_inv`.
      global_scale_inv: the second scale of formats that have one, else None.
    """

    data: jax.Array
    scale_inv: jax.Array
    global_scale_inv: jax.Array | None = None


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["rowwise", "columnwise"],
    meta_fields=["format", "dtype", "axes"],
)
@dataclass(frozen=True, eq=False, kw_only=True)
class QuantizedArray:
    """A quantized tensor: a pytree of arrays, with what it is of as static data.

    The leaves may be whatever a tree transformation puts there: shardings, None, arrays with a new leading axis
    (`vmap`, `scan`), shards of arrays (`shard_map`). So nothing static depends on a size that these change, and `shape`
    is read off the arrays.

    Attributes:
      format: how it is stored.
      dtype: of the tensor it stands for, and the default of `dequantize`.
      axes: its axes: the sizes of those between the first and the last, None for those two.
      rowwise: the plane for a GEMM that contracts the last axis, or None.
      columnwise: the plane for a GEMM that contracts the other axes, or None.
    """

    format: Format
    dtype: np.dtype[Any]
    axes: tuple[int | None, ...]
    rowwise: Plane | None = None
    columnwise: Plane | None = None

    def __str__(self) -> str:
        planes = " and ".join(name for name in ("rowwise", "columnwise") if getattr(self, name) is not None)
        return f"QuantizedArray({self.format}, {self.dtype}, {planes or 'no plane'})"

    @property
    def shape(self) -> layout.Shape:
        """Of the tensor it stands for, with the axes that `vmap` or `scan` have added in front."""
        if self.rowwise is not None or not columnwise_is_transposed(self.format):
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
        """That of the rowwise plane if there is one, else of the columnwise plane."""
        either = self.rowwise or self.columnwise
        return None if either is None else either.global_scale_inv

    def plane(self, usage: Usage) -> Plane:
        """The plane for one usage.

        Raises:
          ValueError: it is not there.
        """
        plane = self.rowwise if usage is Usage.ROWWISE else self.columnwise
        if plane is None:
            raise ValueError(f"plane: usage ({usage}) is not among the planes of {self}; quantize with it")
        return plane

    def dequantize(self, dtype: Any = None) -> jax.Array:
        """The values `data * scale_inv`, rounded once to `dtype`.

        Args:
          dtype: float32, bfloat16 or float16; None: that of the tensor.

        Returns:
          The tensor, of `dtype`. Sharded as the plane is, and without communication.

        Raises:
          TypeError: `dtype` is not one of them.
          ValueError: there is no plane.

        >>> from qshard.formats import FP8_E4M3
        >>> from qshard.jax import quantize
        >>> quantize(jnp.array([1.0, -2.0, 0.3]), FP8_E4M3).dequantize()
        Array([ 1.       , -2.       ,  0.2857143], dtype=float32)
        """
        values: jax.Array = _dequantize(self, jnp.dtype(self.dtype if dtype is None else dtype).name)
        return values


@functools.partial(jax.jit, static_argnames="dtype", inline=True)
def _dequantize(q: QuantizedArray, dtype: str) -> jax.Array:
    if q.rowwise is not None:
        return _values(q.rowwise, q.format, dtype)
    values = _values(q.plane(Usage.COLUMNWISE), q.format, dtype)
    return jnp.swapaxes(values, -1, -2).reshape(q.shape) if columnwise_is_transposed(q.format) else values


def columnwise_is_transposed(fmt: Format) -> bool:
    """Whether the columnwise plane is that of `x.T`; no format's answer depends on the shape."""
    return layout.plane(fmt, (0, 0), Usage.COLUMNWISE).transposed


def _values(plane: Plane, fmt: Format, dtype: str) -> jax.Array:
    """The values of a plane, in the plane's order of axes."""
    if fmt.block is not None:
        raise NotImplementedError(f"dequantize: format ({fmt}) has blocks, which qshard.jax does not do yet")
    runs = split_rows(plane.data)
    values = ops.dequantize(runs.array, runs.spread(plane.scale_inv), element=fmt.element.name, dtype=dtype)
    return reshape_as(values, plane.data)


def _serialize(static: Sequence[Any]) -> bytes:
    fmt, dtype, axes = static
    fields = {field.name: getattr(fmt, field.name) for field in dataclasses.fields(fmt)}
    return json.dumps([fields | {"element": fmt.element.name}, np.dtype(dtype).name, axes]).encode()


def _deserialize(text: bytes) -> tuple[Any, ...]:
    fields, dtype, axes = json.loads(bytes(text))
    block = None if fields["block"] is None else tuple(fields["block"])
    fmt = Format(**fields | {"element": ELEMENTS[fields["element"]], "block": block})
    return fmt, jnp.dtype(dtype), tuple(axes)


# So that a program saved by jax.export may take and give quantized arrays.
jax.export.register_pytree_node_serialization(
    QuantizedArray,
    serialized_name="qshard.QuantizedArray",
    serialize_auxdata=_serialize,
    deserialize_auxdata=_deserialize,
)
jax.export.register_pytree_node_serialization(
    Plane,
    serialized_name="qshard.Plane",
    serialize_auxdata=lambda _: b"",
    deserialize_auxdata=lambda _: (),
)
