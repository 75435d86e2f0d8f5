"""Boxes: where they are in a whole array, and the law for boxes whose edges split blocks."""

import itertools

import numpy as np
import pytest

from qshard._core.placement import Box, box_amax, cast_box, quantize_boxes, slice_boxes
from qshard._core.quantize_steps import Philox, global_amax, quantize
from qshard._core.validation import uint32_pair
from qshard.formats import Usage
from qshard.layout import is_transposed, matrix_shape, source, stored_block
from qshard.numerics._kernels import ops
from support.awkward import TAME, assert_bits_equal, awkward_values, fits
from support.formats import SLICED

SHAPE = (96, 160)
EDGES = [([0, 7, 8, 8, 55, 96], [0, 160]), ([0, 96], [0, 2, 38, 160]), ([0, 40, 96], [0, 72, 160])]
SEED = 2**40 + 3
BLOCKED = [
    (fmt, usage)
    for fmt in SLICED
    for usage in Usage.BOTH
    if fmt.block is not None and source(fmt, usage) is usage and fits(fmt, SHAPE, usage)
]


def boxes_of(shape, *edges):
    for sides in itertools.product(*map(itertools.pairwise, edges)):
        yield Box(shape, tuple(a for a, _ in sides), tuple(b - a for a, b in sides))


def values_in(x, box):
    return np.ascontiguousarray(x[tuple(map(slice, box.start, box.stop))])


def codes_of(fmt, data):
    """One code a byte: boxes may split bytes."""
    if fmt.element.codes_per_byte == 1:
        return data
    return np.stack([data & 15, data >> 4], -1).reshape(len(data), 2 * data.shape[1])


def words(offset):
    return np.array(uint32_pair("offset", offset), np.uint32)


@pytest.mark.parametrize("shape", [(), (7,), (5, 7), (3, 5, 7), (2, 3, 5, 7)], ids=str)
def test_offsets_and_rows_are_those_of_the_first_element(shape):
    index = np.arange(int(np.prod(shape))).reshape(shape)
    rows = index.reshape(matrix_shape(shape)) // matrix_shape(shape)[1]
    for start in np.ndindex(*shape):
        box = Box(shape, start, tuple(1 for _ in shape))
        assert box.philox_offset() == index[start]
        assert box.row == rows.reshape(shape)[start]


def test_offsets_of_arrays_and_of_words():
    """Starts may be arrays; a front end without integers of 64 bits multiplies in words."""
    first = np.arange(6, dtype=np.int64).reshape(2, 3)
    assert_bits_equal(Box((9, 2**33), (first, 0), (1, 1)).philox_offset(), first * 2**33)
    box = Box((4, 2**20, 2**33 + 1), (np.uint32(3), np.uint32(5), np.uint32(6)), (1, 1, 1))
    made = box.philox_offset(lambda row, columns, column: uint32_pair("offset", int(row) * columns + int(column)))
    assert made == uint32_pair("offset", (3 * 2**20 + 5) * (2**33 + 1) + 6)


CUTS = [*itertools.product([(0, 2, 3), (0, 3)], [(0, 1, 4), (0, 4)], [(0, 5), (0, 2, 5)])]


@pytest.mark.parametrize("cut", CUTS)
def test_rectangles_are_the_box(cut):
    x = np.arange(60).reshape(3, 4, 5)
    seen = []
    for box in boxes_of(x.shape, *cut):
        array = values_in(x, box)
        for index, rectangle in box.rectangles():
            part = array[index].reshape(rectangle.size)
            assert_bits_equal(part, values_in(x.reshape(12, 5), rectangle))
            seen += part.reshape(-1).tolist()
    assert sorted(seen) == list(range(60))


@pytest.mark.parametrize("shape", [(7,), (4, 5), (3, 1, 4), (2, 3, 2, 2), ()])
def test_boxes_of_a_slice(shape):
    """They are the slice, each element once, in at most 2 axes - 1 boxes."""
    size = int(np.prod(shape))
    whole = np.arange(size).reshape(shape)
    for start in range(size + 1):
        for stop in range(start, size + 1):
            found = list(slice_boxes(shape, start, stop))
            elements = []
            for box in found:
                assert box.philox_offset() == start + len(elements)
                elements += values_in(whole, box).flatten().tolist()
            assert elements == list(range(start, stop))
            assert len(found) <= max(2 * len(shape) - 1, 1)


def test_alignment():
    for box in boxes_of((37, 21), [0, 5, 16, 33, 37], [0, 8, 9, 21]):
        outer = box.aligned((16, 8))
        assert outer.splits_blocks((16, 8)) is False
        assert outer.blocks((16, 8)) == box.blocks((16, 8))
        assert_bits_equal(
            values_in(np.arange(777).reshape(37, 21), outer)[box.within(outer)],
            values_in(np.arange(777).reshape(37, 21), box),
        )
        assert box.transposed.aligned((8, 16)) == outer.transposed
        assert box.splits_blocks((16, 8)) is (box != outer)
        assert Box(box.size, (0, 0), box.size).placed_in(box) == box


def test_overlaps():
    boxes = list(boxes_of((6, 8), [0, 1, 6], [0, 3, 8]))
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    assert all(box.overlaps(Box((6, 8), (0, 2), (2, 2))) for box in boxes)
    assert not Box((6, 8), (0, 0), (0, 8)).overlaps(Box((6, 8), (0, 0), (6, 8)))


@pytest.mark.each_value
@pytest.mark.parametrize("edges", EDGES, ids=str)
@pytest.mark.parametrize(("fmt", "usage"), BLOCKED, ids=str)
def test_codes_of_boxes_are_those_of_the_whole(fmt, usage, edges):
    x, block, transposed = awkward_values(SHAPE, 3, kinds=TAME), stored_block(fmt, usage), is_transposed(fmt, usage)
    key = Philox(words(SEED), words(0))
    want = quantize(ops, x, fmt, usage, philox=key if fmt.stochastic else None)[usage]
    stored = np.ascontiguousarray(x.T) if transposed else x
    boxes = [box.transposed if transposed else box for box in boxes_of(SHAPE, *edges)]
    reductions = []

    def philox(box):
        if not transposed:
            return box.philox(key.seed, words)
        return box.transposed.philox(key.seed, words).transposed(box.global_shape[1])

    found = quantize_boxes(
        ops,
        lambda: ((values_in(stored, box), box) for box in boxes),
        fmt,
        block,
        np.zeros(tuple(-(-size // length) for size, length in zip(stored.shape, block, strict=True)), np.float32),
        lambda amaxes: reductions.append(1) or amaxes,
        whole=global_amax(ops, x, fmt),
        philox=philox if fmt.stochastic else lambda box: None,
    )
    for box, (values, outer, part) in zip(boxes, found, strict=True):
        assert outer == box.aligned(block)
        assert_bits_equal(values[box.within(outer)], values_in(stored, box))
        assert_bits_equal(part.scale_inv, want.scale_inv.reshape(-1, want.scale_inv.shape[-1])[box.blocks(block)])
        assert_bits_equal(codes_of(fmt, part.data)[box.within(outer)], values_in(codes_of(fmt, want.data), box))
    assert reductions == [1]


def test_steps_keep_values_of_whole_blocks_as_they_are():
    """Nothing is copied where edges split no block."""
    fmt, x, seen = next(fmt for fmt, _ in BLOCKED if fmt.block == (32, 32)), np.ones((32, 64), np.float32), []

    class Ops:
        def __getattr__(self, name):
            return lambda array, *operands, **options: (
                seen.append(array),
                getattr(ops, name)(array, *operands, **options),
            )[1]

    box, amaxes = Box((64, 64), (32, 0), x.shape), np.zeros((2, 2), np.float32)
    assert_bits_equal(box_amax(Ops(), np, x, box, fmt.block, amaxes), np.ones((1, 2), np.float32))
    assert_bits_equal(amaxes, np.float32([[0, 0], [1, 1]]))
    cast_box(Ops(), np, x, box, fmt, fmt.block, np.ones((1, 2), np.float32))
    assert all(array is x for array in seen)
