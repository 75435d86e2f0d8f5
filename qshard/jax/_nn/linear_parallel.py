"""Tensor and sequence parallelism of `linear` in `shard_map`: gathered rows, scattered sums, and overlap.

A mesh axis shards the rows of x and the N of w (`gather_rows`), or the K of both and the rows of y (`scatter_rows`).
The backward pass of one is the forward pass of the other, so there are three cases:

    gathered rows    y with gather_rows, dx with scatter_rows: gather codes, multiply all rows by the local shard of w
    scattered sums   dx with gather_rows, y with scatter_rows: multiply each device's rows by the local shard of w,
                     send that device the product, and add the products that arrive
    dw               gather the codes of the plane that dw contracts, for one product

Rows are multiplied in chunks, one per device, so overlap does not change a bit. Products are sent in the dtype of x. A
device adds the products of the devices before it, the nearest first, then its own, in fp32, and rounds once.

XLA for GPUs would schedule collectives freely. Optimization barriers (`scheduling.py`) leave it one collective at a
time, and one GEMM to hide it behind:

    gathered rows    GEMM of own rows | next codes;  GEMM | next codes;  ...  last GEMM | codes for dw
    scattered sums   GEMM for the next device | codes for dw;  GEMM | product before;  ...  GEMM of own rows, dw | last
"""

from __future__ import annotations

import dataclasses
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
"""Multiplies rows of a leading shape by w. Returns the product and a scale that is still to be applied, or None."""
_Gather = Callable[[Any], Any]
"""Gathers all rows of the operands of dw, which are codes of dy and x."""


class TensorParallelOptions(NamedTuple):
    """The arguments `gather_rows` (`gathers`) or `scatter_rows`, and `overlap`, of a call of `linear`."""

    axis: str
    gathers: bool
    overlap: bool

    @classmethod
    def of(
        cls, op: str, gather_rows: Any, scatter_rows: Any, overlap: bool, vmap_as_rows: bool
    ) -> TensorParallelOptions | None:
        """Check the arguments of a call. None without `gather_rows` and `scatter_rows`."""
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
        """The name of the argument, for errors."""
        return "gather_rows" if self.gathers else "scatter_rows"

    def weight_spec(self, op: str, layout: str, gather_axes: tuple[str, ...], spec: Spec) -> Spec:
        """The sharding of w: `spec`, or by default N or K along this axis, and rows along `gather_axes`."""
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
        """Check the local operands, and describe how the mesh axis shards them.

        `axes` are the mesh axes that shard leading axes of x, and `rows`, if passed, says which of them shards which.
        Raises ValueError for rows that break blocks or are not contiguous across devices, and for a replicated operand.
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
        """Raise ValueError unless a device's rows are whole blocks of every plane, so that no block spans devices."""
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
    """The role of a manual mesh axis in a call of `linear`.

    Attributes:
      size: its number of devices.
      at: the leading axis of x and y that it shards, in the one of them with sharded rows.
      others: for each leading axis, the other mesh axes that shard it.
      gathers: True: rows of x and N of w are sharded. False: rows of y, and K of x and w.
      overlap: whether chunks are sent while others are multiplied.
      shared: whether devices surely share the scales of x and w, so that sums can be scaled once.
    """

    axis: str
    size: int
    at: int
    others: tuple[tuple[str, ...], ...]
    gathers: bool
    overlap: bool
    shared: bool

    def shards_rows(self, role: Role) -> bool:
        """True if x or dy is sharded by rows on this axis; otherwise it is sharded by columns."""
        return self.gathers is (role is Role.ACTIVATION)

    def shard_spec(self, x: jax.Array, role: Role, axes: tuple[str, ...]) -> ShardSpec:
        entries = [*self.others, ()]
        entries[self.at if self.shards_rows(role) else -1] += (self.axis,)
        return ShardSpec.of(x, axes, PartitionSpec(*(names or None for names in entries)), own_blocks=True)

    def check_columns(self, op: str, name: str, size: int, role: Role, recipe: Recipe) -> None:
        """Raise ValueError unless a device's columns of x or dy are whole blocks, so that no block spans devices."""
        fmt = recipe.format(role)
        unit = fmt.block_shape()[1]
        if self.size > 1 and not self.shards_rows(role) and size % unit:
            raise ValueError(
                f"{op}: {name} has {size} columns per device over {self.axis!r}, not a whole number of {unit}-column "
                f"blocks of {fmt}; shard w on block boundaries"
            )

    def row_products(
        self, q: QuantizedArray, lead: Shape, role: Role, multiply: _Multiply, operands: Any, gather: _Gather
    ) -> tuple[jax.Array, jax.Array | None, Any]:
        """Compute the rows of y or dx that this device keeps, from the codes `q` of x or dy, `[*lead, K]`.

        `multiply` multiplies rows by w. Returns the product, a scale that is still to be applied (or None), and the
        `operands` of dw with all rows. Products hide their gather.
        """
        if self.size == 1:
            return *multiply(q, lead), operands
        rows = _PlaneRows.of(q, Usage.ROWWISE, math.prod(lead[: self.at]))
        sizes = list(lead)
        if self.shards_rows(role):
            sizes[self.at] *= self.size
            made, scale, operands = self._gathered_rows(rows, multiply, operands, gather)
        else:
            sizes[self.at] //= self.size
            made, scale, operands = self._scattered_sums(rows, multiply, gather(operands))
        return made.reshape(*sizes, made.shape[-1]), scale, operands

    def all_rows(self, q: QuantizedArray, usage: Usage, lead: Shape, role: Role) -> QuantizedArray:
        """The plane of x or dy for one usage as a matrix of all rows, gathered if rows are sharded."""
        rows = _PlaneRows.of(q, usage, math.prod(lead[: self.at]))
        if self.shards_rows(role):
            # Gather to a new first axis, then concatenate: one copy. Gathering along the axis itself takes XLA two
            # transposing copies.
            every = rows.map_parts(lambda x, _: lax.all_gather(x, self.axis))
            rows = every.map_parts(lambda x, axis: lax.concatenate([*x], axis))
        return rows.matrix

    def _gathered_rows(
        self, rows: _PlaneRows, multiply: _Multiply, operands: Any, gather: _Gather
    ) -> tuple[jax.Array, Any, Any]:
        """Gather all rows and multiply them: the rows of each device as one chunk."""
        made: list[tuple[jax.Array, Any]] = []
        if not self.overlap:
            every = rows.map_parts(lambda x, _: lax.all_gather(x, self.axis))
            for i in range(self.size):
                chunk = every._replace(parts=tuple(part if part is None else part[i] for part in every.parts)).matrix
                made.append(multiply(chunk, chunk.shape[:-1]))
            products = [_split_outer(each, rows.outer) for each, _ in made]
            return lax.concatenate(products, 1), made[0][1], gather(operands)
        from_next = [((i + 1) % self.size, i) for i in range(self.size)]
        arriving = rows
        for step in range(self.size):
            if step:  # Multiply a chunk only after the GEMM that hid its transfer.
                (parts, operands), made = barrier((arriving.parts, operands), made)
                arriving = arriving._replace(parts=parts)
            chunk = arriving.matrix
            if step + 1 < self.size:
                arriving = arriving.map_parts(lambda x, _: lax.ppermute(x, self.axis, from_next))
            made.append(multiply(chunk, chunk.shape[:-1]))
        # The gather of the operands of dw is hidden behind the last GEMM.
        products, operands = barrier([_split_outer(each, rows.outer) for each, _ in made], gather(operands))
        # The first chunk is from this device; rotate chunks to the order of devices.
        count = products[0].shape[1]
        start = (self.size - lax.axis_index(self.axis)) % self.size * count
        rotated = lax.concatenate([*products, *products[:-1]], 1)
        return lax.dynamic_slice_in_dim(rotated, start, self.size * count, axis=1), made[0][1], operands

    def _scattered_sums(self, rows: _PlaneRows, multiply: _Multiply, operands: Any) -> tuple[jax.Array, Any, Any]:
        """Multiply the rows of every device, send each device its product, and add the products that arrive."""
        rank = lax.axis_index(self.axis)
        scale: Any = None
        # A partial sum may overflow float16 even if the sum does not.
        dtype = jnp.dtype(jnp.float32) if rows.q.dtype == jnp.float16 else rows.q.dtype

        def product(rows: _PlaneRows, i: Any) -> jax.Array:
            """Multiply the rows that device `i` keeps."""
            nonlocal scale
            chunk = dataclasses.replace(self._chunk(rows, i).matrix, dtype=dtype)
            made, scale = multiply(chunk, chunk.shape[:-1])
            if not self.shared or (scale is not None and _varies(scale, self.axis)):
                made, scale = apply_scale(made, scale, made.dtype), None
            return _split_outer(made, rows.outer)

        if self.overlap:
            arrived: list[jax.Array] = []
            made = product(rows, (rank + 1) % self.size)
            for step in range(1, self.size):
                # Each product is sent during the next GEMM, which starts once the product before has arrived. The
                # first GEMM hides the gather of the operands of dw.
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
        """The rows that device `i` keeps."""

        def part(x: jax.Array, axis: int) -> jax.Array:
            size = x.shape[axis] // self.size
            return lax.dynamic_slice_in_dim(x, i * size, size, axis)

        return rows.map_parts(part)


class _PlaneRows(NamedTuple):
    """The parts of one plane of `[*lead, K]`, reshaped so that one axis has the rows that a mesh axis shards.

    Attributes:
      outer: the number of matrices: the product of the leading axes before the sharded one.
      transposed: whether parts are `[K, outer, rows]`, as in a transposed plane; otherwise they are `[outer, rows, K]`.
      parts: codes and scales as unsigned integers. None for a part that is missing, or a per-tensor scale, which
        devices share.
    """

    q: QuantizedArray
    usage: Usage
    outer: int
    transposed: bool
    parts: tuple[jax.Array | None, ...]

    @classmethod
    def of(cls, q: QuantizedArray, usage: Usage, outer: int) -> _PlaneRows:
        transposed = is_transposed(q.format, usage)
        parts: list[jax.Array | None] = []
        for name, part in q.plane(usage)._asdict().items():
            if part is None or not part.ndim:
                parts.append(None)
                continue
            bits = lax.bitcast_convert_type(part, jnp.dtype(f"uint{8 * part.dtype.itemsize}"))
            columns = 1 if name == "global_scale_inv" else part.shape[0 if transposed else -1]
            rows = part.size // max(1, outer * columns)
            parts.append(bits.reshape((columns, outer, rows) if transposed else (outer, rows, columns)))
        return cls(q, usage, outer, transposed, tuple(parts))

    def map_parts(self, change: Callable[[jax.Array, int], jax.Array]) -> _PlaneRows:
        """Apply `change(part, axis of rows)` to each part."""
        axis = 2 if self.transposed else 1
        return self._replace(parts=tuple(None if part is None else change(part, axis) for part in self.parts))

    @property
    def matrix(self) -> QuantizedArray:
        plane = []
        for name, part, own in zip(Plane._fields, self.parts, self.q.plane(self.usage), strict=True):
            if part is None:
                plane.append(own)
                continue
            a, b, c = part.shape
            flat = part.reshape((a, b * c) if self.transposed else (a * b, c))
            flat = flat[:, 0] if name == "global_scale_inv" else flat
            plane.append(lax.bitcast_convert_type(flat, own.dtype))
        made = QuantizedArray(format=self.q.format, dtype=self.q.dtype, axes=(None, None))
        return made.with_planes({self.usage: Plane(*plane)})


def _split_outer(made: jax.Array, outer: int) -> jax.Array:
    rows, columns = made.shape
    return made.reshape(outer, rows // max(1, outer), columns)
