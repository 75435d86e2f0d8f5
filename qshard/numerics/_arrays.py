"""Arrays that are measured: of NumPy as they are, of JAX and PyTorch in the pieces that this process holds.

A front end turns its arrays into a `Whole`: rectangles of the matrix that this process has, each element on one process
alone, and what reduces over the others. No front end is imported for an array that is not its own.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from qshard.layout import Shape, matrix_shape
from qshard.numerics._floats import Floats, as_float

T = TypeVar("T")

FRONT_ENDS = {"jax": "qshard.jax._numerics", "jaxlib": "qshard.jax._numerics", "torch": "qshard.torch_bridge._numerics"}
"""The package that a class is from -> the module whose `whole_of(x, op)` reads its arrays."""


class Others(Protocol):
    """The processes that have the rest of an array. All of them call the same methods, in the same order."""

    def maximum(self, bits: NDArray[np.int32]) -> NDArray[np.int32]:
        """The maximum over all, of each element: of amaxes as integers."""

    def gathered(self, own: T) -> list[T]:
        """What each has, small objects that pickle, in one order everywhere."""


class Piece(NamedTuple):
    """A rectangle of the matrix, and the row and column of the whole where it begins."""

    array: NDArray[Any]
    at: tuple[int, int]


class Box(NamedTuple):
    """Rows and columns of the matrix that some process has."""

    rows: slice
    columns: slice


@dataclass(frozen=True, kw_only=True)
class Whole:
    """An array, of which this process may hold a part.

    Attributes:
      shape: of the whole.
      dtype: as it was given, for people.
      pieces: rectangles of the matrix, in a dtype that kernels take; each element is in one of one process.
      beyond: how many elements of these pieces were beyond float32.
      others: who has the rest; None: nobody does.
      boxes: where the pieces of all processes are.
    """

    shape: Shape
    dtype: str
    pieces: tuple[Piece, ...]
    beyond: int = 0
    others: Others | None = None
    boxes: tuple[Box, ...] = ()

    @property
    def size(self) -> int:
        """Elements that this process holds."""
        return sum(piece.array.size for piece in self.pieces)

    @property
    def is_one(self) -> bool:
        """Whether all of it is one piece here."""
        return self.others is None and len(self.pieces) == 1

    def maximum(self, amaxes: NDArray[np.float32]) -> NDArray[np.float32]:
        """The maximum over processes, with NaN above infinity."""
        if self.others is None:
            return amaxes
        return self.others.maximum(amaxes.view(np.int32)).view(np.float32).reshape(amaxes.shape)

    def gathered(self, own: T) -> list[T]:
        return [own] if self.others is None else self.others.gathered(own)


def whole_of(x: Any, op: str) -> Whole:
    """`x` as what is measured. `op` names the caller in errors.

    >>> whole_of([[1.0, 2.0]], "stats").pieces
    (Piece(array=array([[1., 2.]], dtype=float32), at=(0, 0)),)
    """
    if isinstance(x, Whole):
        return x
    if isinstance(x, Floats):
        return of_floats(x)
    for kind in type(x).__mro__:
        reader = FRONT_ENDS.get(kind.__module__.partition(".")[0])
        if reader is not None:
            made: Whole = importlib.import_module(reader).whole_of(x, op)
            return made
    floats = as_float(x, op)
    return of_floats(floats, str(getattr(x, "dtype", floats.dtype)))


def of_floats(x: Floats, dtype: str | None = None) -> Whole:
    """An array that is here as a whole."""
    matrix = x.array.reshape(matrix_shape(x.array.shape))
    return Whole(shape=x.array.shape, dtype=dtype or x.dtype, pieces=(Piece(matrix, (0, 0)),), beyond=x.beyond)


class Shard(NamedTuple):
    """A part of an array, and where it begins on each axis."""

    array: Any
    start: tuple[int, ...]


def of_shards(shape: Shape, dtype: str, shards: Sequence[Shard], others: Others | None, op: str) -> Whole:
    """An array of which this process has some shards, each element on one process alone.

    Raises:
      TypeError: it does not hold real numbers.
      ValueError: the shards of all processes are not the array, once each.
    """
    if not math.prod(shape):
        return of_floats(Floats(np.empty(shape, np.float32)), dtype)
    floats = [(as_float(shard.array, op), shard.start) for shard in shards]
    pieces = tuple(piece for x, start in floats if x.array.size for piece in _rectangles(shape, x.array, start))
    own = [_box(piece) for piece in pieces]
    boxes = own if others is None else [box for part in others.gathered(own) for box in part]
    held = sum((box.rows.stop - box.rows.start) * (box.columns.stop - box.columns.start) for box in boxes)
    if held != math.prod(shape) or _overlap(boxes):
        raise ValueError(
            f"{op}: x {shape} is in {len(boxes)} shards of {held} elements, which are not all of it, each once; make "
            "it an array whose shards are runs of rows and columns"
        )
    beyond = sum(x.beyond for x, _ in floats)
    return Whole(shape=shape, dtype=dtype, pieces=pieces, beyond=beyond, others=others, boxes=tuple(boxes))


def _rectangles(shape: Shape, array: NDArray[Any], start: Sequence[int]) -> Iterator[Piece]:
    """A box of an array as rectangles of its matrix: one, unless an axis is cut that has others before it."""
    lead, own = shape[:-1], array.shape[:-1]
    cut = max((axis for axis in range(len(lead)) if own[axis] != lead[axis]), default=0)
    steps = [math.prod(lead[axis + 1 :]) for axis in range(len(lead))]
    column = start[-1] if shape else 0
    for outer in np.ndindex(*own[:cut]):
        place = (*(first + i for first, i in zip(start, outer, strict=False)), *start[cut : len(lead)])
        row = sum(i * step for i, step in zip(place, steps, strict=True))
        yield Piece(array[outer].reshape(-1, array.shape[-1] if shape else 1), (row, column))


def _box(piece: Piece) -> Box:
    ends = (first + size for first, size in zip(piece.at, piece.array.shape, strict=True))
    return Box(*(slice(first, end) for first, end in zip(piece.at, ends, strict=True)))


def _overlap(boxes: Sequence[Box]) -> bool:
    """Whether an element is in two boxes. Sorted by rows, a box meets only those that begin before it ends."""
    ordered = sorted(boxes, key=lambda box: box.rows.start)
    for i, a in enumerate(ordered):
        for b in ordered[i + 1 :]:
            if b.rows.start >= a.rows.stop:
                break
            if a.columns.start < b.columns.stop and b.columns.start < a.columns.stop:
                return True
    return False
