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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from qshard import gemm_dispatch
from qshard._core import quantize_steps
from qshard._core.quantize_steps import Plane
from qshard.formats import Format, Usage
from qshard.gemm_dispatch import Gpu, Kind
from qshard.jax._ops import bind as ops
from qshard.jax._ops.bind import names_of
from qshard.jax._ops.custom_partitioning import asked, asking, local, specs_of
from qshard.jax._quantized.array import QuantizedArray
from qshard.layout import Shape, is_transposed

OfPlanes = Callable[[Plane, Plane], jax.Array]
Usages = tuple[Usage, Usage]

PLATFORM = "cuda"
"""Where codes are multiplied. Tests have the CPU do it."""

_LIBRARY_OF_OTHERS = 120900
"""The cuBLASLt that another machine is taken to have, for which a program is compiled. An older one is an error."""
_HOPPER = ("H100", "H200", "H800", "H20", "GH200")
"""In names of devices that are not here, of compute capability 9.0."""


@dataclass(frozen=True)
class Side:
    """How an operand lies: which axes of its codes are rows, and which are contracted."""

    format: Format
    rows: tuple[int, ...]
    contracted: tuple[int, ...]

    @classmethod
    def of(cls, q: QuantizedArray, stored: Usage, contracted: Usage) -> Side | None:
        """Of a plane; None if its blocks do not end where its axes, or parts of them, can."""
        plane, block = q.plane(stored), q.format.block
        data, scale_inv = plane.data, plane.scale_inv
        axes = tuple(range(data.ndim))
        if block is None or q.format.element.codes_per_byte > 1 or len(axes) < 2:
            return None
        if is_transposed(q.format, stored):
            side = cls(q.format, axes[:1], axes[1:])
        elif contracted is Usage.ROWWISE:
            side = cls(q.format, axes[:-1], axes[-1:])
        else:
            side = cls(q.format, axes[-1:], axes[:-1])
        if block[0] == 1 and side.contracted[-1] != axes[-1]:
            return None
        if block[0] > 1 and len(axes) > 2:
            return None
        blocks = [side.unit(axis) for axis in axes]
        whole = all(size % unit == 0 for size, unit in zip(data.shape, blocks, strict=True))
        grid = tuple(size // unit for size, unit in zip(data.shape, blocks, strict=True))
        return side if whole and grid == scale_inv.shape else None

    def unit(self, axis: int) -> int:
        """The length of a block along an axis of the codes."""
        rows, cols = self.format.block or (1, 1)
        last = axis == max(*self.rows, *self.contracted)
        return cols if last else rows

    def sizes(self, plane: Plane) -> tuple[Shape, Shape]:
        """Of the axes of rows, and of those that are contracted."""
        rows, depth = (tuple(plane.data.shape[axis] for axis in axes) for axes in (self.rows, self.contracted))
        return rows, depth

    def matrix(self, plane: Plane) -> Plane:
        """What a device has of the plane, as matrices with the contracted axis last."""
        data, scale_inv = plane.data, plane.scale_inv
        if self.contracted[-1] != data.ndim - 1:  # Squares, and so a matrix.
            data, scale_inv = local.transpose(data), scale_inv.T
        rows, depth = map(math.prod, self.sizes(plane))
        block = self.format.block or (1, 1)
        return Plane(data.reshape(rows, depth), scale_inv.reshape(rows // block[0], depth // block[1]))


@dataclass(frozen=True)
class Product:
    """What is static in a product."""

    kind: Kind
    a: Side
    b: Side
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

    def in_parts(self, parts: Parts, a: Plane, b: Plane) -> jax.Array:
        """Of what one device has, and what others add to it."""
        return parts.added(self.local(a, b))


class Axes(Protocol):
    """The row axes and the contracted axes of an operand, and the block length along each axis."""

    @property
    def rows(self) -> tuple[int, ...]: ...

    @property
    def contracted(self) -> tuple[int, ...]: ...

    def unit(self, axis: int) -> int: ...


class Parts(NamedTuple):
    """What each device multiplies.

    Attributes:
      a, b, out: how operands, and the result, are cut.
      scattered: of a sum over devices that contracted axes are cut over: an axis of the result and a mesh axis over
        which that is cut.
      summed: the mesh axes of sums that all their devices get.
    """

    a: PartitionSpec
    b: PartitionSpec
    out: PartitionSpec
    scattered: tuple[tuple[int, str], ...]
    summed: tuple[str, ...]

    def added(self, product: jax.Array) -> jax.Array:
        """A device's product with those that others add to it."""
        for axis, name in self.scattered:
            product = lax.psum_scatter(product, name, scatter_dimension=axis, tiled=True)
        return lax.psum(product, self.summed) if self.summed else product

    @classmethod
    def of(
        cls,
        sides: tuple[Axes, Axes],
        mesh: Mapping[str, int],
        shapes: tuple[Shape, Shape],
        specs: tuple[Any, Any],
        out: Any,
    ) -> Parts:
        """Of operands of these shapes, cut so, and of a result that is wanted cut so.

        A mesh axis cuts what both operands contract, if it cuts that of one and nothing else of the other; else rows,
        those of `a` first, unless those of `b` are wanted cut along it. It cuts whole blocks, or nothing.
        """
        a, b = (
            [names_of(entry) for entry in (*spec, *[None] * len(shape))]
            for spec, shape in zip(specs, shapes, strict=True)
        )
        elsewhere = [{name for entry in side for name in entry} for side in (a, b)]
        used: set[str] = set()

        def taken(names: Any, size: int, unit: int) -> tuple[str, ...]:
            kept: list[str] = []
            for name in dict.fromkeys(names):
                count = math.prod(mesh[other] for other in (*kept, name))
                if name not in used and size % (count * unit) == 0:
                    kept.append(name)
                    used.add(name)
            return tuple(kept)

        entries: list[dict[int, tuple[str, ...]]] = [{}, {}]
        for i, j in zip(sides[0].contracted, sides[1].contracted, strict=True):
            names = [name for name in a[i] if name in b[j] or name not in elsewhere[1]]
            names += [name for name in b[j] if name in a[i] or name not in elsewhere[0]]
            unit = max(sides[0].unit(i), sides[1].unit(j))
            entries[0][i] = entries[1][j] = taken(names, shapes[0][i], unit)
        summed = [name for names in entries[0].values() for name in names]
        of_b = zip(sides[1].rows, (*out, *[None] * len(shapes[1]))[len(sides[0].rows) :], strict=False)
        left_to_b = {name for axis, entry in of_b for name in names_of(entry) if name in b[axis]}
        rows: list[tuple[str, ...]] = []
        left: list[int] = []
        for of_a, side, its, shape, found in zip((True, False), sides, (a, b), shapes, entries, strict=True):
            for axis in side.rows:
                names = [name for name in its[axis] if not (of_a and name in left_to_b)]
                found[axis] = taken(names, shape[axis], side.unit(axis))
                rows.append(found[axis])
                left.append(shape[axis] // math.prod(mesh[name] for name in found[axis]))
        scattered = []
        for axis, entry in enumerate(out):
            for name in names_of(entry):
                if name in summed and left[axis] % mesh[name] == 0:
                    summed.remove(name)
                    scattered.append((axis, name))
                    rows[axis] += (name,)
                    left[axis] //= mesh[name]
        left_cut, right_cut = (PartitionSpec(*(found[axis] or None for axis in sorted(found))) for found in entries)
        result = PartitionSpec(*(names or None for names in rows))
        return cls(left_cut, right_cut, result, tuple(scattered), tuple(summed))


def product(
    a: QuantizedArray, b: QuantizedArray, usages: tuple[Usages, Usages], dtype: Any, of_values: OfPlanes
) -> jax.Array:
    """The product of two tensors, of codes where tensor cores take them, else as `of_values` makes it of their planes.

    Args:
      usages: of each, which plane is read, and which axes are contracted.
      dtype: float32 or bfloat16.
    """
    planes = a.plane(usages[0][0]), b.plane(usages[1][0])
    what = _taken(a, b, usages, dtype)
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


def _taken(a: QuantizedArray, b: QuantizedArray, usages: tuple[Usages, Usages], dtype: Any) -> Product | None:
    """The product, if tensor cores take its codes."""
    kind, gpu = gemm_dispatch.kind_of(a.format, b.format), _gpu_of(a.plane(usages[0][0]).data)
    if kind is None or gpu is None or not gemm_dispatch.runs_on(kind, gpu):
        return None
    left, right = Side.of(a, *usages[0]), Side.of(b, *usages[1])
    if left is None or right is None:
        return None
    (a_rows, a_depth), (b_rows, b_depth) = left.sizes(a.plane(usages[0][0])), right.sizes(b.plane(usages[1][0]))
    sizes = math.prod(a_rows), math.prod(b_rows), math.prod(a_depth)
    if a_depth != b_depth or not gemm_dispatch.fits(kind, sizes):
        return None
    return Product(kind, left, right, jnp.dtype(dtype).name)


def _of_codes(what: Product, planes: tuple[Plane, Plane], of_values: OfPlanes) -> OfPlanes | None:
    """The product of codes, on the mesh that operands are on; None where kinds of mesh axes are mixed."""
    mesh = ops.mesh_around(planes[0].data)
    kinds = set(mesh.axis_types)
    if kinds == {AxisType.Manual} or not ops.may_be_cut(planes[0].data):
        return what.local
    if kinds == {AxisType.Explicit}:
        return functools.partial(_explicit, what, jax.eval_shape(of_values, *planes).sharding)
    if kinds <= {AxisType.Auto}:
        return functools.partial(_auto, what, of_values)
    return None


def _explicit(what: Product, wanted: Any, a: Plane, b: Plane) -> jax.Array:
    cuts = tuple(jax.typeof(plane.data).sharding for plane in (a, b))
    mesh, shapes = cuts[0].mesh, (a.data.shape, b.data.shape)
    parts = Parts.of((what.a, what.b), dict(mesh.shape), shapes, (cuts[0].spec, cuts[1].spec), wanted.spec)

    def cut(plane: Plane, spec: PartitionSpec) -> Plane:
        made: Plane = jax.tree.map(lambda x: jax.sharding.reshard(x, NamedSharding(mesh, spec)), plane)
        return made

    each = jax.shard_map(
        functools.partial(what.in_parts, parts), mesh=mesh, in_specs=(parts.a, parts.b), out_specs=parts.out
    )
    made: jax.Array = jax.sharding.reshard(each(cut(a, parts.a), cut(b, parts.b)), NamedSharding(mesh, wanted.spec))
    return made


def _auto(what: Product, of_values: OfPlanes, a: Plane, b: Plane) -> jax.Array:
    def codes(a: Plane, b: Plane) -> jax.Array:
        return _partitioned(what)(a.data, a.scale_inv, b.data, b.scale_inv)

    (made,) = asked(codes, of_values, what, a, b)
    return made


@functools.cache
def _partitioned(what: Product) -> Callable[..., jax.Array]:
    """The product as XLA may cut it. It asks, once it knows how its operands and result are cut, and does as told."""

    def whole(a: jax.Array, a_scale_inv: jax.Array, b: jax.Array, b_scale_inv: jax.Array) -> jax.Array:
        return what.local(Plane(a, a_scale_inv), Plane(b, b_scale_inv))

    def partition(mesh: Any, operands: Any, result: Any) -> Any:
        a, b, out = specs_of("linear", (operands[0], operands[2], result))
        shapes = tuple(operands[0].shape), tuple(operands[2].shape)
        parts = Parts.of((what.a, what.b), dict(mesh.shape), shapes, (a, b), out)

        def each(a: jax.Array, a_scale_inv: jax.Array, b: jax.Array, b_scale_inv: jax.Array) -> jax.Array:
            return what.in_parts(parts, Plane(a, a_scale_inv), Plane(b, b_scale_inv))

        a, b, out = (NamedSharding(mesh, spec) for spec in (parts.a, parts.b, parts.out))
        return mesh, each, out, (a, a, b, b)

    rule, units = _rule(what)
    return asking(whole, partition, rule, units)


def _rule(what: Product) -> tuple[str, dict[str, int]]:
    """How Shardy carries cuts through: axes by name, of which those of blocks are products of blocks and a length.

    What is contracted is no reduction factor, for which Shardy may add what `in_parts` has added up already.
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
    device = getattr(ops.mesh_around(x), "abstract_device", None) or SimpleNamespace(device_kind="")
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
