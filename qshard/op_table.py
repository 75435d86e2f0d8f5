"""Op specifications: operands, attributes, output shapes and sharding factors of every op, from `ffi/ops.def`.

C++ parses the rows and checks calls against them (`ffi/schema/bind.h`), so every caller gets the same shapes and
errors. The axes of a row give the output shapes, the shape errors, the sharding rule of the JAX front end (the axes
that may be sharded without communication), and the axes to reduce over when they are sharded.

Ops on many tensors take lists, `x[]`, after their single operands and update operands in place: each result has the
name of an operand. Their shapes are checked when they run.

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
"""Axis sizes."""


class Factor(NamedTuple):
    """A part of an axis that is sharded or kept as a unit: its name, unique within a binding, and its size."""

    name: str
    size: int


Axes = tuple[tuple[Factor, ...], ...]
"""The factors of each axis."""


class Operand(NamedTuple):
    """One operand or result of an op.

    Attributes:
      name: name in the row.
      dtype: dtype class, as in `ops.def`.
      terms: for each plain or composite axis a tuple of factor names; `"*name"` for any number of axes; or `"..."`.
      many: whether the operand is a list of tensors.
      optional: whether attributes decide if the operand is present.
    """

    name: str
    dtype: str
    terms: tuple[tuple[str, ...] | str, ...]
    many: bool
    optional: bool

    @property
    def has_leading_axes(self) -> bool:
        """True if the first term stands for any number of axes: `*name` or `...`."""
        return bool(self.terms) and isinstance(self.terms[0], str)


class View(NamedTuple):
    """Axis order of an operand or result: its memory order, and the logical order that XLA shards.

    Attributes:
      axes: axes in the order of the pattern, each as its factors, major first.
      factors: factors in logical order: majors in the order of the first operand, then other majors, then minors.
      order: memory order, as positions in `factors`.
    """

    axes: Axes
    factors: tuple[Factor, ...]
    order: tuple[int, ...]


@dataclass(frozen=True)
class Binding:
    """A row applied to one call.

    XLA partitions an op over leading axes that all its buffers share. Each buffer therefore has a logical order of its
    factors that starts with the shared ones. The minor factors of composite axes are blocks, which are never sharded,
    and come last. An XLA layout maps this order to memory. A transposed result has the logical order of the operand.

    Attributes:
      results: shape and dtype of each result, from the pattern. Codes have the dtype of their element if there is one.
      inputs: views of the operands.
      outputs: views of the results.
      lead: number of leading factors that all buffers share.
      split: whether composite axes are split into factors: the attribute `split` of the handler. If a block is cut
        short, or the op cannot split, a composite axis is a single factor: its major factor if blocks have length 1,
        otherwise the whole axis.

    >>> options = {"block_rows": 32, "block_cols": 32}
    >>> amax = table()["amax_block"].bind([(64, 96)], ["float32"], options, may_shard=True)
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
        """Factors of the first operand that some result lacks.

        If such a factor is sharded, that result is partial: amaxes must be max-reduced over the shards, and scales
        computed from the amax of one shard are invalid. Other results are not affected.

        >>> amax = table()["amax_tensor"].bind([(4, 64)], ["float32"], {"lead": 1}, may_shard=True)
        >>> [factor.name for factor in amax.reduced]
        ['run0']
        """
        first = itertools.chain.from_iterable(self.inputs[0].axes)
        return tuple(factor for factor in first if not all(factor in view.factors for view in self.outputs))


class OpSpec(_ffi.Row):
    """The operands, results and attributes of an op: one row of `ops.def`.

    Attributes:
      name: name of the op in `ops.def`, of its handler, its JAX target and its entry in `torch.ops.qshard`.
      inputs: operands.
      outputs: results.
      written: names of the operands that a call updates in place. Empty for ops on single tensors.

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
        """Compute the shapes and dtypes of the results. Ops on lists have none: they update operands.

        `dtype` is the dtype of the result if the op can return any float.

        Raises:
          ValueError: shapes or attributes do not fit the row.
          TypeError: dtypes do not fit the row.

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
        may_shard: bool,
    ) -> Binding:
        """Bind a call of an op on single tensors. Bindings are cached; other arguments as in `results`.

        If not `may_shard`, the call may not be sharded: no composite axis is split and buffers keep their memory order.

        Raises:
          ValueError: shapes or attributes do not fit the row.
          TypeError: dtypes do not fit the row.
        """
        return _bind(self, tuple(map(tuple, shapes)), tuple(dtypes), tuple(attributes.items()), dtype, may_shard)


@functools.lru_cache(maxsize=4096)
def _bind(
    spec: OpSpec,
    shapes: tuple[Shape, ...],
    dtypes: tuple[str, ...],
    attributes: tuple[tuple[str, Any], ...],
    dtype: str | None,
    may_shard: bool,
) -> Binding:
    results, buffers, whole = spec.match(shapes, dtypes, dict(attributes), dtype)
    split = may_shard and whole
    sizes = [*shapes, *(shape for shape, _ in results)]
    every = [_axes(raw, shape, split) for raw, shape in zip(buffers, sizes, strict=True)]
    majors = [{axis[0] for axis in axes} for axes in every]
    places = {axis[0][0]: i for i, axis in enumerate(buffers[0])} if may_shard else {}
    views = tuple(
        # Operands lie in the order of their pattern; only results may have a different logical order.
        _view(axes, [places.get(axis[0][0], len(places)) if i >= len(shapes) else 0 for axis in raw])
        for i, (axes, raw) in enumerate(zip(every, buffers, strict=True))
    )
    first = [axis[0] for axis in every[0]] if may_shard else []
    shared = itertools.takewhile(lambda factor: all(factor in others for others in majors), first)
    return Binding(tuple(results), views[: len(shapes)], views[len(shapes) :], len(list(shared)), split)


def _axes(raw: Sequence[Sequence[tuple[str, int, int]]], shape: Shape, split: bool) -> Axes:
    """Return the axes of a buffer as factors, in elements of the stored dtype.

    A composite axis that is not split is one factor. If blocks have length 1 it is the major factor instead, unless an
    unsplit composite axis precedes it: shared factors must lead, and the order may not change.
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
    """Build a view; `places[i]` is the position of axis i's major factor in the first operand.

    `schema/pattern.cc` uses the same order.
    """
    majors = [axis[0] for _, axis in sorted(zip(places, axes, strict=True), key=lambda pair: pair[0])]
    logical = (*majors, *(factor for axis in axes for factor in axis[1:]))
    return View(axes, logical, tuple(logical.index(factor) for axis in axes for factor in axis))


def table() -> dict[str, OpSpec]:
    """Return every op on single tensors by name, from `ops.def`."""
    return _rows()[0]


def multi_table() -> dict[str, OpSpec]:
    """Return every op on lists of tensors by name, from `ops.def`."""
    return _rows()[1]


@functools.cache
def _rows() -> tuple[dict[str, OpSpec], dict[str, OpSpec]]:
    specs = [OpSpec(*row) for row in _ffi.ops()]
    return {s.name: s for s in specs if not s.many}, {s.name: s for s in specs if s.many}
