"""Ops as data: what each takes and gives, from its row of `ffi/ops.def`.

The row is parsed, and calls are held against it, in C++ (`ffi/core/bind.h`): whoever asks gets the same answer and the
same error. From its axis pattern come the shapes of the outputs, the errors for shapes that do not fit, the sharding
rule of the JAX front end (which axes may be cut without communication), and what a cut axis must be reduced over.

Ops on many tensors take lists, `x[]`, after their single operands, and change what they write in place: each result has
the name of an operand. Their shapes are checked when they are called.

Sources: einops (one parsed pattern, thin backends); Shardy's sharding rules (factors).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qshard import _ffi
from qshard.formats import ELEMENTS

__all__ = ["Axes", "Binding", "Factor", "OpSpec", "Operand", "Shape", "multi_table", "table"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Factor:
    """A piece of an axis that is cut or kept as one: its name, unique in a binding, and its size."""

    name: str
    size: int


Axes = tuple[tuple[Factor, ...], ...]
Order = tuple[tuple[Factor, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Operand:
    """One operand or result of an op.

    Attributes:
      name: of the argument.
      dtype: its dtype class, as in `ops.def`.
      terms: a tuple of factor names for each plain or composite axis, `"*name"` for any number of axes, or `"..."`.
      pattern: the same as it is written.
      many: whether it is a list.
      optional: whether attributes may leave the list out.
    """

    name: str
    dtype: str
    terms: tuple[tuple[str, ...] | str, ...]
    pattern: str
    many: bool = False
    optional: bool = False

    def codes_per_byte(self, element: str | None) -> int:
        """How many codes share a byte, if this holds codes of `element`; else 1."""
        if self.dtype == "packed":
            return 2
        return ELEMENTS[element].codes_per_byte if self.dtype == "code" and element is not None else 1


@dataclass(frozen=True)
class Binding:
    """A pattern applied to shapes: every axis of every operand and result as its factors, major first.

    XLA partitions an op over leading axes that all its buffers share. So each buffer has, beside the order of its
    memory, a logical order: the factors that all buffers share, in the order of the first operand; then other major
    factors; then the minor factors of composite axes, which are blocks, and never cut. A layout keeps the memory as it
    is. Without composite axes, the logical order of an operand is that of its memory.

    Attributes:
      inputs, outputs: for each operand and result, its axes.
      split: whether composite axes are split into their factors: the attribute `split` of the handler. If one of them
        is cut, or the handler has no such attribute, each is one factor as a whole, or its major one if blocks have
        length 1.
      cuttable: whether anything may be cut. If not, every logical order is that of the memory, and no factor leads.

    >>> amax = table()["amax_block"].bind([(64, 96)], block_rows=32, block_cols=32)
    >>> factors, memory = amax.input_order(0)
    >>> [factor.name for factor in factors], memory, amax.shared_lead
    (['m', 'k', 'block_rows', 'block_cols'], (0, 2, 1, 3), 2)
    """

    inputs: tuple[Axes, ...]
    outputs: tuple[Axes, ...]
    split: bool = False
    cuttable: bool = True

    @property
    def output_shapes(self) -> tuple[Shape, ...]:
        return tuple(tuple(math.prod(f.size for f in axis) for axis in axes) for axes in self.outputs)

    @functools.cached_property
    def shared(self) -> tuple[Factor, ...]:
        """The factors that lead the logical order of every operand and result."""
        if not self.cuttable:
            return ()
        others = [[axis[0] for axis in axes] for axes in (*self.inputs[1:], *self.outputs)]
        return tuple(axis[0] for axis in self.inputs[0] if all(axis[0] in majors for majors in others))

    @property
    def shared_lead(self) -> int:
        """How many leading factors all operands and results share, in their logical orders."""
        return len(self.shared)

    @functools.cached_property
    def reduced(self) -> tuple[Factor, ...]:
        """The factors of the first operand that a result lacks.

        Of a shard that cuts one of them the result is a part: amaxes are to be max-reduced over the shards, and what is
        made of an amax cannot be had from them. No other result of the op depends on the cut.

        >>> [factor.name for factor in table()["amax_tensor"].bind([(4, 64)], lead=1).reduced]
        ['run0']
        """
        kept = [{factor for axis in axes for factor in axis} for axes in self.outputs]
        first = (factor for axis in self.inputs[0] for factor in axis)
        return tuple(factor for factor in first if not all(factor in factors for factors in kept))

    def input_order(self, operand: int) -> Order:
        """The factors of an operand in logical order, and its memory order as positions in that."""
        return self._orders[0][operand]

    def in_operand_order(self, output: int) -> Order:
        """The factors of a result in logical order, and its memory order as positions in that.

        A transposed result has the logical order of the operand, and so the leading axes that they share.
        """
        return self._orders[1][output]

    @functools.cached_property
    def _orders(self) -> tuple[tuple[Order, ...], tuple[Order, ...]]:
        return tuple(map(self._order, self.inputs)), tuple(map(self._order, self.outputs))

    def _order(self, axes: Axes) -> Order:
        if not self.cuttable:
            return tuple(axis[0] for axis in axes), tuple(range(len(axes)))
        majors = [axis[0] for axis in axes]
        ordered = [f for f in (*self.shared, *(axis[0] for axis in self.inputs[0])) if f in majors]
        minors = [factor for axis in axes for factor in axis[1:]]
        logical = tuple(dict.fromkeys((*ordered, *majors, *minors)))
        return logical, tuple(logical.index(factor) for axis in axes for factor in axis)


@dataclass(frozen=True)
class OpSpec:
    """What an op takes and gives.

    Attributes:
      name: of the op, everywhere: `ops.def`, handler, JAX target, `torch.ops.qshard`.
      inputs, outputs: the operands and results.
      attributes: the handler's attributes by name, and their types in a schema: int, float, bool, str or int[].
      open_axes: numbers of axes that shapes leave open, by name: of a `*name` before another; `lead`, of a result's
        `...`.
    """

    name: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    attributes: Mapping[str, str]
    open_axes: tuple[str, ...]
    row: _ffi.Row

    @classmethod
    def parse(cls, name: str, arguments: str, pattern: str, dtypes: str, attributes: str = "") -> OpSpec:
        """Reads one row of `ops.def`.

        >>> spec = OpSpec.parse("rowsum", "x -> y", "m (k run) -> m k", "float -> float32", "run: int 1..")
        >>> spec.results([(4, 64)], ["float32"], {"run": 32})
        [((4, 2), 'float32')]
        >>> spec.bind([(4, 65)], run=32)
        Traceback (most recent call last):
        ValueError: rowsum: x (4, 65) has an axis of 65, which is not a whole number of run=32; pad or shard it to one
        """
        return cls.of(_ffi.Row(name, arguments, pattern, dtypes, attributes))

    @classmethod
    def of(cls, row: _ffi.Row) -> OpSpec:
        """A row as the extension has parsed it."""
        inputs, outputs = (tuple(Operand(**o) for o in side) for side in (row.inputs, row.outputs))
        types = {name: kind for name, (kind, *_) in row.attributes.items()}
        return cls(row.name, inputs, outputs, types, row.open_axes, row)

    def __hash__(self) -> int:
        return hash((self.name, self.inputs, self.outputs))

    @property
    def many(self) -> bool:
        """Whether the op takes lists of tensors."""
        return self.row.many

    def bind(
        self, shapes: Sequence[Shape], *, element: str | None = None, cuttable: bool = True, **static: int
    ) -> Binding:
        """Applies the pattern.

        Args:
          shapes: of the inputs, in order.
          element: of the codes that the op takes or gives: two codes of 4 bits share a byte.
          cuttable: False where nothing is cut: no composite axis is split, and buffers go in as they are.
          static: the numbers of axes of `open_axes`, and the sizes of factors of a composite axis.

        Raises:
          ValueError: the shapes do not fit the pattern or each other.

        >>> table()["cast_tensor"].bind([(4, 64), (4,)]).output_shapes
        ((4, 64),)
        >>> table()["cast_transpose"].bind([(2, 4, 64), ()], batch=1).output_shapes
        ((2, 4, 64), (2, 64, 4))
        >>> table()["amax_block"].bind([(200, 300)], block_rows=128, block_cols=128).output_shapes
        ((2, 3),)
        >>> cast = table()["cast_block"]
        >>> cast.bind([(4, 64), (4, 4)], element="float4_e2m1fn", block_rows=1, block_cols=16).output_shapes
        ((4, 32),)
        """
        given = static if element is None else {**static, "element": element}
        return _bind(self.row, tuple(map(tuple, shapes)), tuple(given.items()), cuttable)

    def results(
        self,
        shapes: Sequence[Shape],
        dtypes: Sequence[str],
        attributes: Mapping[str, object],
        dtype: str | None = None,
    ) -> list[tuple[Shape, str]]:
        """Shapes and dtypes of the results, of operands by their pattern; codes come as their element.

        Args:
          attributes: all of the op's but `split`, and the numbers of axes of `open_axes`.
          dtype: of the result where the op can give any float.

        Raises:
          ValueError, TypeError: the call does not fit the row.

        >>> table()["cast_tensor"].results([(4, 6), ()], ["float32"] * 2, {"element": "float8_e4m3fn"})
        [((4, 6), 'float8_e4m3fn')]
        """
        return self.row.bind(shapes, dtypes, attributes, dtype)


@functools.lru_cache(maxsize=4096)
def _bind(
    row: _ffi.Row, shapes: tuple[Shape, ...], static: tuple[tuple[str, int | str], ...], cuttable: bool
) -> Binding:
    inputs, outputs, is_split = row.axes(shapes, dict(static), cuttable)
    return Binding(_factors(inputs), _factors(outputs), is_split, cuttable)


def _factors(side: tuple[tuple[tuple[tuple[str, int], ...], ...], ...]) -> tuple[Axes, ...]:
    return tuple(tuple(tuple(Factor(*factor) for factor in axis) for axis in axes) for axes in side)


def table() -> dict[str, OpSpec]:
    """Every op on single tensors by name, from `ops.def`."""
    return _rows()[0]


def multi_table() -> dict[str, OpSpec]:
    """Every op on lists of tensors by name, from `ops.def`."""
    return _rows()[1]


@functools.cache
def _rows() -> tuple[dict[str, OpSpec], dict[str, OpSpec]]:
    specs = [OpSpec.of(row) for row in _ffi.ops()]
    return {s.name: s for s in specs if not s.many}, {s.name: s for s in specs if s.many}
