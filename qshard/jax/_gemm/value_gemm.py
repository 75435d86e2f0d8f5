"""Products of dequantized values on Auto meshes: XLA gathers their codes, at a byte an element or less.

XLA decides on shardings after tracing. Left alone it gathers an operand where the product reads it, which is after
dequantizing, and in both passes: the planes of a tensor of vectors hold different numbers. Here dequantizing and the
product are one op with a custom partitioning rule (`custom_partitioning.py`), so what crosses is the op's operands.

The rule does not tie the contracted axes of the two operands: each arrives as it is sharded. Where one alone is sharded
there, its codes are gathered, or the other one is sliced and results are added up, whichever moves less.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from qshard._core import quantize_steps
from qshard._core.quantize_steps import Plane
from qshard.formats import Format, Usage
from qshard.jax._gemm.block_gemm import OfPlanes, Parts, Usages
from qshard.jax._ops import bind as ops
from qshard.jax._ops.custom_partitioning import asked, asking, local, mesh_of_call, spec_on
from qshard.jax._quantized.array import QuantizedArray
from qshard.layout import Shape, is_transposed, stored_block

Arrays = tuple[jax.Array, ...]


@dataclass(frozen=True)
class Operand:
    """How a plane of blocks lies: which axes of its codes are rows, and which are contracted."""

    format: Format
    stored: Usage
    rows: tuple[int, ...]
    contracted: tuple[int, ...]
    dtypes: tuple[str, ...]

    @classmethod
    def of(cls, q: QuantizedArray, stored: Usage, contracted: Usage, mesh: Mapping[str, int]) -> Operand | None:
        """The operand that a plane is; None if scales do not belong to whole blocks of its axes as they lie, or a mesh
        axis does not divide their number: parts of mesh axes would then shard them.
        """
        plane, fmt = q.plane(stored), q.format
        axes = tuple(range(plane.data.ndim))
        if fmt.block is None or fmt.scaling.global_scale == "row" or len(axes) < 2:
            return None
        if is_transposed(fmt, stored):
            rows, depth = axes[:1], axes[1:]
        elif contracted is Usage.ROWWISE:
            rows, depth = axes[:-1], axes[-1:]
        else:
            rows, depth = axes[-1:], axes[:-1]
        operand = cls(fmt, stored, rows, depth, tuple(part.dtype.name for part in plane if part is not None))
        units = [operand.unit(axis) for axis in axes]
        shape = operand.shape(plane.data.shape)
        whole = all(size % unit == 0 for size, unit in zip(shape, units, strict=True))
        grid = tuple(size // unit for size, unit in zip(shape, units, strict=True))
        whole &= all(size % shards == 0 for size in grid if size > 1 for shards in mesh.values())
        # Shardy's rules take no factor of size 1 beside another.
        whole &= all(size > 1 or unit == 1 for size, unit in zip(grid, units, strict=True))
        return operand if whole and grid == plane.scale_inv.shape else None

    @property
    def block(self) -> tuple[int, int]:
        block = stored_block(self.format, self.stored)
        assert block is not None
        return block

    @property
    def last(self) -> int:
        return len(self.rows) + len(self.contracted) - 1

    @property
    def bytes(self) -> float:
        """Bytes of an element's code."""
        return 1 / self.format.element.codes_per_byte

    def unit(self, axis: int) -> int:
        """Elements of a block along an axis."""
        return self.block[1] if axis == self.last else self.block[0] if axis == self.last - 1 else 1

    def shape(self, codes: Shape) -> Shape:
        """The shape in elements of codes of this shape."""
        return (*codes[:-1], codes[-1] * self.format.element.codes_per_byte)

    def arrays(self, plane: Plane) -> Arrays:
        """The parts of a plane as integers, but for a scale of the tensor: XLA moves numbers of other widths as wider
        ones, and pads with zeros, which E8M0 does not have.
        """
        bits = [lax.bitcast_convert_type(part, f"uint{8 * part.dtype.itemsize}") for part in plane[:2]]
        return (*bits, *(part for part in plane[2:] if part is not None))

    def values(self, arrays: Arrays) -> jax.Array:
        """The values of local codes, in bfloat16."""
        parts = [lax.bitcast_convert_type(part, name) for part, name in zip(arrays[:2], self.dtypes, strict=False)]
        plane = Plane(*parts, *arrays[2:], *[None] * (3 - len(arrays)))
        values: jax.Array = quantize_steps.dequantize(
            local, plane, self.format, self.stored, "bfloat16", block=self.block
        )
        return values

    def specs(self, spec: PartitionSpec) -> tuple[PartitionSpec, ...]:
        """The shardings of its arrays: scales follow codes, and a scale of the tensor is on every device."""
        return (spec, spec, *[PartitionSpec()] * (len(self.dtypes) - 2))


@dataclass(frozen=True)
class ValueProduct:
    """A product of values of two planes of codes."""

    a: Operand
    b: Operand
    dtype: str

    def __call__(self, parts: Parts | None, *arrays: jax.Array) -> jax.Array:
        """The local product, and the sum over devices that contracted axes are sharded over."""
        count = len(self.a.dtypes)
        x, y = self.a.values(arrays[:count]), self.b.values(arrays[count:])
        contracted = ((self.a.contracted, self.b.contracted), ((), ()))
        made = lax.dot_general(x, y, contracted, preferred_element_type=jnp.dtype(self.dtype))
        return made if parts is None else parts.added(made)


def gathering_codes(
    a: QuantizedArray, b: QuantizedArray, usages: tuple[Usages, Usages], dtype: Any, of_values: OfPlanes
) -> OfPlanes:
    """On an Auto mesh, the op that computes `of_values` from codes that XLA can gather; elsewhere `of_values`."""
    data = a.plane(usages[0][0]).data
    mesh = ops.mesh_around(data)
    if not ops.may_be_cut(data) or mesh.empty or set(mesh.axis_types) != {AxisType.Auto}:
        return of_values
    left, right = (Operand.of(q, *usage, dict(mesh.shape)) for q, usage in zip((a, b), usages, strict=True))
    if left is None or right is None or len(left.contracted) != len(right.contracted):
        return of_values
    what = ValueProduct(left, right, jnp.dtype(dtype).name)

    @jax.custom_batching.custom_vmap
    def of_codes(a: Plane, b: Plane) -> jax.Array:
        def partitioned(a: Plane, b: Plane) -> jax.Array:
            return _partitioned(what, mesh.abstract_mesh)(*left.arrays(a), *right.arrays(b))

        (made,) = asked(partitioned, of_values, (what, mesh.abstract_mesh), a, b)
        return made

    @of_codes.def_vmap
    def _(_: int, axes: Any, a: Plane, b: Plane) -> tuple[jax.Array, bool]:
        return jax.vmap(of_values, jax.tree.map(lambda is_batched: 0 if is_batched else None, axes))(a, b), True

    return of_codes


@functools.lru_cache(maxsize=1024)
def _partitioned(what: ValueProduct, abstract: Any) -> Callable[..., jax.Array]:
    count = len(what.a.dtypes)

    def partition(mesh: Any, operands: Any, result: Any) -> Any:
        mesh = mesh_of_call(mesh, result, abstract)
        a, b, out = (spec_on(mesh, array) for array in (operands[0], operands[count], result))
        shapes = what.a.shape(tuple(operands[0].shape)), what.b.shape(tuple(operands[count].shape))
        sizes = dict(mesh.shape)
        specs = _gathered(what, sizes, shapes, (a, b), out)
        parts = Parts.of((what.a, what.b), sizes, shapes, specs, out)
        takes = (*what.a.specs(parts.a), *what.b.specs(parts.b))
        return (
            mesh,
            functools.partial(what, parts),
            NamedSharding(mesh, parts.out),
            tuple(NamedSharding(mesh, spec) for spec in takes),
        )

    rule, sizes = _rule(what)
    return asking(functools.partial(what, None), partition, rule, sizes, decode=False)


def _gathered(
    what: ValueProduct,
    mesh: Mapping[str, int],
    shapes: tuple[Shape, Shape],
    specs: tuple[PartitionSpec, PartitionSpec],
    out: PartitionSpec,
) -> tuple[PartitionSpec, PartitionSpec]:
    """Operand shardings for the product. Row shardings that the wanted result lacks are dropped if gathering the codes
    moves fewer bytes than gathering the result.
    """
    kept: list[PartitionSpec] = []
    wanted = [*out, *[None] * (len(what.a.rows) + len(what.b.rows) - len(out))]
    rows = [shape[axis] for side, shape in zip((what.a, what.b), shapes, strict=True) for axis in side.rows]
    result_bytes = jnp.dtype(what.dtype).itemsize * _local_size(rows, wanted, mesh)
    for side, shape, spec in zip((what.a, what.b), shapes, specs, strict=True):
        entries = [ops.names_of(entry) for entry in (*spec, *[None] * (len(shape) - len(spec)))]
        of_rows = [ops.names_of(wanted.pop(0)) for _ in side.rows]
        fewer = list(entries)
        for axis, names in zip(side.rows, of_rows, strict=True):
            fewer[axis] = tuple(name for name in entries[axis] if name in names)
        if side.bytes * _local_size(shape, fewer, mesh) < result_bytes:
            entries = fewer
        kept.append(PartitionSpec(*(names or None for names in entries)))
    return kept[0], kept[1]


def _local_size(shape: Sequence[int], spec: Iterable[Any], mesh: Mapping[str, int]) -> int:
    """Elements that a device has of an array."""
    return math.prod(shape) // math.prod(mesh[name] for entry in spec for name in ops.names_of(entry))


def _rule(what: ValueProduct) -> tuple[str, dict[str, int]]:
    """The sharding rule: an axis of blocks is a product of blocks and a length, which codes and results each have."""
    takes: list[str] = []
    gives: list[str] = []
    sizes: dict[str, int] = {}
    for letter, operand in (("a", what.a), ("b", what.b)):
        names = {axis: f"{letter}k{i}" for i, axis in enumerate(operand.contracted)}
        names |= {axis: f"{letter}r{i}" for i, axis in enumerate(operand.rows)}
        factors: list[str] = []
        for axis, name in sorted(names.items()):
            unit = operand.unit(axis)
            codes = unit // (operand.format.element.codes_per_byte if axis == operand.last else 1)
            inner = [("c", codes, factors), *([("v", unit, gives)] if axis in operand.rows else [])]
            for end, size, side in inner:
                side.append(f"({name} {name}{end})" if size > 1 else name)
                sizes |= {f"{name}{end}": size} if size > 1 else {}
        grid = [name for _, name in sorted(names.items())]
        takes += [" ".join(factors), " ".join(grid), *[""] * (len(operand.dtypes) - 2)]
    return f"{', '.join(takes)} -> {' '.join(gives)}", sizes
