"""Axis patterns: what the shapes of an op's buffers have to do with each other.

The notation of einops: `m` is an axis; `(m rows)` one axis that is a product, major factor first; `(m rows?)` one whose
last run of `rows` may be cut short, and `m` counts the runs; `*lead` any number of axes; a number an axis of that size;
`...` any prefix of the first operand's axes, of a product its major factor, so one value for each contiguous run, or
block, of what follows. Two 4-bit codes share a byte, which halves the last axis of what holds them.

Sources: einops (one parsed pattern, thin backends); Shardy's sharding rules (factors).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Axes", "Factor", "Pattern", "Shape", "Solver", "Term"]

Shape = tuple[int, ...]
Term = tuple[str, ...] | str
_TERM = re.compile(r"\((?P<group>[^)]*)\)|(?P<prefix>\.\.\.)|\*(?P<star>\w+)|(?P<axis>\w+)")


@dataclass(frozen=True)
class Factor:
    """A piece of an axis that is cut or kept as one: its name, unique in a binding, and its size."""

    name: str
    size: int


Axes = tuple[tuple[Factor, ...], ...]


@dataclass(frozen=True)
class Pattern:
    """The axes of one operand or result.

    Attributes:
      terms: a tuple of factor names for a plain or composite axis, `"*name"` for any number of axes, or `"..."`.
      cut: factors of composite axes whose last run may be cut short.

    >>> Pattern.parse("*batch (m rows?) 2")
    Pattern(terms=('*batch', ('m', 'rows'), ('2',)), cut=frozenset({'rows'}))
    """

    terms: tuple[Term, ...]
    cut: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, text: str) -> Pattern:
        terms: list[Term] = []
        cut: set[str] = set()
        for match in _TERM.finditer(text):
            if match["group"]:
                names = match["group"].split()
                cut.update(name[:-1] for name in names if name.endswith("?"))
                terms.append(tuple(name.removesuffix("?") for name in names))
            else:
                terms.append((match["axis"],) if match["axis"] else match.group())
        return cls(tuple(terms), frozenset(cut))

    @property
    def composites(self) -> tuple[tuple[str, ...], ...]:
        return tuple(term for term in self.terms if not isinstance(term, str) and len(term) > 1)

    def __str__(self) -> str:
        return " ".join(term if isinstance(term, str) else " ".join(term) for term in self.terms)


class Solver:
    """Sizes of factors and numbers of axes, as operands fix them one after the other.

    Args:
      op: what to call the op in an error.
      static: the number of axes of a `*name` that shapes leave open, or of a result's `...` as `lead`, and the sizes of
        factors of a composite axis.
    """

    def __init__(self, op: str, static: Mapping[str, int]):
        self.op = op
        self.static = static
        self.split = True
        self._sizes: dict[str, int] = {}
        self._lengths: dict[tuple[str, ...], int] = {}  # Of composite axes: less than the product if one is cut.
        self._stars: dict[str, tuple[Factor, ...]] = {}
        self._prefixes: dict[str, int] = {}  # How many axes `...` is, by operand.
        self._first: tuple[str, Pattern] | None = None

    def bind(self, name: str, pattern: Pattern, shape: Shape, per_byte: int = 1) -> None:
        """Learns from one operand, `per_byte` of whose elements share a byte.

        Raises:
          ValueError: `shape` does not fit the pattern or the operands before.
        """
        self._first = self._first or (name, pattern)
        self._check_rank(name, pattern, shape)
        rest = [*shape[:-1], shape[-1] * per_byte] if shape else []
        for i, term in enumerate(pattern.terms):
            if not isinstance(term, str):
                self._bind_axis(name, pattern, shape, term, rest.pop(0))
                continue
            later = sum(self._rank(t) for t in pattern.terms[i + 1 :])
            count = self._known_rank(term)
            count = len(rest) - later if count is None else count
            taken, rest = rest[:count], rest[count:]
            if term == "...":
                self._bind_prefix(name, shape, taken)
                continue
            factors = tuple(Factor(f"{term[1:]}{j}", size) for j, size in enumerate(taken))
            if self._stars.setdefault(term, factors) != factors:
                raise ValueError(self._mismatch(name, shape))

    def splits(self, pattern: Pattern, per_byte: int = 1) -> bool:
        """Whether composite axes can be split into factors: none is cut, and no byte holds codes of two blocks."""
        whole = all(self._lengths.get(names, self._size(*names)) == self._size(*names) for names in pattern.composites)
        return whole and all(self._size(*names[1:]) % per_byte == 0 for names in pattern.composites[-1:])

    def expand(self, name: str, pattern: Pattern, per_byte: int = 1) -> Axes:
        """The axes of an operand or result as factors, all operands being bound."""
        axes: list[tuple[Factor, ...]] = []
        for term in pattern.terms:
            if term == "...":
                axes.extend(
                    (factor,) for factor in self._grid()[: self._prefixes.get(name, self.static.get("lead", 0))]
                )
            elif isinstance(term, str):
                axes.extend((factor,) for factor in self._stars[term])
            else:
                # A number is a size, not a name: two of them are no common factor.
                names = (f"{name}.{len(axes)}" if n.isdigit() else n for n in term)
                factors = tuple(Factor(n, self._size(t)) for n, t in zip(names, term, strict=True))
                axes.append(factors if self.split or len(term) == 1 else self._whole(term, factors, axes))
        if per_byte > 1:
            *majors, last = axes[-1]
            if last.size % per_byte:
                raise ValueError(
                    f"{self.op}: {name} has a last axis of {last.size}, and {per_byte} codes share a byte; pad it"
                )
            axes[-1] = (*majors, Factor(f"{last.name}/{per_byte}", last.size // per_byte))
        return tuple(axes)

    def _whole(
        self, term: tuple[str, ...], factors: tuple[Factor, ...], before: list[tuple[Factor, ...]]
    ) -> tuple[Factor, ...]:
        """A composite axis that is not split: one factor, the major one where blocks have length 1.

        But only if no composite factor comes before: factors that buffers share lead, and the order may not change.
        """
        if self._size(*term[1:]) == 1 and not any(" " in axis[0].name for axis in before):
            return factors[:1]
        return (Factor(" ".join(factor.name for factor in factors), self._lengths.get(term, self._size(*term))),)

    def _grid(self) -> tuple[Factor, ...]:
        """The major factors of the first operand's axes."""
        assert self._first is not None
        majors: list[Factor] = []
        for term in self._first[1].terms:
            majors.extend(self._stars[term] if isinstance(term, str) else [Factor(term[0], self._size(term[0]))])
        return tuple(majors)

    def _bind_prefix(self, name: str, shape: Shape, taken: list[int]) -> None:
        assert self._first is not None
        first, pattern = self._first
        sizes = tuple(factor.size for factor in self._grid())
        if tuple(taken) != sizes[: len(taken)]:
            of = f"blocks of {first}" if pattern.composites else first
            raise ValueError(
                f"{self.op}: {name} {shape} is not the first axes of {of} {sizes}; "
                f"give it one element for each run of {of}"
            )
        self._prefixes[name] = len(taken)

    def _known_rank(self, term: str) -> int | None:
        return len(self._stars[term]) if term in self._stars else self.static.get(term[1:])

    def _rank(self, term: Term) -> int:
        return (self._known_rank(term) or 0) if isinstance(term, str) else 1

    def _check_rank(self, name: str, pattern: Pattern, shape: Shape) -> None:
        least = sum(self._rank(t) for t in pattern.terms)
        open_ended = any(isinstance(t, str) and self._known_rank(t) is None for t in pattern.terms)
        if len(shape) < least or (len(shape) > least and not open_ended):
            raise ValueError(f"{self.op}: {name} {shape} does not have the axes '{pattern}'; reshape it")

    def _bind_axis(self, name: str, pattern: Pattern, shape: Shape, term: tuple[str, ...], size: int) -> None:
        unknown = [n for n in term if self._known(n) is None]
        run = math.prod(self._known(n) or 0 for n in term if n not in unknown)
        cut = term[-1] in pattern.cut
        if unknown and len(term) > 1 and (run == 0 or (size % run and not cut)):
            given = " ".join(n if n.isdigit() else f"{n}={self._known(n)}" for n in term[1:])
            raise ValueError(
                f"{self.op}: {name} {shape} has an axis of {size}, which is not a whole number of {given}; "
                "pad or shard it to one"
            )
        if unknown:
            self._sizes[unknown[0]] = -(-size // run)
        elif size != run and not (cut and self._size(term[0]) == -(-size // self._size(*term[1:]))):
            raise ValueError(self._mismatch(name, shape))
        self._sizes.update({n: self._size(n) for n in term})
        self._lengths[term] = size

    def _known(self, name: str) -> int | None:
        return int(name) if name.isdigit() else self._sizes.get(name, self.static.get(name))

    def _size(self, *names: str) -> int:
        return math.prod(self._known(name) or 0 for name in names)

    def _mismatch(self, name: str, shape: Shape) -> str:
        return f"{self.op}: {name} {shape} does not fit the other operands; give them matching axes"
