"""GEMMs of dequantized values on Auto meshes, for which XLA gathers codes: a byte an element or less.

XLA chooses shardings after tracing. By default it gathers an operand where the GEMM reads it, after dequantizing, and
in both passes, since the two planes of 1-D blocks hold different numbers. Here, dequantizing and the GEMM are one op
with a custom partitioning rule (`custom_partitioning.py`), so XLA can only gather the inputs of the op, the codes.

The rule does not tie the contracted axes of both operands: each operand arrives with its own sharding. If only one is
sharded there, its codes are gathered, or the other is sliced and the products are summed, whichever moves fewer bytes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from qshard._core.quantize_steps import Plane
from qshard.formats import Usage
from qshard.jax._gemm.block_gemm import Usages
from qshard.jax._gemm.product_sharding import (
    PlaneAxes,
    PlaneProduct,
    ProductSharding,
    multiply_local_values,
    without_vmap,
)
from qshard.jax._ops.custom_partitioning import call_partitionable, mesh_of_call, partitionable, spec_on
from qshard.jax._ops.mesh import is_auto, may_be_sharded, mesh_of, names_of
from qshard.jax._quantized.array import QuantizedArray
from qshard.layout import Shape


def _axes_of(q: QuantizedArray, stored: Usage, contracted: Usage, mesh: Mapping[str, int]) -> PlaneAxes | None:
    """The axes of a plane of blocks, or None if an Auto mesh cannot gather it.

    It cannot if the plane has no axes of whole blocks, or a mesh axis does not divide their number: parts of mesh axes
    would then shard them.
    """
    if q.format.row_scaled or (axes := PlaneAxes.of(q, stored, contracted)) is None:
        return None
    grid = q.plane(stored).scale_inv.shape
    whole = all(size % shards == 0 for size in grid if size > 1 for shards in mesh.values())
    # Shardy rejects a compound factor with a part of size 1.
    whole &= all(size > 1 or axes.unit(axis) == 1 for axis, size in enumerate(grid))
    return axes if whole else None


@dataclass(frozen=True)
class ValueProduct:
    """The product of the values of two planes of codes."""

    a: PlaneAxes
    b: PlaneAxes
    dtype: str

    def __call__(self, sharding: ProductSharding | None, *arrays: jax.Array) -> jax.Array:
        """Multiply local values, and sum over the devices that shard contracted axes."""
        count = len(self.a.dtypes)
        planes = self.a.plane(arrays[:count]), self.b.plane(arrays[count:])
        made = multiply_local_values((self.a, self.b), *planes, self.dtype)
        return made if sharding is None else sharding.sum_over_devices(made)


def gather_codes(
    a: QuantizedArray, b: QuantizedArray, usages: tuple[Usages, Usages], dtype: Any, multiply_values: PlaneProduct
) -> PlaneProduct:
    """Return a product of two planes for which XLA can gather codes on an Auto mesh; elsewhere `multiply_values`.

    Arguments as in `block_gemm.product`.
    """
    data = a.plane(usages[0][0]).data
    mesh = mesh_of(data)
    if not may_be_sharded(data) or not is_auto(mesh):
        return multiply_values
    left, right = (_axes_of(q, *usage, dict(mesh.shape)) for q, usage in zip((a, b), usages, strict=True))
    if left is None or right is None or len(left.contracted) != len(right.contracted):
        return multiply_values
    what = ValueProduct(left, right, jnp.dtype(dtype).name)

    def multiply_codes(a: Plane, b: Plane) -> jax.Array:
        def partitioned(a: Plane, b: Plane) -> jax.Array:
            return _partitionable(what, mesh.abstract_mesh)(*left.arrays(a), *right.arrays(b))

        (made,) = call_partitionable(partitioned, multiply_values, (what, mesh.abstract_mesh), a, b)
        return made

    return without_vmap(multiply_codes, multiply_values)


@functools.lru_cache(maxsize=1024)
def _partitionable(what: ValueProduct, abstract: Any) -> Callable[..., jax.Array]:
    """The product with its custom partitioning rule."""
    count = len(what.a.dtypes)

    def partition(mesh: Any, operands: Any, result: Any) -> Any:
        mesh = mesh_of_call(mesh, result, abstract)
        a, b, out = (spec_on(mesh, array) for array in (operands[0], operands[count], result))
        shapes = what.a.shape(tuple(operands[0].shape)), what.b.shape(tuple(operands[count].shape))
        sizes = dict(mesh.shape)
        specs = _gather_specs(what, sizes, shapes, (a, b), out)
        own = ProductSharding.of((what.a, what.b), sizes, shapes, specs, out)
        takes = (*what.a.specs(own.a), *what.b.specs(own.b))
        return (
            mesh,
            functools.partial(what, own),
            NamedSharding(mesh, own.out),
            tuple(NamedSharding(mesh, spec) for spec in takes),
        )

    rule, sizes = _rule(what)
    return partitionable(functools.partial(what, None), partition, rule, sizes, decode=False)


def _gather_specs(
    what: ValueProduct,
    mesh: Mapping[str, int],
    shapes: tuple[Shape, Shape],
    specs: tuple[PartitionSpec, PartitionSpec],
    out: PartitionSpec,
) -> tuple[PartitionSpec, PartitionSpec]:
    """Choose the shardings of operands. Drop row shardings that the result lacks, if gathering codes moves fewer bytes.

    The alternative is to gather the result.
    """
    kept: list[PartitionSpec] = []
    wanted = [*out, *[None] * (len(what.a.rows) + len(what.b.rows) - len(out))]
    rows = [shape[axis] for side, shape in zip((what.a, what.b), shapes, strict=True) for axis in side.rows]
    result_bytes = jnp.dtype(what.dtype).itemsize * _local_size(rows, wanted, mesh)
    for side, shape, spec in zip((what.a, what.b), shapes, specs, strict=True):
        entries = [names_of(entry) for entry in (*spec, *[None] * (len(shape) - len(spec)))]
        of_rows = [names_of(wanted.pop(0)) for _ in side.rows]
        fewer = list(entries)
        for axis, names in zip(side.rows, of_rows, strict=True):
            fewer[axis] = tuple(name for name in entries[axis] if name in names)
        if _local_size(shape, fewer, mesh) / side.format.element.codes_per_byte < result_bytes:
            entries = fewer
        kept.append(PartitionSpec(*(names or None for names in entries)))
    return kept[0], kept[1]


def _local_size(shape: Sequence[int], spec: Iterable[Any], mesh: Mapping[str, int]) -> int:
    """Elements of the local shard of an array."""
    return math.prod(shape) // math.prod(mesh[name] for entry in spec for name in names_of(entry))


def _rule(what: ValueProduct) -> tuple[str, dict[str, int]]:
    """The sharding rule for Shardy. An axis of codes, or of values, is blocks times the length of a block."""
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
