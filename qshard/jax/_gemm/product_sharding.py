"""Products of block-scaled planes over devices: their axes, the shards that a device multiplies, sums over devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from qshard._core import quantize_steps
from qshard._core.quantize_steps import Plane
from qshard.formats import Format, Usage
from qshard.jax._ops.custom_partitioning import local
from qshard.jax._ops.mesh import MeshAxes, Scattered, assign_mesh_axes, assign_scatter, count_shards, names_of, sum_over
from qshard.jax._quantized.array import QuantizedArray
from qshard.layout import Shape, is_transposed, stored_block

Arrays = tuple[jax.Array, ...]
PlaneProduct = Callable[[Plane, Plane], jax.Array]


@dataclass(frozen=True)
class PlaneAxes:
    """The axes of a plane of blocks: `rows`, and the axes that a product contracts; and the dtypes of its arrays."""

    format: Format
    stored: Usage
    rows: tuple[int, ...]
    contracted: tuple[int, ...]
    dtypes: tuple[str, ...] = ()

    @classmethod
    def of(cls, q: QuantizedArray, stored: Usage, contracted: Usage) -> Self | None:
        """The axes of the plane `stored`; None unless each scale belongs to a whole block of its axes."""
        plane, fmt = q.plane(stored), q.format
        axes = tuple(range(plane.data.ndim))
        if fmt.per_tensor or len(axes) < 2:
            return None
        if is_transposed(fmt, stored):
            rows, depth = axes[:1], axes[1:]
        elif contracted is Usage.ROWWISE:
            rows, depth = axes[:-1], axes[-1:]
        else:
            rows, depth = axes[-1:], axes[:-1]
        own = cls(fmt, stored, rows, depth, tuple(part.dtype.name for part in plane if part is not None))
        sizes = list(zip(own.shape(plane.data.shape), map(own.unit, axes), strict=True))
        whole = all(size % unit == 0 for size, unit in sizes)
        return own if whole and tuple(size // unit for size, unit in sizes) == plane.scale_inv.shape else None

    @property
    def block(self) -> tuple[int, int]:
        """The block of the plane in its own axes, transposed in a transposed plane."""
        block = stored_block(self.format, self.stored)
        assert block is not None
        return block

    @property
    def last(self) -> int:
        return len(self.rows) + len(self.contracted) - 1

    def unit(self, axis: int) -> int:
        """The length of a block along an axis, in elements."""
        return self.block[1] if axis == self.last else self.block[0] if axis == self.last - 1 else 1

    def shape(self, codes: Shape) -> Shape:
        """The shape in elements of codes with shape `codes`."""
        return (*codes[:-1], codes[-1] * self.format.element.codes_per_byte)

    def sizes(self, plane: Plane) -> tuple[Shape, Shape]:
        rows, depth = (tuple(plane.data.shape[axis] for axis in axes) for axes in (self.rows, self.contracted))
        return rows, depth

    def matrix(self, plane: Plane) -> Plane:
        """Reshape a local plane to a matrix with the contracted axis last."""
        data, scale_inv = plane.data, plane.scale_inv
        if self.contracted[-1] != self.last:  # Only planes of 2-D blocks, which are matrices.
            data, scale_inv = local.transpose(data), scale_inv.T
        rows, depth = map(math.prod, self.sizes(plane))
        block = self.format.block_shape()
        return Plane(data.reshape(rows, depth), scale_inv.reshape(rows // block[0], depth // block[1]))

    def values(self, plane: Plane) -> jax.Array:
        """Dequantize a local plane to bfloat16."""
        values: jax.Array = quantize_steps.dequantize(
            local, plane, self.format, self.stored, "bfloat16", block=self.block
        )
        return values

    def arrays(self, plane: Plane) -> Arrays:
        """The codes and block scales as unsigned integers, and a global scale as it is.

        XLA moves 8-bit floats as wider ones, and pads with zeros, which E8M0 cannot represent.
        """
        bits = [lax.bitcast_convert_type(part, f"uint{8 * part.dtype.itemsize}") for part in plane[:2]]
        return (*bits, *(part for part in plane[2:] if part is not None))

    def plane(self, arrays: Arrays) -> Plane:
        """The plane of `arrays`: the inverse."""
        parts = [lax.bitcast_convert_type(part, name) for part, name in zip(arrays[:2], self.dtypes, strict=False)]
        return Plane(*parts, *arrays[2:])

    def specs(self, spec: PartitionSpec) -> tuple[PartitionSpec, ...]:
        """The shardings of `arrays`: block scales follow codes, and a global scale is replicated."""
        return (spec, spec, *[PartitionSpec()] * (len(self.dtypes) - 2))


def multiply_local_values(sides: tuple[PlaneAxes, PlaneAxes], a: Plane, b: Plane, dtype: str) -> jax.Array:
    """Multiply the values of local planes. The result has the rows of `a`, then the rows of `b`."""
    contracted = ((sides[0].contracted, sides[1].contracted), ((), ()))
    values = sides[0].values(a), sides[1].values(b)
    return lax.dot_general(*values, contracted, preferred_element_type=jnp.dtype(dtype))


def without_vmap(multiply_codes: PlaneProduct, multiply_values: PlaneProduct) -> PlaneProduct:
    """Return `multiply_codes`, which XLA cannot batch, with `multiply_values` in its place under `vmap`."""
    call = jax.custom_batching.custom_vmap(multiply_codes)

    @call.def_vmap
    def _(_: int, axes: Any, a: Plane, b: Plane) -> tuple[jax.Array, bool]:
        return jax.vmap(multiply_values, jax.tree.map(lambda is_batched: 0 if is_batched else None, axes))(a, b), True

    product: PlaneProduct = call
    return product


class ProductSharding(NamedTuple):
    """The shards that each device multiplies, and the sum over devices.

    Attributes:
      a, b, out: shardings of the operands and of the result.
      scattered: pairs of a result axis and a mesh axis that shards contracted axes: the sum is reduce-scattered there.
      summed: the other mesh axes that shard contracted axes: all of their devices get the sum.
    """

    a: PartitionSpec
    b: PartitionSpec
    out: PartitionSpec
    scattered: Scattered
    summed: MeshAxes

    def sum_over_devices(self, product: jax.Array) -> jax.Array:
        return sum_over(product, self.scattered, self.summed)

    @classmethod
    def of(
        cls,
        sides: tuple[PlaneAxes, PlaneAxes],
        mesh: Mapping[str, int],
        shapes: tuple[Shape, Shape],
        specs: tuple[Any, Any],
        out: Any,
    ) -> ProductSharding:
        """Choose the shardings for operands of these shapes and shardings, and a result to be sharded as `out`.

        A mesh axis shards the contracted axis of both operands if it already shards it in one, and nothing else in the
        other. Otherwise it shards rows, the rows of `a` first, unless `out` needs the rows of `b` sharded along it.
        Shards are whole blocks. `shapes` are in elements.
        """
        a, b = (
            [names_of(entry) for entry in (*spec, *[None] * len(shape))]
            for spec, shape in zip(specs, shapes, strict=True)
        )
        elsewhere = [{name for entry in side for name in entry} for side in (a, b)]
        requests: list[tuple[Any, int, int]] = []
        for i, j in zip(sides[0].contracted, sides[1].contracted, strict=True):
            names = [name for name in a[i] if name in b[j] or name not in elsewhere[1]]
            names += [name for name in b[j] if name in a[i] or name not in elsewhere[0]]
            requests.append((names, shapes[0][i], max(sides[0].unit(i), sides[1].unit(j))))
        of_b = zip(sides[1].rows, (*out, *[None] * len(shapes[1]))[len(sides[0].rows) :], strict=False)
        left_to_b = {name for axis, entry in of_b for name in names_of(entry) if name in b[axis]}
        for side, its, shape, without in zip(sides, (a, b), shapes, (left_to_b, ()), strict=True):
            for axis in side.rows:
                names = [name for name in its[axis] if name not in without]
                requests.append((names, shape[axis], side.unit(axis)))
        found, depth = assign_mesh_axes(mesh, requests), len(sides[0].contracted)
        contracted, rows = found[:depth], found[depth:]
        local_shape = [
            size // count_shards(mesh, names) for (_, size, _), names in zip(requests[depth:], rows, strict=True)
        ]
        summed = [name for names in contracted for name in names]
        scattered = assign_scatter(mesh, out, local_shape, summed)
        operands, first = [], 0
        for side in sides:
            own = rows[first : (first := first + len(side.rows))]
            entries = dict(zip((*side.contracted, *side.rows), (*contracted, *own), strict=True))
            operands.append(_spec(entries[axis] for axis in sorted(entries)))
        result = _spec((*names, *(name for at, name in scattered if at == axis)) for axis, names in enumerate(rows))
        used = {name for _, name in scattered}
        left, right = operands
        return cls(left, right, result, scattered, tuple(name for name in summed if name not in used))


def _spec(entries: Any) -> PartitionSpec:
    return PartitionSpec(*(names or None for names in entries))
