"""Ops as data: what each takes and gives, from one axis pattern.

`ffi/ops.def` names every op with its arguments and an axis pattern in the notation of einops. From that one string come
the shapes of the outputs, the errors for shapes that do not fit, the sharding rule of the JAX front end (which axes may
be cut without communication) and what a cut axis must be reduced with.

Ops on many tensors take lists, `x[]`, after their single operands, and change what they write in place: each result has
the name of an operand. So their patterns say how axes belong together, and shapes are the caller's business.

Sources: einops (one parsed pattern, thin backends); Shardy's sharding rules (factors).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qshard.formats import ELEMENTS
from qshard.patterns import Axes, Factor, Pattern, Shape, Solver, Term

__all__ = ["ATTRIBUTE_TYPES", "Binding", "Factor", "OpSpec", "Operand", "multi_table", "table"]

# Types of attributes by name; those that are not here are int.
ATTRIBUTE_TYPES: dict[str, type] = {
    "decay": str,
    "element": str,
    "eps": float,
    "error": str,
    "exp_avg_dtype": str,
    "exp_avg_sq_dtype": str,
    "low": str,
    "most_recent": bool,
    "pieces": bool,
    "pow2": bool,
    "rounded_to": str,
    "rounding": str,
    "scale_dtype": str,
    "scale_max": float,
    "shapes": tuple,
    "split": bool,
    "update": bool,
    "whole": str,
}

_FLOATS = ("float32", "bfloat16", "float16")
_BYTE_ELEMENTS = tuple(e.name for e in ELEMENTS.values() if e.bits == 8)
_BYTES = ("uint8", "int8", *_BYTE_ELEMENTS)


@dataclass(frozen=True)
class Operand:
    """One operand or result of an op: its name, its dtype class as in `ops.def`, its axes; whether it is a list."""

    name: str
    dtype: str
    pattern: Pattern
    many: bool = False

    @property
    def terms(self) -> tuple[Term, ...]:
        return self.pattern.terms

    def codes_per_byte(self, element: str | None) -> int:
        """How many codes share a byte, if this holds codes of `element`; else 1."""
        if self.dtype == "packed":
            return 2
        return ELEMENTS[element].codes_per_byte if self.dtype == "code" and element is not None else 1

    def dtypes(self, element: str | None = None, scale_dtype: str | None = None) -> tuple[str | None, ...]:
        """Dtype strings that this may have. One-byte floats may also come as uint8, packed codes only so."""
        if self.codes_per_byte(element) > 1:
            return ("uint8",)
        name = {"code": element, "scale": scale_dtype}.get(self.dtype, self.dtype)
        if self.dtype == "code" or name in _BYTE_ELEMENTS:
            return ("uint8", name)
        return {"float": _FLOATS, "byte": _BYTES, "word": ("uint32", "int32")}.get(self.dtype, (name,))


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

    >>> amax = table()["amax_block"].bind([(64, 96)], block_rows=32, block_cols=32)
    >>> factors, memory = amax.input_order(0)
    >>> [factor.name for factor in factors], memory, amax.shared_lead
    (['m', 'k', 'block_rows', 'block_cols'], (0, 2, 1, 3), 2)
    """

    inputs: tuple[Axes, ...]
    outputs: tuple[Axes, ...]
    split: bool = False

    @property
    def output_shapes(self) -> tuple[Shape, ...]:
        return tuple(tuple(math.prod(f.size for f in axis) for axis in axes) for axes in self.outputs)

    @property
    def shared(self) -> tuple[Factor, ...]:
        """The factors that lead the logical order of every operand and result."""
        others = [[axis[0] for axis in axes] for axes in (*self.inputs[1:], *self.outputs)]
        return tuple(axis[0] for axis in self.inputs[0] if all(axis[0] in majors for majors in others))

    @property
    def shared_lead(self) -> int:
        """How many leading factors all operands and results share, in their logical orders."""
        return len(self.shared)

    def input_order(self, operand: int) -> tuple[tuple[Factor, ...], tuple[int, ...]]:
        """The factors of an operand in logical order, and its memory order as positions in that."""
        return self._order(self.inputs[operand])

    def in_operand_order(self, output: int) -> tuple[tuple[Factor, ...], tuple[int, ...]]:
        """The factors of a result in logical order, and its memory order as positions in that.

        A transposed result has the logical order of the operand, and so the leading axes that they share.
        """
        return self._order(self.outputs[output])

    def _order(self, axes: Axes) -> tuple[tuple[Factor, ...], tuple[int, ...]]:
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
      attributes: names of the handler's attributes.
      reduction: what a factor that is missing from the outputs must be reduced with over ranks: "max", or "".
    """

    name: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    attributes: tuple[str, ...]
    reduction: str

    @classmethod
    def parse(
        cls, name: str, arguments: str, pattern: str, dtypes: str, attributes: str = "", reduction: str = ""
    ) -> OpSpec:
        """Reads one row of `ops.def`.

        >>> spec = OpSpec.parse("rowsum", "x -> y", "m (k block) -> m k", "float -> float32", "block", "sum")
        >>> spec.bind([(4, 64)], block=32).output_shapes
        ((4, 2),)
        >>> spec.bind([(4, 65)], block=32)
        Traceback (most recent call last):
        ValueError: rowsum: x (4, 65) has an axis of 65, which is not a whole number of block=32; pad or shard it to one
        """
        sides = []
        for names, patterns, kinds in zip(*(text.split("->") for text in (arguments, pattern, dtypes)), strict=True):
            columns = ([part.strip() for part in side.split(",")] for side in (names, patterns, kinds))
            sides.append(
                tuple(
                    Operand(n.removesuffix("[]"), d, Pattern.parse(p), n.endswith("[]"))
                    for n, p, d in zip(*columns, strict=True)
                )
            )
        inputs, outputs = sides
        return cls(name, inputs, outputs, tuple(attributes.split()), reduction)

    @property
    def many(self) -> bool:
        """Whether the op takes lists of tensors."""
        return any(operand.many for operand in self.inputs)

    @property
    def open_axes(self) -> tuple[str, ...]:
        """Numbers of axes that shapes leave open, by name: of a `*name` before another; `lead`, of a result's `...`."""
        known: set[str] = set()
        found: list[str] = []
        for operand in self.inputs:
            stars = [term[1:] for term in operand.terms if isinstance(term, str) and term.startswith("*")]
            new = [star for star in stars if star not in known]
            found.extend(new[:-1])
            known.update(new)
        return (*found, *(["lead"] if any("..." in operand.terms for operand in self.outputs) else []))

    def bind(
        self, shapes: Sequence[Shape], *, element: str | None = None, split: bool = True, **static: int
    ) -> Binding:
        """Applies the pattern.

        Args:
          shapes: of the inputs, in order.
          element: of the codes that the op takes or gives: two codes of 4 bits share a byte.
          split: whether composite axes may be split; False where nothing is cut, and memory order is all that matters.
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
        if len(shapes) != len(self.inputs):
            raise ValueError(f"{self.name}: {len(shapes)} operands are not the {len(self.inputs)} it takes")
        solver = Solver(self.name, static)
        operands = [(o.name, o.pattern, o.codes_per_byte(element)) for o in (*self.inputs, *self.outputs)]
        for (name, pattern, per_byte), shape in zip(operands, shapes, strict=False):
            solver.bind(name, pattern, tuple(shape), per_byte)
        solver.split = (
            split and "split" in self.attributes and all(solver.splits(p, per_byte) for _, p, per_byte in operands)
        )
        axes = tuple(solver.expand(*operand) for operand in operands)
        return Binding(axes[: len(shapes)], axes[len(shapes) :], solver.split)

    def check_dtypes(
        self, dtypes: Sequence[str], *, element: str | None = None, scale_dtype: str | None = None
    ) -> None:
        """Raises TypeError unless the operands have dtypes that the op takes."""
        for operand, dtype in zip(self.inputs, dtypes, strict=True):
            legal = operand.dtypes(element, scale_dtype)
            if dtype not in legal:
                names = " or ".join(str(d) for d in legal)
                raise TypeError(f"{self.name}: {operand.name} ({dtype}) is not {names}; cast or view it first")

    def output_dtypes(
        self,
        dtypes: Sequence[str],
        *,
        element: str | None = None,
        dtype: str | None = None,
        scale_dtype: str | None = None,
    ) -> tuple[str, ...]:
        """Dtype strings of the results; `dtype` chooses where the op can give any float. Codes come as `element`."""
        if "float" in (o.dtype for o in self.outputs) and dtype not in _FLOATS:
            raise TypeError(f"{self.name}: dtype ({dtype}) is not {' or '.join(_FLOATS)}; ask for one of them")
        choice = {"float": dtype, "same": dtypes[0]}
        return tuple(str(choice.get(o.dtype, o.dtypes(element, scale_dtype)[-1])) for o in self.outputs)

    def check_attributes(self, attributes: Mapping[str, object]) -> None:
        """Raises TypeError unless exactly the op's attributes are given."""
        if set(attributes) != set(self.attributes):
            got, needed = (", ".join(sorted(names)) or "none" for names in (attributes, self.attributes))
            raise TypeError(f"{self.name}: attributes ({got}) are not those it takes; give {needed}")


def table() -> dict[str, OpSpec]:
    """Every op on single tensors by name, from `ops.def`."""
    return _rows()[0]


def multi_table() -> dict[str, OpSpec]:
    """Every op on lists of tensors by name, from `ops.def`."""
    return _rows()[1]


@functools.cache
def _rows() -> tuple[dict[str, OpSpec], dict[str, OpSpec]]:
    from qshard import _ffi

    specs = [OpSpec.parse(*row) for row in _ffi.ops()]
    return {s.name: s for s in specs if not s.many}, {s.name: s for s in specs if s.many}
