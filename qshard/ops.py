"""Ops as data: what each takes and gives, from one axis pattern.

`ffi/ops.def` names every op with its arguments and an axis pattern in the notation of einops. From that one string come
the shapes of the outputs, the errors for shapes that do not fit, the sharding rule of the JAX front end (which axes may
be cut without communication) and what a cut axis must be reduced with.

The notation: `m` is an axis; `(m rows)` one axis that is a product, major factor first; `*lead` any number of axes;
`...` any prefix of the first operand's axes, so one value for each contiguous run of what follows.

Sources: einops (one parsed pattern, thin backends); Shardy's sharding rules (factors).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from qshard.formats import ELEMENTS

__all__ = ["Binding", "Factor", "OpSpec", "Operand", "table"]

Shape = tuple[int, ...]

_FLOATS = ("float32", "bfloat16", "float16")
_BYTES = ("uint8", "int8", *(e.name for e in ELEMENTS.values() if e.bits == 8))
_TERM = re.compile(r"\((?P<group>[^)]*)\)|(?P<prefix>\.\.\.)|\*(?P<star>\w+)|(?P<axis>\w+)")


@dataclass(frozen=True)
class Factor:
    """A piece of an axis that is cut or kept as one: its name, unique in a binding, and its size."""

    name: str
    size: int


@dataclass(frozen=True)
class Operand:
    """One operand or result of an op: its name, its dtype class, and its axes in the terms of the pattern.

    A term is a tuple of factor names for a plain or composite axis, `"*name"` for any number of axes, or `"..."`.
    """

    name: str
    dtype: str
    terms: tuple[tuple[str, ...] | str, ...]


@dataclass(frozen=True)
class Binding:
    """A pattern applied to shapes: every axis of every operand and result as its factors, major first."""

    inputs: tuple[tuple[tuple[Factor, ...], ...], ...]
    outputs: tuple[tuple[tuple[Factor, ...], ...], ...]

    @property
    def output_shapes(self) -> tuple[Shape, ...]:
        return tuple(tuple(_product(f.size for f in axis) for axis in axes) for axes in self.outputs)

    def in_operand_order(self, output: int) -> tuple[tuple[Factor, ...], tuple[int, ...]]:
        """The factors of a result in the order the first operand has them, and its memory order as positions in that.

        XLA partitions an op over leading axes that all buffers share. A transposed result shares none, unless it keeps
        the operand's logical order and only its layout (major to minor) is transposed.
        """
        first = [factor for axis in self.inputs[0] for factor in axis]
        factors = [factor for axis in self.outputs[output] for factor in axis]
        if set(factors) != set(first):
            return tuple(factors), tuple(range(len(factors)))
        return tuple(first), tuple(first.index(factor) for factor in factors)

    @property
    def shared_lead(self) -> int:
        """How many leading factors all operands and results share, results taken in operand order."""
        rows = [[f for axis in axes for f in axis] for axes in self.inputs]
        rows += [list(self.in_operand_order(i)[0]) for i in range(len(self.outputs))]
        lead = 0
        while all(len(row) > lead and row[lead] == rows[0][lead] for row in rows):
            lead += 1
        return lead


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
            sides.append(tuple(Operand(n, d, _parse_terms(p)) for n, p, d in zip(*columns, strict=True)))
        inputs, outputs = sides
        return cls(name, inputs, outputs, tuple(attributes.split()), reduction)

    def bind(self, shapes: Sequence[Shape], **static: int) -> Binding:
        """Applies the pattern.

        Args:
          shapes: of the inputs, in order.
          static: the number of axes of a `*name` that shapes leave open, and the sizes of factors of a composite axis.

        Raises:
          ValueError: the shapes do not fit the pattern or each other.

        >>> table()["cast_tensor"].bind([(4, 64), (4,)]).output_shapes
        ((4, 64),)
        >>> table()["cast_transpose"].bind([(2, 4, 64), ()], batch=1).output_shapes
        ((2, 4, 64), (2, 64, 4))
        """
        if len(shapes) != len(self.inputs):
            raise ValueError(f"{self.name}: {len(shapes)} operands are not the {len(self.inputs)} it takes")
        solver = _Solver(self.name, static)
        inputs = tuple(
            solver.bind_input(operand, tuple(shape), self.inputs[0].name, tuple(shapes[0]))
            for operand, shape in zip(self.inputs, shapes, strict=True)
        )
        return Binding(inputs, tuple(solver.expand(operand) for operand in self.outputs))

    def check_dtypes(self, dtypes: Sequence[str], *, element: str | None = None) -> None:
        """Raises TypeError unless the operands have dtypes that the op takes."""
        for operand, dtype in zip(self.inputs, dtypes, strict=True):
            legal = {"float": _FLOATS, "byte": _BYTES, "code": ("uint8", element)}.get(operand.dtype, (operand.dtype,))
            if dtype not in legal:
                names = " or ".join(str(d) for d in legal)
                raise TypeError(f"{self.name}: {operand.name} ({dtype}) is not {names}; cast or view it first")

    def output_dtypes(
        self, dtypes: Sequence[str], *, element: str | None = None, dtype: str | None = None
    ) -> tuple[str, ...]:
        """Dtype strings of the results; `dtype` chooses where the op can give any float. Codes come as `element`."""
        if "float" in (o.dtype for o in self.outputs) and dtype not in _FLOATS:
            raise TypeError(f"{self.name}: dtype ({dtype}) is not {' or '.join(_FLOATS)}; ask for one of them")
        choice = {"float": dtype, "code": element, "same": dtypes[0]}
        return tuple(str(choice.get(o.dtype, o.dtype)) for o in self.outputs)

    def check_attributes(self, attributes: Mapping[str, object]) -> None:
        """Raises TypeError unless exactly the op's attributes are given."""
        if set(attributes) != set(self.attributes):
            got, needed = (", ".join(sorted(names)) or "none" for names in (attributes, self.attributes))
            raise TypeError(f"{self.name}: attributes ({got}) are not those it takes; give {needed}")


@functools.cache
def table() -> dict[str, OpSpec]:
    """Every op of the library by name, from `ops.def`."""
    from qshard import _ffi

    return {row[0]: OpSpec.parse(*row) for row in _ffi.ops()}


class _Solver:
    """Sizes of factors and numbers of axes, as operands fix them one after the other."""

    def __init__(self, op: str, static: Mapping[str, int]):
        self.op = op
        self.static = static
        self.sizes: dict[str, int] = {}
        self.stars: dict[str, tuple[Factor, ...]] = {}
        self.first_axes: tuple[tuple[Factor, ...], ...] = ()

    def bind_input(
        self, operand: Operand, shape: Shape, first_name: str, first_shape: Shape
    ) -> tuple[tuple[Factor, ...], ...]:
        if operand.terms == ("...",):
            if shape != first_shape[: len(shape)]:
                raise ValueError(
                    f"{self.op}: {operand.name} {shape} is not the first axes of {first_name} {first_shape}; "
                    f"give it one element for each run of {first_name}"
                )
            return self.first_axes[: len(shape)]
        self._check_rank(operand, shape)
        rest = list(shape)
        for i, term in enumerate(operand.terms):
            if isinstance(term, str):
                later = sum(self._rank(t) for t in operand.terms[i + 1 :])
                count = self._known_rank(term[1:])
                count = len(rest) - later if count is None else count
                taken, rest = rest[:count], rest[count:]
                factors = tuple(Factor(f"{term[1:]}{j}", size) for j, size in enumerate(taken))
                if self.stars.setdefault(term[1:], factors) != factors:
                    raise ValueError(self._mismatch(operand, shape))
            else:
                self._bind_axis(operand, shape, term, rest.pop(0))
        axes = self.expand(operand)
        if operand.name == first_name:
            self.first_axes = axes
        return axes

    def expand(self, operand: Operand) -> tuple[tuple[Factor, ...], ...]:
        axes: list[tuple[Factor, ...]] = []
        for term in operand.terms:
            if term == "...":
                axes.extend(self.first_axes)
            elif isinstance(term, str):
                axes.extend((factor,) for factor in self.stars[term[1:]])
            else:
                axes.append(tuple(Factor(name, self.sizes[name]) for name in term))
        return tuple(axes)

    def _known_rank(self, star: str) -> int | None:
        if star in self.stars:
            return len(self.stars[star])
        return self.static.get(star)

    def _rank(self, term: tuple[str, ...] | str) -> int:
        if isinstance(term, str):
            return self._known_rank(term[1:]) or 0
        return 1

    def _check_rank(self, operand: Operand, shape: Shape) -> None:
        least = sum(self._rank(t) for t in operand.terms)
        open_ended = any(isinstance(t, str) and self._known_rank(t[1:]) is None for t in operand.terms)
        if len(shape) < least or (len(shape) > least and not open_ended):
            pattern = " ".join(t if isinstance(t, str) else " ".join(t) for t in operand.terms)
            raise ValueError(f"{self.op}: {operand.name} {shape} does not have the axes '{pattern}'; reshape it")

    def _bind_axis(self, operand: Operand, shape: Shape, names: tuple[str, ...], size: int) -> None:
        unknown = [n for n in names if n not in self.sizes and n not in self.static]
        known = _product(self.sizes.get(n, self.static.get(n, 0)) for n in names if n not in unknown)
        if len(unknown) == 1 and len(names) > 1 and (known == 0 or size % known):
            given = " ".join(f"{n}={self.static[n]}" for n in names if n in self.static)
            raise ValueError(
                f"{self.op}: {operand.name} {shape} has an axis of {size}, which is not a whole number of {given}; "
                "pad or shard it to one"
            )
        if unknown:
            self.sizes[unknown[0]] = size // known
        elif known != size:
            raise ValueError(self._mismatch(operand, shape))
        self.sizes.update({n: self.static[n] for n in names if n not in self.sizes})

    def _mismatch(self, operand: Operand, shape: Shape) -> str:
        return f"{self.op}: {operand.name} {shape} does not fit the other operands; give them matching axes"


def _parse_terms(pattern: str) -> tuple[tuple[str, ...] | str, ...]:
    terms: list[tuple[str, ...] | str] = []
    for match in _TERM.finditer(pattern):
        if match["group"]:
            terms.append(tuple(match["group"].split()))
        elif match["axis"]:
            terms.append((match["axis"],))
        else:
            terms.append(match.group())
    return tuple(terms)


def _product(sizes: Iterable[int]) -> int:
    return functools.reduce(lambda a, b: a * b, sizes, 1)
