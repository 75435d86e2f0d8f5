"""Tensor and sequence parallelism in `shard_map`: whose rows are gathered as codes, and whose sums are scattered.

A mesh axis cuts the rows of x and the N of w (`gather_rows`), or the K of both, and then the rows of y
(`scatter_rows`). The backward pass of one is the forward pass of the other, so there are three things to do:

    gathered rows    y of one, dx of the other: codes travel, and a device multiplies the rows of all by its part of w
    scattered sums   dx of one, y of the other: a device multiplies the rows of each other by its part of w, sends it
                     the product, and adds up what arrives
    dw               codes of the plane that it contracts are gathered, for one product

Rows are multiplied in chunks, one for each device. So how they travel, all at once or each behind the product of the
one before, changes no bit. Products travel in the dtype of x. A device adds those of the devices before it, the
nearest first, then its own, in fp32, and rounds once.

XLA for GPUs would put all that travels where it likes. Ties (`scheduling.py`) leave it one thing at a time and one GEMM
to hide it behind:

    gathered rows    GEMM of own rows | next codes;  GEMM | next codes;  ...  last GEMM | codes for dw
    scattered sums   GEMM for the next device | codes for dw;  GEMM | product before;  ...  GEMM of own rows, dw | last
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from qshard._core.quantize_steps import Plane
from qshard._core.validation import quote
from qshard.formats import Usage
from qshard.jax._gemm.gemm import apply_scale
from qshard.jax._ops.mesh import Spec, names_of, spec_of, types_tell
from qshard.jax._ops.scheduling import barrier
from qshard.jax._ops.validation import as_axes
from qshard.jax._quantized.array import QuantizedArray
from qshard.jax._sharding.shard_spec import ShardSpec
from qshard.layout import Shape, block_alignment, is_transposed
from qshard.recipes import Recipe, Role

_Multiply = Callable[[QuantizedArray, Shape], tuple[jax.Array, jax.Array | None]]
"""The product of rows and w, of a leading shape, and what it is still to be scaled by."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["operands"], meta_fields=["gather"])
@dataclass(frozen=True, eq=False)
class OfDw:
    """What dw is the product of, codes of dy and x; and how all rows of both are gathered, while dx is made."""

    operands: Any = None
    gather: Callable[[Any], Any] | None = None

    @property
    def gathered(self) -> Any:
        return self.operands if self.gather is None else self.gather(self.operands)


class TensorParallelOptions(NamedTuple):
    """What a caller of `linear` asks for: `gather_rows`, or `scatter_rows`, and `overlap`."""

    axis: str
    gathers: bool
    overlap: bool

    @classmethod
    def of(
        cls, op: str, gather_rows: Any, scatter_rows: Any, overlap: bool, vmap_as_rows: bool
    ) -> TensorParallelOptions | None:
        given = {"gather_rows": gather_rows, "scatter_rows": scatter_rows}
        given = {name: axis for name, axis in given.items() if axis is not None}
        if not given:
            if overlap:
                raise ValueError(f"{op}: overlap (True) has nothing to overlap; pass gather_rows or scatter_rows too")
            return None
        if len(given) > 1:
            raise ValueError(
                f"{op}: gather_rows ({gather_rows!r}) and scatter_rows ({scatter_rows!r}) belong to two layers, the "
                "first of which gathers rows and the second scatters them; pass one of the two to each"
            )
        ((name, axis),) = given.items()
        if not isinstance(axis, str):
            raise TypeError(f"{op}: {name} ({quote(axis)}) is not a mesh axis name; pass one")
        as_axes(op, axis, name)
        if vmap_as_rows:
            raise ValueError(f"{op}: vmap_as_rows (True) and {name} ({axis!r}) both add rows to x; leave one out")
        return cls(axis, name == "gather_rows", overlap)

    @property
    def name(self) -> str:
        return "gather_rows" if self.gathers else "scatter_rows"

    def weight_spec(self, op: str, layout: str, gather_axes: tuple[str, ...], spec: Spec) -> Spec:
        """How w is cut: along N or K by this axis, and its rows by what FSDP gathers, unless `spec` says else.

        Raises:
          ValueError: that does not name this axis there.
        """
        if self.axis in gather_axes:
            raise ValueError(
                f"{op}: {self.name} ({self.axis!r}) is also in gather_axis, but an axis cannot gather both rows and "
                "weights; leave it out of one"
            )
        letter: Literal["N", "K"] = "N" if self.gathers else "K"
        at = layout.index(letter)
        if spec is None:
            entries: list[tuple[str, ...]] = [(), ()]
            entries[at] = (self.axis,)
            entries[0] += gather_axes
            return PartitionSpec(*(names or None for names in entries))
        told = [*map(names_of, spec_of(spec, None)), (), ()]
        if self.axis not in told[at]:
            raise ValueError(
                f"{op}: weight_spec ({spec_of(spec, None)}) does not shard {letter} over {self.name} ({self.axis!r}); "
                f"add it to axis {at}, or leave weight_spec out"
            )
        return spec

    def parallel(
        self, op: str, x: jax.Array, w: Any, given: Any, recipe: Recipe, axes: tuple[str, ...], rows: Spec
    ) -> TensorParallelAxis:
        """What that is of these operands, the shards.

        Args:
          given: other arrays that devices must have in common, to be scaled by them.

        Raises:
          ValueError: x has no rows, or parts of blocks, or rows that do not follow one another; or an operand is whole.
        """
        axis, name, lead = self.axis, self.name, x.shape[:-1]
        if not lead:
            raise ValueError(f"{op}: x {x.shape} has no row axis for {name} ({axis!r}); pass x with two or more axes")
        size = int(jax.sharding.get_abstract_mesh().shape[axis])
        entries = [names_of(entry) for entry in (*spec_of(rows, axes), *[None] * len(lead))[: len(lead)]]
        told = [i for i, names in enumerate(entries) if axis in names]
        at = told[0] if told and rows is not None else len(lead) - 1
        if rows is not None and told and entries[at][-1] != axis:
            raise ValueError(
                f"{op}: axis_name ({rows}) has {entries[at][-1]!r} after {name} ({axis!r}), so rows of its devices are "
                f"not adjacent; put {axis!r} last"
            )
        tells = types_tell()
        if size > 1 and tells:
            whole = ", so every device has all of it; pass each device its shard"
            for what, operand in (("x", x), ("w", w)):
                leaves = jax.tree.leaves(operand)
                if leaves and not any(_varies(leaf, axis) for leaf in leaves):
                    raise ValueError(f"{op}: {what} does not vary over {name} ({axis!r}){whole}")
            if any(_varies(leaf, axis) for leaf in jax.tree.leaves(given.state)):
                raise ValueError(
                    f"{op}: state varies over {name} ({axis!r}), whose devices share one layer; pass all of them the "
                    "same state"
                )
        made = TensorParallelAxis(
            axis=axis,
            size=size,
            at=at,
            others=tuple(tuple(other for other in names if other != axis) for names in entries),
            gathers=self.gathers,
            overlap=self.overlap,
            shared=tells or (isinstance(w, jax.Array) and given.scales is None),
        )
        self._check_rows(op, x, size, at, recipe)
        made.check_columns(op, f"x {x.shape}", x.shape[-1], Role.ACTIVATION, recipe)
        return made

    def _check_rows(self, op: str, x: jax.Array, size: int, at: int, recipe: Recipe) -> None:
        """Raises ValueError unless rows are whole blocks, in every plane: so blocks are those of one device."""
        parts = 1 if self.gathers else size
        if x.shape[at] % parts:
            raise ValueError(
                f"{op}: x {x.shape} has an axis of {x.shape[at]} rows, which {self.name} ({self.axis!r}) cannot split "
                f"into {size} equal shards; pad it to a multiple of {size}"
            )
        rows = math.prod(x.shape[at:-1]) // parts
        for fmt in (recipe.activation, recipe.gradient):
            unit = block_alignment(fmt)
            if size > 1 and rows % unit:
                raise ValueError(
                    f"{op}: x {x.shape} has {rows} adjacent rows per device over {self.name} ({self.axis!r}), not a "
                    f"whole number of {unit}-row blocks of {fmt}; pad the sequence to a multiple of {unit * size}"
                )


def _varies(x: Any, axis: str) -> bool:
    return axis in jax.typeof(x).manual_axis_type.varying


@dataclass(frozen=True, kw_only=True)
class TensorParallelAxis:
    """What a manual mesh axis does in a call of `linear`.

    Attributes:
      axis, size: the mesh axis, and its devices.
      at: which axis of x and of y it cuts, of the one of them that has a part of the rows.
      others: the mesh axes that cut leading axes besides.
      gathers: x has a part of the rows, and w is cut along N; else y has, and x and w are cut along K.
      overlap: chunks travel while others are multiplied.
      shared: devices surely have the scales of x and w in common, so that sums may be scaled once.
    """

    axis: str
    size: int
    at: int
    others: tuple[tuple[str, ...], ...]
    gathers: bool
    overlap: bool
    shared: bool

    def has_part_of_rows(self, role: Role) -> bool:
        """Whether a device has some of the rows of x or dy, and all columns; else it has some columns of all rows."""
        return self.gathers is (role is Role.ACTIVATION)

    def cut_of(self, x: jax.Array, role: Role, axes: tuple[str, ...]) -> ShardSpec:
        """How x or dy is cut."""
        entries = [*self.others, ()]
        entries[self.at if self.has_part_of_rows(role) else -1] += (self.axis,)
        return ShardSpec.of(x, axes, PartitionSpec(*(names or None for names in entries)), own_blocks=True)

    def check_columns(self, op: str, name: str, size: int, role: Role, recipe: Recipe) -> None:
        """Raises ValueError unless the columns of x or dy that a device has are whole blocks: those of one device."""
        fmt = recipe.format(role)
        unit = fmt.block_shape()[1]
        if self.size > 1 and not self.has_part_of_rows(role) and size % unit:
            raise ValueError(
                f"{op}: {name} has {size} columns per device over {self.axis!r}, not a whole number of {unit}-column "
                f"blocks of {fmt}; shard w on block boundaries"
            )

    def row_products(
        self, q: QuantizedArray, lead: Shape, role: Role, multiply: _Multiply, of_dw: OfDw
    ) -> tuple[jax.Array, jax.Array | None, Any]:
        """`multiply` of the rows of x or dy, `q`, that make what this device has of y or dx; and all rows for dw."""
        if self.size == 1:
            return *multiply(q, lead), of_dw.operands
        rows = _PlaneRows.of(q, Usage.ROWWISE, math.prod(lead[: self.at]))
        sizes = list(lead)
        if self.has_part_of_rows(role):
            sizes[self.at] *= self.size
            made, scale, operands = self._of_gathered(rows, multiply, of_dw)
        else:
            sizes[self.at] //= self.size
            made, scale, operands = self._scattered(rows, multiply, of_dw)
        return made.reshape(*sizes, made.shape[-1]), scale, operands

    def all_rows(self, q: QuantizedArray, usage: Usage, lead: Shape, role: Role) -> QuantizedArray:
        """All rows of x or dy as a matrix, in its plane for one usage, which is gathered where devices have parts."""
        rows = _PlaneRows.of(q, usage, math.prod(lead[: self.at]))
        if self.has_part_of_rows(role):
            # One copy puts them side by side; gathered along their axis, XLA makes two, and transposes both.
            every = rows.changed(lambda x, _: lax.all_gather(x, self.axis))
            rows = every.changed(lambda x, axis: lax.concatenate([*x], axis))
        return rows.matrix

    def _of_gathered(self, rows: _PlaneRows, multiply: _Multiply, of_dw: OfDw) -> tuple[jax.Array, Any, Any]:
        made: list[tuple[jax.Array, Any]] = []
        if not self.overlap:
            every = rows.changed(lambda x, _: lax.all_gather(x, self.axis))
            for i in range(self.size):
                chunk = every._replace(parts=tuple(part if part is None else part[i] for part in every.parts)).matrix
                made.append(multiply(chunk, chunk.shape[:-1]))
            products = [_apart(each, rows.outer) for each, _ in made]
            return lax.concatenate(products, 1), made[0][1], of_dw.gathered
        from_next = [((i + 1) % self.size, i) for i in range(self.size)]
        arriving = rows
        for step in range(self.size):
            if step:  # Not multiplied before the one that it travelled behind.
                (parts, of_dw), made = barrier((arriving.parts, of_dw), made)
                arriving = arriving._replace(parts=parts)
            chunk = arriving.matrix
            if step + 1 < self.size:
                arriving = arriving.changed(lambda x, _: lax.ppermute(x, self.axis, from_next))
            made.append(multiply(chunk, chunk.shape[:-1]))
        # Operands of dw travel behind the last product.
        products, operands = barrier([_apart(each, rows.outer) for each, _ in made], of_dw.gathered)
        # Chunks begin with that of this device.
        count = products[0].shape[1]
        start = (self.size - lax.axis_index(self.axis)) % self.size * count
        turned = lax.concatenate([*products, *products[:-1]], 1)
        return lax.dynamic_slice_in_dim(turned, start, self.size * count, axis=1), made[0][1], operands

    def _scattered(self, rows: _PlaneRows, multiply: _Multiply, of_dw: OfDw) -> tuple[jax.Array, Any, Any]:
        rank, operands = lax.axis_index(self.axis), of_dw.gathered
        scale: Any = None
        # A part of a sum may be beyond float16 where the sum is not.
        dtype = jnp.dtype(jnp.float32) if rows.q.dtype == jnp.float16 else rows.q.dtype

        def product(rows: _PlaneRows, i: Any) -> jax.Array:
            """Of the rows that one device keeps."""
            nonlocal scale
            chunk = dataclasses.replace(self._chunk(rows, i).matrix, dtype=dtype)
            made, scale = multiply(chunk, chunk.shape[:-1])
            if not self.shared or (scale is not None and _varies(scale, self.axis)):
                made, scale = apply_scale(made, scale, made.dtype), None
            return _apart(made, rows.outer)

        if self.overlap:
            arrived: list[jax.Array] = []
            made = product(rows, (rank + 1) % self.size)
            for step in range(1, self.size):
                # Each travels behind the next, which is multiplied once the one before has arrived; operands of dw
                # behind the first.
                (parts, made), (arrived, operands) = barrier((rows.parts, made), (arrived, operands))
                rows = rows._replace(parts=parts)
                there = [(i, (i + step) % self.size) for i in range(self.size)]
                arrived.append(lax.ppermute(made, self.axis, there))
                made = product(rows, (rank + step + 1) % self.size)
            arrived.append(made)
        else:
            made = jnp.stack([product(rows, i) for i in range(self.size)])
            every = lax.all_to_all(made, self.axis, 0, 0)
            before = [(rank - step) % self.size for step in range(1, self.size + 1)]
            arrived = [lax.dynamic_index_in_dim(every, i, keepdims=False) for i in before]
        total = arrived[0].astype(jnp.float32)
        for each in arrived[1:]:
            total = total + each.astype(jnp.float32)
        return total, scale, operands

    def _chunk(self, rows: _PlaneRows, i: Any) -> _PlaneRows:
        """The rows that one device keeps of the sum."""

        def part(x: jax.Array, axis: int) -> jax.Array:
            size = x.shape[axis] // self.size
            return lax.dynamic_slice_in_dim(x, i * size, size, axis)

        return rows.changed(part)


class _PlaneRows(NamedTuple):
    """A plane of a tensor `[*lead, K]`, all of whose parts have an axis of the rows from `at` on.

    Attributes:
      q, usage: of what it is made.
      outer: how many such axes there are, one after the other.
      turned: parts are `[K, outer, rows]`; else `[outer, rows, K]`.
      parts: as integers; None for what is not there, or is one scale of the tensor, which all devices have.
    """

    q: QuantizedArray
    usage: Usage
    outer: int
    turned: bool
    parts: tuple[jax.Array | None, ...]

    @classmethod
    def of(cls, q: QuantizedArray, usage: Usage, outer: int) -> _PlaneRows:
        turned = is_transposed(q.format, usage)
        parts: list[jax.Array | None] = []
        for name, part in q.plane(usage)._asdict().items():
            if part is None or not part.ndim:
                parts.append(None)
                continue
            bits = lax.bitcast_convert_type(part, jnp.dtype(f"uint{8 * part.dtype.itemsize}"))
            columns = 1 if name == "global_scale_inv" else part.shape[0 if turned else -1]
            rows = part.size // max(1, outer * columns)
            parts.append(bits.reshape((columns, outer, rows) if turned else (outer, rows, columns)))
        return cls(q, usage, outer, turned, tuple(parts))

    def changed(self, change: Callable[[jax.Array, int], jax.Array]) -> _PlaneRows:
        """With each part as `change(part, axis of rows)` has it."""
        axis = 2 if self.turned else 1
        return self._replace(parts=tuple(None if part is None else change(part, axis) for part in self.parts))

    @property
    def matrix(self) -> QuantizedArray:
        """The rows as a tensor with two axes."""
        plane = []
        for name, part, own in zip(Plane._fields, self.parts, self.q.plane(self.usage), strict=True):
            if part is None:
                plane.append(own)
                continue
            a, b, c = part.shape
            flat = part.reshape((a, b * c) if self.turned else (a * b, c))
            flat = flat[:, 0] if name == "global_scale_inv" else flat
            plane.append(lax.bitcast_convert_type(flat, own.dtype))
        made = QuantizedArray(format=self.q.format, dtype=self.q.dtype, axes=(None, None))
        return made.with_planes({self.usage: Plane(*plane)})


def _apart(made: jax.Array, outer: int) -> jax.Array:
    """A product of rows, with an axis for those in front of `at`."""
    rows, columns = made.shape
    return made.reshape(outer, rows // max(1, outer), columns)
