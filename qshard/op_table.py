"""Ops as data: what each takes and gives, from its row of `ffi/ops.def`.

The row is parsed, and calls are checked against it, in C++ (`ffi/schema/bind.h`): every caller gets the same answer and
the same error. From its axes come the shapes of the outputs, the errors for shapes that do not fit, the sharding rule
of the JAX front end (which axes may be cut without communication), and what a cut axis must be reduced over.

Ops on many tensors take lists, `x[]`, after their single operands, and change what they write in place: each result has
the name of an operand. Their shapes are checked when they are called.

Sources: einops (one parsed pattern, thin backends); Shardy's sharding rules (factors).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from qshard import _ffi

__all__ = ["Axes", "Binding", "Factor", "OpSpec", "Operand", "Shape", "View", "multi_table", "table"]

Shape = tuple[int, ...]
"""The sizes of axes."""


class Factor(NamedTuple):
    """A piece of an axis that is cut or kept as one: its name, unique in a binding, and its size."""

    name: str
    size: int


Axes = tuple[tuple[Factor, ...], ...]
"""The factors of each axis."""


class Operand(NamedTuple):
    """One operand or result of an op.

    Attributes:
      dtype: its dtype class, as in `ops.def`.
      terms: a tuple of factor names for each plain or composite axis, `"*name"` for any number of axes, or `"..."`.
      many: whether it is a list; `optional`: one that attributes may leave out.
    """

    name: str
    dtype: str
    terms: tuple[tuple[str, ...] | str, ...]
    many: bool
    optional: bool


class View(NamedTuple):
    """An operand or result in two orders: that of its memory, and the logical one, in which XLA may cut it.

    Attributes:
      axes: as the pattern has them, each as its factors, major first.
      factors: in logical order: majors in the order of the first operand, then other majors, then minors.
      order: the order of the memory, as positions in `factors`.
    """

    axes: Axes
    factors: tuple[Factor, ...]
    order: tuple[int, ...]


@dataclass(frozen=True)
class Binding:
    """A pattern applied to a call.

    XLA partitions an op over leading axes that all its buffers share. So each buffer has a logical order of its
    factors, in which those lead and the minor factors of composite axes, which are blocks and never cut, come last. A
    layout keeps the memory as it is. A transposed result has the logical order of the operand.

    Attributes:
      results: the shape and dtype of each result by pattern; of codes, the element's own dtype, if it has one.
      inputs, outputs: the view of each operand and result.
      lead: how many leading factors all of them share.
      split: whether composite axes are split into their factors: the attribute `split` of the handler. If one of them
        is cut short, or the op cannot split, each is one factor as a whole, or its major one if blocks have length 1.

    >>> options = {"block_rows": 32, "block_cols": 32}
    >>> amax = table()["amax_block"].bind([(64, 96)], ["float32"], options, cuttable=True)
    >>> amax.results, amax.lead
    ((((2, 3), 'float32'),), 2)
    >>> [factor.name for factor in amax.inputs[0].factors], amax.inputs[0].order
    (['m', 'k', 'block_rows', 'block_cols'], (0, 2, 1, 3))
    """

    results: tuple[tuple[Shape, str], ...]
    inputs: tuple[View, ...]
    outputs: tuple[View, ...]
    lead: int
    split: bool

    @functools.cached_property
    def reduced(self) -> tuple[Factor, ...]:
        """The factors of the first operand that a result lacks.

        Of a shard that cuts one of them the result is a part: amaxes are to be max-reduced over the shards, and what is
        made of an amax cannot be had from them. No other result of the op depends on the cut.

        >>> amax = table()["amax_tensor"].bind([(4, 64)], ["float32"], {"lead": 1}, cuttable=True)
        >>> [factor.name for factor in amax.reduced]
        ['run0']
        """
        first = itertools.chain.from_iterable(self.inputs[0].axes)
        return tuple(factor for factor in first if not all(factor in view.factors for view in self.outputs))


class OpSpec(_ffi.Row):
    """What an op takes and gives: one row of `ops.def`.

    Attributes:
      name: of the op, everywhere: `ops.def`, handler, JAX target, `torch.ops.qshard`.
      inputs, outputs: its operands and results.
      written: the names of the operands that a call changes. An op on single tensors has results of its own.

    >>> spec = OpSpec("rowsum", "x: float m (k run) -> y: float32 m k", "run: int 1..")
    >>> spec.results([(4, 64)], ["float32"], {"run": 32})
    (((4, 2), 'float32'),)
    >>> spec.results([(4, 65)], ["float32"], {"run": 32})
    Traceback (most recent call last):
    ValueError: rowsum: x (4, 65) has an axis of 65, not a multiple of run=32; pad it, or shard it on block boundaries
    """

    def __init__(self, name: str, operands: str, attributes: str = ""):
        super().__init__(name, operands, attributes)
        self.inputs, self.outputs = (tuple(itertools.starmap(Operand, side)) for side in self.sides())
        self.written = {operand.name for operand in self.outputs} if self.many else set()

    def results(
        self, shapes: Sequence[Shape], dtypes: Sequence[str], attributes: Mapping[str, Any], dtype: str | None = None
    ) -> tuple[tuple[Shape, str], ...]:
        """Shapes and dtypes of the results: `Binding.results`. Of an op on lists, whose results are operands, none.

        Args:
          shapes, dtypes: of the operands, in order.
          attributes: the op's.
          dtype: of the result where the op can give any float.

        Raises:
          ValueError, TypeError: the call does not fit the row.

        >>> table()["cast_tensor"].results([(4, 6), ()], ["float32"] * 2, {"element": "float8_e4m3fn"})
        (((4, 6), 'float8_e4m3fn'),)
        """
        return tuple(self.match(shapes, dtypes, attributes, dtype)[0])

    def bind(
        self,
        shapes: Sequence[Shape],
        dtypes: Sequence[str],
        attributes: Mapping[str, Any],
        dtype: str | None = None,
        *,
        cuttable: bool,
    ) -> Binding:
        """Binds a call of an op on single tensors, as `results` does.

        Where nothing is `cuttable`, no composite axis is split, and buffers go in as they are.
        """
        return _bind(self, tuple(map(tuple, shapes)), tuple(dtypes), tuple(attributes.items()), dtype, cuttable)


@functools.lru_cache(maxsize=4096)
def _bind(
    spec: OpSpec,
    shapes: tuple[Shape, ...],
    dtypes: tuple[str, ...],
    attributes: tuple[tuple[str, Any], ...],
    dtype: str | None,
    cuttable: bool,
) -> Binding:
    results, buffers, whole = spec.match(shapes, dtypes, dict(attributes), dtype)
    split = cuttable and whole
    sizes = [*shapes, *(shape for shape, _ in results)]
    every = [_axes(raw, shape, split) for raw, shape in zip(buffers, sizes, strict=True)]
    majors = [{axis[0] for axis in axes} for axes in every]
    places = {axis[0][0]: i for i, axis in enumerate(buffers[0])} if cuttable else {}
    views = tuple(
        # Only results may lie in another order than that of their pattern.
        _view(axes, [places.get(axis[0][0], len(places)) if i >= len(shapes) else 0 for axis in raw])
        for i, (axes, raw) in enumerate(zip(every, buffers, strict=True))
    )
    first = [axis[0] for axis in every[0]] if cuttable else []
    shared = itertools.takewhile(lambda factor: all(factor in others for others in majors), first)
    return Binding(tuple(results), views[: len(shapes)], views[len(shapes) :], len(list(shared)), split)


def _axes(raw: Sequence[Sequence[tuple[str, int, int]]], shape: Shape, split: bool) -> Axes:
    """Axes as factors, in bytes.

    A product that is not split is one factor, or the major one where blocks have length 1, but only if no product comes
    before: factors that buffers share lead, and the order may not change.
    """
    axes, joined = [], False
    for axis, size in zip(raw, shape, strict=True):
        factors = [Factor(f"{name}/{per}" if per > 1 else name, count // per) for name, count, per in axis]
        if len(factors) > 1 and not split:
            by_rows = factors[1].size == 1 and not joined
            joined |= not by_rows
            factors = factors[:1] if by_rows else [Factor(" ".join(factor.name for factor in factors), size)]
        axes.append(tuple(factors))
    return tuple(axes)


def _view(axes: Axes, places: Sequence[int]) -> View:
    """`places`: of each axis, where the first operand has its major factor. `schema/pattern.cc` has the same order."""
    majors = [axis[0] for _, axis in sorted(zip(places, axes, strict=True), key=lambda pair: pair[0])]
    logical = (*majors, *(factor for axis in axes for factor in axis[1:]))
    return View(axes, logical, tuple(logical.index(factor) for axis in axes for factor in axis))


def table() -> dict[str, OpSpec]:
    """Every op on single tensors by name, from `ops.def`."""
    return _rows()[0]


def multi_table() -> dict[str, OpSpec]:
    """Every op on lists of tensors by name, from `ops.def`."""
    return _rows()[1]


@functools.cache
def _rows() -> tuple[dict[str, OpSpec], dict[str, OpSpec]]:
    specs = [OpSpec(*row) for row in _ffi.ops()]
    return {s.name: s for s in specs if not s.many}, {s.name: s for s in specs if s.many}
