"""GEMMs of block-scaled codes by qshard's own op, on GPUs that have tensor cores for them.

The platform is known only when a program is lowered, so `product` traces both the GEMM of codes and the GEMM of values;
XLA sees one. The local product and the sum over devices are the same for all kinds of meshes:

- on one device, and in `shard_map`, arrays are local;
- on Explicit meshes types give the shardings, and a `shard_map` multiplies the shards of each device;
- on Auto meshes XLA shards after tracing. It can shard an op only along axes that all buffers of the op share
  (`bind.py`). A product has no such axis, so it has a custom partitioning rule (`custom_partitioning.py`).

Exports for several devices multiply values (`custom_partitioning.py`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from qshard import gemm_dispatch
from qshard._core.quantize_steps import Plane
from qshard.formats import Usage
from qshard.gemm_dispatch import Kind
from qshard.jax._gemm import target_gpu
from qshard.jax._gemm.product_sharding import (
    PlaneAxes,
    PlaneProduct,
    ProductSharding,
    multiply_local_values,
    without_vmap,
)
from qshard.jax._ops.custom_partitioning import call_partitionable, local, partitionable, specs_of
from qshard.jax._ops.mesh import MeshKind
from qshard.jax._quantized.array import QuantizedArray

Usages = tuple[Usage, Usage]


def _axes_of(q: QuantizedArray, stored: Usage, contracted: Usage) -> PlaneAxes | None:
    """The axes of a plane of blocks; None if the op cannot take the plane in this layout."""
    axes = PlaneAxes.of(q, stored, contracted)
    if axes is None or ((axes.last > 1) if q.format.shares_codes else (axes.contracted[-1] != axes.last)):
        return None
    return axes


@dataclass(frozen=True)
class Product:
    """Static options of a product of codes: the kind of GEMM, the axes of both operands, and the result's dtype."""

    kind: Kind
    a: PlaneAxes
    b: PlaneAxes
    dtype: str

    def local(self, a: Plane, b: Plane) -> jax.Array:
        """Multiply local planes: their codes, or their values if the shards do not fit the op."""
        x, y = self.a.matrix(a), self.b.matrix(b)
        (m, k), (n, _) = x.data.shape, y.data.shape
        if not gemm_dispatch.fits(self.kind, (m, n, k)):
            return multiply_local_values((self.a, self.b), a, b, self.dtype)
        formats = self.a.format, self.b.format
        size = gemm_dispatch.workspace_size(*formats, (m, n, k))
        made: jax.Array = gemm_dispatch.multiply(
            local, x, formats[0], y, formats[1], dtype=self.dtype, fast=False, workspace=size
        )
        return made.reshape(self.a.sizes(a)[0] + self.b.sizes(b)[0])

    def over_devices(self, sharding: ProductSharding, a: Plane, b: Plane) -> jax.Array:
        """Multiply local planes, and sum over the devices that shard contracted axes."""
        return sharding.sum_over_devices(self.local(a, b))


def product(
    a: QuantizedArray, b: QuantizedArray, usages: tuple[Usages, Usages], dtype: Any, multiply_values: PlaneProduct
) -> jax.Array:
    """Multiply two tensors: their codes where tensor cores take them, otherwise by `multiply_values`.

    `usages` has, for each operand, the plane to read and its contracted axes. `multiply_values` multiplies dequantized
    planes.
    """
    planes = a.plane(usages[0][0]), b.plane(usages[1][0])
    what = _block_product(a, b, usages, dtype)
    multiply_codes = None if what is None else _multiply_codes(what, planes, multiply_values)
    if multiply_codes is None:
        return multiply_values(*planes)
    batched = without_vmap(multiply_codes, multiply_values)
    return target_gpu.by_platform(batched, multiply_values, *planes)


def _block_product(a: QuantizedArray, b: QuantizedArray, usages: tuple[Usages, Usages], dtype: Any) -> Product | None:
    """The product of codes, or None if tensor cores do not take it."""
    kind, gpu = gemm_dispatch.kind_of(a.format, b.format), target_gpu.gpu_of(a.plane(usages[0][0]).data)
    if kind not in ("blocks", "mxfp8") or gpu is None or not gemm_dispatch.runs_on(kind, gpu):
        return None
    left, right = _axes_of(a, *usages[0]), _axes_of(b, *usages[1])
    if left is None or right is None:
        return None
    (a_rows, a_depth), (b_rows, b_depth) = left.sizes(a.plane(usages[0][0])), right.sizes(b.plane(usages[1][0]))
    sizes = math.prod(a_rows), math.prod(b_rows), math.prod(a_depth)
    if a_depth != b_depth or not gemm_dispatch.fits(kind, sizes):
        return None
    return Product(kind, left, right, jnp.dtype(dtype).name)


def _multiply_codes(what: Product, planes: tuple[Plane, Plane], multiply_values: PlaneProduct) -> PlaneProduct | None:
    """The function that multiplies codes on the mesh of the operands; None if the mesh has axes of several kinds."""
    kind = MeshKind.of(planes[0].data)
    if kind is MeshKind.LOCAL:
        return what.local
    if kind is MeshKind.MIXED:
        return None
    return functools.partial(_explicit if kind is MeshKind.EXPLICIT else _auto, what, multiply_values)


def _explicit(what: Product, multiply_values: PlaneProduct, a: Plane, b: Plane) -> jax.Array:
    """Multiply on an Explicit mesh, in a `shard_map`."""
    wanted = jax.eval_shape(multiply_values, a, b).sharding.spec
    given = tuple(jax.typeof(plane.data).sharding for plane in (a, b))
    mesh, shapes = given[0].mesh, (a.data.shape, b.data.shape)
    own = ProductSharding.of((what.a, what.b), dict(mesh.shape), shapes, (given[0].spec, given[1].spec), wanted)

    def move(plane: Plane, spec: PartitionSpec) -> Plane:
        made: Plane = jax.tree.map(lambda x: jax.sharding.reshard(x, NamedSharding(mesh, spec)), plane)
        return made

    each = jax.shard_map(
        functools.partial(what.over_devices, own), mesh=mesh, in_specs=(own.a, own.b), out_specs=own.out
    )
    made: jax.Array = jax.sharding.reshard(each(move(a, own.a), move(b, own.b)), NamedSharding(mesh, wanted))
    return made


def _auto(what: Product, multiply_values: PlaneProduct, a: Plane, b: Plane) -> jax.Array:
    """Multiply on an Auto mesh, by a custom partitioning rule."""

    def codes(a: Plane, b: Plane) -> jax.Array:
        return _partitionable(what)(a.data, a.scale_inv, b.data, b.scale_inv)

    (made,) = call_partitionable(codes, multiply_values, what, a, b)
    return made


@functools.cache
def _partitionable(what: Product) -> Callable[..., jax.Array]:
    """The product with its custom partitioning rule, which XLA calls with the shardings of operands and result."""

    def whole(a: jax.Array, a_scale_inv: jax.Array, b: jax.Array, b_scale_inv: jax.Array) -> jax.Array:
        return what.local(Plane(a, a_scale_inv), Plane(b, b_scale_inv))

    def partition(mesh: Any, operands: Any, result: Any) -> Any:
        a, b, out = specs_of("linear", (operands[0], operands[2], result))
        shapes = tuple(operands[0].shape), tuple(operands[2].shape)
        own = ProductSharding.of((what.a, what.b), dict(mesh.shape), shapes, (a, b), out)

        def each(a: jax.Array, a_scale_inv: jax.Array, b: jax.Array, b_scale_inv: jax.Array) -> jax.Array:
            return what.over_devices(own, Plane(a, a_scale_inv), Plane(b, b_scale_inv))

        a, b, out = (NamedSharding(mesh, spec) for spec in own[:3])
        return mesh, each, out, (a, a, b, b)

    rule, units = _rule(what)
    return partitionable(whole, partition, rule, units)


def _rule(what: Product) -> tuple[str, dict[str, int]]:
    """The sharding rule for Shardy: named axes. An axis of codes is blocks times the length of a block.

    Contracted axes are not reduction factors: Shardy could sum over devices again, after `over_devices`.
    """
    units: dict[str, int] = {}
    operands, result = [], []
    for letter, side in (("a", what.a), ("b", what.b)):
        names = {axis: f"k{i}" for i, axis in enumerate(side.contracted)}
        names |= {axis: f"{letter}{i}" for i, axis in enumerate(side.rows)}
        codes = []
        for axis in sorted(names):
            name, unit = names[axis], side.unit(axis)
            if unit > 1:
                units[f"{name}u"] = unit
            codes.append(f"({name} {name}u)" if unit > 1 else name)
        operands += [" ".join(codes), " ".join(names[axis] for axis in sorted(names))]
        result += [codes[axis] for axis in side.rows]
    return f"{', '.join(operands)} -> {' '.join(result)}", units
