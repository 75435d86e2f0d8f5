"""Input arrays of the statistics: NumPy arrays, and the local shards of JAX and PyTorch arrays.

A front end converts an array to a `ShardedArray`: the local rectangles of the matrix, each element on exactly one
process, and the reductions over the other processes. A front end is imported only for its own arrays.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from qshard._core.placement import Box
from qshard.formats import Usage
from qshard.layout import PlaneLayout, Shape, matrix_shape
from qshard.numerics._reductions import Floats, as_float

T = TypeVar("T")
LocalBox = tuple[Any, Box]
"""A part of an array: its values, and its place in the whole."""

FRONT_ENDS = {"jax": "qshard.jax._numerics", "jaxlib": "qshard.jax._numerics", "torch": "qshard.torch_bridge._numerics"}
"""Top-level package of an array's class -> module whose `as_sharded(x, op)` converts the array."""


class Reductions(Protocol):
    """Reductions over the processes that share an array. All processes call the same methods in the same order."""

    def maximum(self, bits: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the elementwise maximum over all processes. Amaxes are passed as integers."""

    def gathered(self, own: T) -> list[T]:
        """Return the objects of all processes, in the same order on each. They must be small and picklable."""


@dataclass(frozen=True, kw_only=True)
class ShardedArray:
    """An array with its local rectangles, and access to the other processes that share it. `dtype` is for display.

    Attributes:
      rectangles: local rectangles of the matrix, in a dtype that kernels accept, and their boxes in it. Each element is
        in one rectangle of one process.
      beyond: number of elements of these rectangles that were out of range of float32.
      others: reductions over the other processes; None if this process has the whole array.
      boxes: boxes of the rectangles of all processes, in the matrix.
    """

    shape: Shape
    dtype: str
    rectangles: tuple[LocalBox, ...]
    beyond: int = 0
    others: Reductions | None = None
    boxes: tuple[Box, ...] = ()

    @property
    def size(self) -> int:
        return sum(array.size for array, _ in self.rectangles)

    @property
    def is_one(self) -> bool:
        """True if the whole array is one local rectangle."""
        return self.others is None and len(self.rectangles) == 1

    def maximum(self, amaxes: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the elementwise maximum over processes; NaN is greater than infinity."""
        if self.others is None:
            return amaxes
        return self.others.maximum(amaxes.view(np.int32)).view(np.float32).reshape(amaxes.shape)

    def gathered(self, own: T) -> list[T]:
        return [own] if self.others is None else self.others.gathered(own)


def as_sharded(x: Any, op: str) -> ShardedArray:
    """Convert an array, a nested list or a `ShardedArray` to a `ShardedArray`. `op` names the caller in errors.

    >>> as_sharded([[1.0, 2.0]], "stats").rectangles
    ((array([[1., 2.]], dtype=float32), Box(global_shape=(1, 2), start=(0, 0), size=(1, 2))),)
    """
    if isinstance(x, ShardedArray):
        return x
    if isinstance(x, Floats):
        return of_floats(x)
    for kind in type(x).__mro__:
        reader = FRONT_ENDS.get(kind.__module__.partition(".")[0])
        if reader is not None:
            made: ShardedArray = importlib.import_module(reader).as_sharded(x, op)
            return made
    floats = as_float(x, op)
    return of_floats(floats, str(getattr(x, "dtype", floats.dtype)))


def of_floats(x: Floats, dtype: str | None = None) -> ShardedArray:
    matrix = x.array.reshape(matrix_shape(x.array.shape))
    rectangle = matrix, Box(matrix.shape, (0, 0), matrix.shape)
    return ShardedArray(shape=x.array.shape, dtype=dtype or x.dtype, rectangles=(rectangle,), beyond=x.beyond)


def of_shards(shape: Shape, dtype: str, shards: Sequence[LocalBox], others: Reductions | None, op: str) -> ShardedArray:
    """Wrap the local shards of an array. `dtype` is its original dtype; `others` is None if all shards are local.

    Raises:
      TypeError: the array does not have real numbers.
      ValueError: the shards of all processes do not cover the array exactly once.
    """
    if not math.prod(shape):
        return of_floats(Floats(np.empty(shape, np.float32)), dtype)
    floats = [(as_float(array, op), box) for array, box in shards]
    rectangles = tuple(
        (x.array[index].reshape(rectangle.size), rectangle)
        for x, box in floats
        if x.array.size
        for index, rectangle in box.rectangles()
    )
    own = [box for _, box in rectangles]
    boxes = own if others is None else [box for part in others.gathered(own) for box in part]
    held = sum(math.prod(box.size) for box in boxes)
    if held != math.prod(shape) or _overlap(boxes):
        raise ValueError(
            f"{op}: x {shape} has {len(boxes)} local shards with {held} elements, which do not tile it; pass an array "
            "sharded along its axes"
        )
    beyond = sum(x.beyond for x, _ in floats)
    return ShardedArray(
        shape=shape, dtype=dtype, rectangles=rectangles, beyond=beyond, others=others, boxes=tuple(boxes)
    )


def _overlap(boxes: Sequence[Box]) -> bool:
    """Return whether two boxes share an element. Boxes are sorted by first row, so each search ends early."""
    ordered = sorted(boxes, key=lambda box: int(box.row))
    for i, a in enumerate(ordered):
        for b in ordered[i + 1 :]:
            if b.row >= a.stop[0]:
                break
            if a.overlaps(b):
                return True
    return False


def splits_blocks(where: PlaneLayout, x: ShardedArray) -> bool:
    """Return whether a shard boundary of any process splits a block."""
    block = where.format.block_shape(where.usage)
    return any(box.splits_blocks(block) for box in x.boxes)


def check_shards(where: PlaneLayout, x: ShardedArray, op: str) -> None:
    """Raise ValueError if shards split blocks of a format that computes block scales from more than amaxes."""
    fmt = where.format
    if (fmt.slice_refusal is None and not where.rotated) or not splits_blocks(where, x):
        return
    block = fmt.block_shape(where.usage)
    why = "is rotated" if where.rotated else "is tried at two scales"
    raise ValueError(
        f"{op}: x {x.shape} is sharded within its {block[0]}x{block[1]} blocks, each of which {why} ({fmt}, "
        f"{Usage(where.usage).name}); shard it on block boundaries, or measure a plain array"
    )
