"""Boxes (rectangular parts of an array), and the quantization of boxes with edges that split blocks.

    block amaxes of each box  ->  grid of the whole  ->  max over boxes and ranks  ->  scales  ->  codes

Each box gets its part of the bytes of `quantize` of the whole array. A box is padded with zeros to whole blocks: zeros
change no amax, and the codes of the padding are cropped. `flat_shards` handles shards that are flat slices, which need
no padding.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from qshard._core import quantize_steps
from qshard._core.quantize_steps import Philox, Plane, Reduce
from qshard.formats import Format
from qshard.layout import Shape, matrix_shape

Array = Any
Index = tuple[slice, ...]
"""A part of an array, one slice for each axis."""


class Box(NamedTuple):
    """A rectangular part of a row-major array.

    Attributes:
      global_shape: shape of the whole array, `[*lead, K]`.
      start: index of the first element of the box on each axis. `row` and `philox_offset` accept traced arrays;
        everything else needs Python ints.
      size: shape of the box.
    """

    global_shape: Shape
    start: tuple[Any, ...]
    size: Shape

    @property
    def stop(self) -> Shape:
        """End of the box on each axis."""
        return tuple(first + size for first, size in zip(self.start, self.size, strict=True))

    @property
    def slices(self) -> Index:
        """The box as an index of the whole array."""
        return tuple(map(slice, self.start, self.stop))

    @property
    def row(self) -> Any:
        """First row of the box in the matrix `[M, K]` of the whole array, with leading axes folded into rows."""
        row: Any = 0
        for axis, first in enumerate(self.start[:-1]):
            row = row * self.global_shape[axis] + first if axis else first
        return row

    def philox_offset(self, multiply_add: Callable[[Any, int, Any], Any] | None = None) -> Any:
        """Return the Philox offset of the box: the row-major index of its first element, `row * K + column`.

        `multiply_add(row, K, column)` computes it when the dtype of `start` is too narrow for the result; by default
        Python operators do. A column of 0 costs no addition.

        >>> Box((4, 6, 8), (1, 2, 3), (1, 2, 4)).philox_offset()
        67
        """
        columns, column = (self.global_shape[-1], self.start[-1]) if self.global_shape else (1, 0)
        if multiply_add is not None:
            return multiply_add(self.row, columns, column)
        offset = self.row * columns
        return offset if isinstance(column, int) and column == 0 else offset + column

    def philox(
        self, seed: Array, words: Callable[[Any], Array], multiply_add: Callable[[Any, int, Any], Any] | None = None
    ) -> Philox:
        """Return the Philox key and offset of the box for ops. Its rows must be consecutive rows of the matrix.

        Args:
          seed: the Philox key, uint64 as two uint32.
          words: converts the offset to an operand, uint64 as two uint32, low first.
          multiply_add: as in `philox_offset`.
        """
        return Philox(seed, words(self.philox_offset(multiply_add)), self.global_shape[-1])

    @property
    def transposed(self) -> Box:
        """This box in the transpose of the whole array."""
        return Box(self.global_shape[::-1], self.start[::-1], self.size[::-1])

    def placed_in(self, outer: Box) -> Box:
        """Return this box of an array that is the box `outer` of a larger array, as a box of the larger array."""
        start = tuple(first + inner for first, inner in zip(outer.start, self.start, strict=True))
        return Box(outer.global_shape, start, self.size)

    def within(self, outer: Box) -> Index:
        """Return the index of this box in an array that stores `outer`, which contains it."""
        return tuple(
            slice(first - begin, first - begin + size)
            for first, begin, size in zip(self.start, outer.start, self.size, strict=True)
        )

    def intersection(self, other: Box) -> Box:
        """Return the part of the array that both boxes have. It has no elements if they do not overlap.

        >>> Box((4, 6), (0, 2), (3, 4)).intersection(Box((4, 6), (1, 0), (3, 3)))
        Box(global_shape=(4, 6), start=(1, 2), size=(2, 1))
        """
        start, stop = tuple(map(max, self.start, other.start)), map(min, self.stop, other.stop)
        size = tuple(max(0, end - first) for first, end in zip(start, stop, strict=True))
        return Box(self.global_shape, start, size)

    def overlaps(self, other: Box) -> bool:
        return 0 not in self.intersection(other).size

    def blocks(self, block: Shape) -> Index:
        """Return the index, in the block grid of the whole array, of all blocks that intersect the box.

        >>> Box((40, 64), (20, 32), (10, 8)).blocks((16, 16))
        (slice(1, 2, None), slice(2, 3, None))
        """
        return tuple(
            slice(first // length, -(-stop // length))
            for first, stop, length in zip(self.start, self.stop, block, strict=True)
        )

    def aligned(self, block: Shape) -> Box:
        """Return the smallest box that contains this one and splits no block.

        >>> Box((40, 64), (20, 32), (14, 8)).aligned((16, 16))
        Box(global_shape=(40, 64), start=(16, 32), size=(24, 16))
        """
        blocks = list(zip(self.blocks(block), block, self.global_shape, strict=True))
        start = tuple(part.start * length for part, length, _ in blocks)
        stop = (min(part.stop * length, end) for part, length, end in blocks)
        return Box(self.global_shape, start, tuple(end - first for first, end in zip(start, stop, strict=True)))

    def splits_blocks(self, block: Shape) -> bool:
        """Return whether an edge of the box splits a block."""
        return self.aligned(block) != self

    def rectangles(self) -> Iterator[tuple[tuple[int, ...], Box]]:
        """Yield the box as boxes of the matrix `[M, K]` of the whole array, each with its index in the box.

        There is one, unless an axis other than the first is split.

        >>> [box.start for _, box in Box((2, 4, 8), (0, 2, 0), (2, 2, 8)).rectangles()]
        [(2, 0), (6, 0)]
        """
        matrix, lead = matrix_shape(self.global_shape), self.global_shape[:-1]
        split = max((axis for axis, size in enumerate(lead) if self.size[axis] != size), default=0)
        columns = (self.start[-1], self.size[-1]) if self.size else (0, 1)
        for index in itertools.product(*map(range, self.size[:split])):
            start = (*(first + i for first, i in zip(self.start, index, strict=False)), *self.start[split:])
            row = self._replace(start=start).row
            yield index, Box(matrix, (row, columns[0]), (math.prod(self.size[split:-1]), columns[1]))


def chunk_range(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return start and stop of the chunk of a rank, as FSDP2 and DTensor shard an axis. Last chunks may be empty.

    >>> [chunk_range(5, 4, rank) for rank in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    longest = -(-size // ranks)
    return min(size, longest * rank), min(size, longest * (rank + 1))


def slice_boxes(shape: Shape, start: int, stop: int) -> Iterator[Box]:
    """Yield the fewest boxes that cover elements `[start, stop)` of a row-major array: at most `2 * axes - 1`.

    >>> [(box.start, box.size) for box in slice_boxes((4, 3), 2, 10)]
    [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 1))]
    """
    if start >= stop:
        return
    if len(shape) < 2:
        yield Box(shape, (start,) * len(shape), (stop - start,) * len(shape))
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    ends = [(first - 1, start, first * row), (last, last * row, stop)]  # partial rows
    for i, (index, begin, end) in enumerate([(last, start, stop)] if first > last else ends):
        if i and last > first:
            yield Box(shape, (first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
        for inner in slice_boxes(shape[1:], begin - index * row, end - index * row):
            yield Box(shape, (index, *inner.start), (1, *inner.size))


def box_amax(ops: Any, xp: Any, x: Array, box: Box, block: Shape, amaxes: Array) -> Array:
    """Max-merge the block amaxes of `x` into `amaxes` in place, and return the block amaxes of `x`.

    Args:
      ops: as in `quantize_steps`.
      xp: `numpy`, or a namespace with its `pad`, `maximum` and `int32` for arrays of a front end.
      x: float32, bfloat16 or float16 of shape `box.size`.
      box: position of `x` in the matrix that the plane stores, `x` or `x.T`; or in a stack of matrices.
      block: (rows, cols) that share a scale; (1, rows, cols) in a stack.
      amaxes: fp32 amaxes of all blocks of the whole.
    """
    found = quantize_steps.block_amax(ops, pad_box(xp, x, box, block), block[-2:])
    raise_to(xp, amaxes[box.blocks(block)], found)
    return found


def cast_box(
    ops: Any, xp: Any, x: Array, box: Box, fmt: Format, block: Shape, scale: Array, philox: Philox | None = None
) -> Array:
    """Cast `x`, padded with zeros to `box.aligned(block)`, and return the codes. `box.within` crops them.

    `scale` has the scales of the box's blocks, contiguous, and `philox` belongs to the aligned box. Other arguments as
    in `box_amax`.
    """
    return quantize_steps.cast(ops, pad_box(xp, x, box, block), fmt, scale, block[-2:], philox)


def pad_box(xp: Any, x: Array, box: Box, block: Shape) -> Array:
    """Pad `x` with zeros to whole blocks, or to the end of the whole array."""
    outer = box.aligned(block)
    if outer == box:
        return x
    sides = zip(box.within(outer), outer.size, strict=True)
    return xp.pad(x, tuple((own.start, size - own.stop) for own, size in sides))


def raise_to(xp: Any, amaxes: Array, others: Array) -> None:
    """Write the elementwise maximum of fp32 amaxes to `amaxes`. Compared as integers, so it is exact, and NaN wins."""
    bits = amaxes.view(xp.int32)
    xp.maximum(bits, others.view(xp.int32), out=bits)


def quantize_boxes(
    ops: Any,
    shards: Callable[[], Iterator[tuple[Array, Box]]],
    fmt: Format,
    block: tuple[int, int],
    amaxes: Array,
    reduce_max: Reduce,
    *,
    whole: Array | None = None,
    philox: Callable[[Box], Philox | None] = lambda box: None,
) -> Iterator[tuple[Array, Box, Plane]]:
    """Quantize the local boxes of one matrix, as NumPy arrays. Their edges may split blocks.

    `ops` and `block` as in `box_amax`.

    - `shards`: returns an iterator over values and boxes. Called twice, so that not all values need memory at once.
    - `amaxes`: fp32 zeros for all blocks of the whole matrix.
    - `reduce_max`: max-reduction of `amaxes` over processes, called once.
    - `whole`: amax of the whole matrix, `[]`, or of each of its rows, if `fmt` has a global scale.
    - `philox`: returns the Philox key and offset of a box.

    Yields:
      The values of each box padded with zeros, the aligned box that they fill, and its plane with the scales of the
      whole matrix.
    """
    for x, box in shards():
        box_amax(ops, np, x, box, block, amaxes)
    amaxes = reduce_max(amaxes)
    for x, box in shards():
        outer, values = box.aligned(block), pad_box(np, x, box, block)
        of_rows = whole if whole is None or not whole.ndim else whole[outer.start[0] : outer.stop[0]]
        found = np.ascontiguousarray(amaxes[box.blocks(block)])
        scales = quantize_steps.scales(ops, fmt, found, of_rows)
        codes = cast_box(ops, np, values, outer, fmt, block, scales.scale, philox(outer))
        yield values, outer, Plane(codes, scales.scale_inv, scales.global_scale_inv)
