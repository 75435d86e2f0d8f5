"""GEMMs of codes in blocks, for which XLA has none: qshard's own op, where the GPU has tensor cores for them.

Whether it has is known when a program is lowered: `product` traces both ways to multiply, and XLA sees one. How the
operands of a device are multiplied, and what is added up over devices, is the same for every kind of mesh; but

- on one device, and in `shard_map`, arrays are what a device has;
- on Explicit meshes their types say how they are cut, and a `shard_map` multiplies what each device has;
- on Auto meshes XLA decides after tracing. It can cut an op over axes that all its buffers share (`bind.py`), and a
  product has none. So it asks back (`custom_partitioning.py`).

Exports for several devices multiply values (`custom_partitioning.py`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from qshard import gemm_dispatch
from qshard._core import quantize_steps
from qshard._core.quantize_steps import Plane
from qshard.formats import Usage
from qshard.gemm_dispatch import Gpu, Kind
from qshard.jax._gemm.product_sharding import PlaneAxes, ProductSharding
from qshard.jax._ops.custom_partitioning import call_partitionable, local, partitionable, specs_of
from qshard.jax._ops.mesh import MeshKind, mesh_of
from qshard.jax._quantized.array import QuantizedArray

OfPlanes = Callable[[Plane, Plane], jax.Array]
Usages = tuple[Usage, Usage]

PLATFORM = "cuda"
"""Where codes are multiplied. Tests have the CPU do it."""

_LIBRARY_OF_OTHERS = 120900
"""The cuBLASLt that another machine is taken to have, for which a program is compiled. An older one is an error."""
_HOPPER = ("H100", "H200", "H800", "H20", "GH200")
"""In names of devices that are not here, of compute capability 9.0."""


def _axes_of(q: QuantizedArray, stored: Usage, contracted: Usage) -> PlaneAxes | None:
    """The axes of a plane of 1-D or 2-D blocks; None if the op does not take them as they lie."""
    axes = PlaneAxes.of(q, stored, contracted)
    if axes is None or ((axes.last > 1) if q.format.transposes else (axes.contracted[-1] != axes.last)):
        return None
    return axes


@dataclass(frozen=True)
class Product:
    """What is static in a product."""

    kind: Kind
    a: PlaneAxes
    b: PlaneAxes
    dtype: str

    def local(self, a: Plane, b: Plane) -> jax.Array:
        """Of what one device has."""
        shape = self.a.sizes(a)[0] + self.b.sizes(b)[0]
        x, y = self.a.matrix(a), self.b.matrix(b)
        (m, k), (n, _) = x.data.shape, y.data.shape
        formats = self.a.format, self.b.format
        if gemm_dispatch.fits(self.kind, (m, n, k)):
            size = gemm_dispatch.workspace_size(*formats, (m, n, k))
            made: jax.Array = gemm_dispatch.multiply(
                local, x, formats[0], y, formats[1], dtype=self.dtype, fast=False, workspace=size
            )
        else:
            left, right = (
                quantize_steps.dequantize(local, plane, fmt, Usage.ROWWISE, "bfloat16")
                for plane, fmt in zip((x, y), formats, strict=True)
            )
            contracted = (((1,), (1,)), ((), ()))
            made = lax.dot_general(left, right, contracted, preferred_element_type=jnp.dtype(self.dtype))
        return made.reshape(shape)

    def over_devices(self, sharding: ProductSharding, a: Plane, b: Plane) -> jax.Array:
        """The local product, and the sum over devices."""
        return sharding.added(self.local(a, b))


def product(
    a: QuantizedArray, b: QuantizedArray, usages: tuple[Usages, Usages], dtype: Any, of_values: OfPlanes
) -> jax.Array:
    """The product of two tensors, of codes where tensor cores take them, else as `of_values` makes it of their planes.

    Args:
      usages: of each, which plane is read, and which axes are contracted.
      dtype: float32 or bfloat16.
    """
    planes = a.plane(usages[0][0]), b.plane(usages[1][0])
    what = _block_product(a, b, usages, dtype)
    of_codes = None if what is None else _of_codes(what, planes, of_values)
    if of_codes is None:
        return of_values(*planes)

    @jax.custom_batching.custom_vmap
    def batched(a: Plane, b: Plane) -> jax.Array:
        return of_codes(a, b)

    @batched.def_vmap
    def _(_: int, axes: Any, a: Plane, b: Plane) -> tuple[jax.Array, bool]:
        return jax.vmap(of_values, jax.tree.map(lambda is_batched: 0 if is_batched else None, axes))(a, b), True

    made: jax.Array = lax.platform_dependent(*planes, **{PLATFORM: batched}, default=of_values)
    return made


def _block_product(a: QuantizedArray, b: QuantizedArray, usages: tuple[Usages, Usages], dtype: Any) -> Product | None:
    """The product, if tensor cores take its codes."""
    kind, gpu = gemm_dispatch.kind_of(a.format, b.format), _gpu_of(a.plane(usages[0][0]).data)
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


def _of_codes(what: Product, planes: tuple[Plane, Plane], of_values: OfPlanes) -> OfPlanes | None:
    """The product of codes, on the mesh that operands are on; None where kinds of mesh axes are mixed."""
    kind = MeshKind.of(planes[0].data)
    if kind is MeshKind.LOCAL:
        return what.local
    if kind is MeshKind.MIXED:
        return None
    return functools.partial(_explicit if kind is MeshKind.EXPLICIT else _auto, what, of_values)


def _explicit(what: Product, of_values: OfPlanes, a: Plane, b: Plane) -> jax.Array:
    wanted = jax.eval_shape(of_values, a, b).sharding.spec
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


def _auto(what: Product, of_values: OfPlanes, a: Plane, b: Plane) -> jax.Array:
    def codes(a: Plane, b: Plane) -> jax.Array:
        return _partitionable(what)(a.data, a.scale_inv, b.data, b.scale_inv)

    (made,) = call_partitionable(codes, of_values, what, a, b)
    return made


@functools.cache
def _partitionable(what: Product) -> Callable[..., jax.Array]:
    """The product as XLA may cut it. It asks, once it knows how its operands and result are cut, and does as told."""

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
    """How Shardy carries cuts through: axes by name, of which those of blocks are products of blocks and a length.

    What is contracted is no reduction factor, for which Shardy may add what `over_devices` has added up already.
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


# --- what it will run on ---


def _gpu_of(x: jax.Array) -> Gpu | None:
    """The GPU that a program will run on, as far as is known while it is traced; None: there is none."""
    device = getattr(mesh_of(x), "abstract_device", None) or SimpleNamespace(device_kind="")
    here = _gpus_here()
    if device.device_kind in here or (here and not device.device_kind):
        return here.get(device.device_kind) or next(iter(here.values()))
    if any(name in device.device_kind for name in _HOPPER):
        return Gpu((9, 0), _LIBRARY_OF_OTHERS)
    return None


@functools.cache
def _gpus_here() -> dict[str, Gpu]:
    """By the kind of device."""
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:
        return {}
    version = gemm_dispatch.library_version()
    found = {}
    for device in devices:
        major, minor = (int(number) for number in str(device.compute_capability).split("."))
        found[device.device_kind] = Gpu((major, minor), version)
    return found
