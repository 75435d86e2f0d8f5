"""Statistics of an array in rectangles are those of the whole, wherever it is cut."""

import itertools

import numpy as np
import pytest

from qshard._core.placement import Box
from qshard.formats import MXFP8_E4M3, NVFP4_16x16, Usage
from qshard.numerics import compare, report, stats
from qshard.numerics._arrays import of_shards
from support.awkward import DTYPES, TAME, awkward_values, fits
from support.formats import VARIANTS
from support.stats import assert_same_stats

PLANES = [(fmt, usage) for fmt in VARIANTS for usage in Usage.BOTH if fits(fmt, (96, 160), usage)]
# Between blocks of 16 and 32; within all of them; of one row, one column and none; in two axes.
CUTS = [
    ([0, 32, 96], [0, 160]),
    ([0, 96], [0, 64, 160]),
    ([0, 7, 8, 8, 55, 96], [0, 160]),
    ([0, 96], [0, 1, 37, 160]),
    ([0, 40, 96], [0, 72, 160]),
]


def rectangles_of(x, rows, columns):
    boxes = itertools.product(itertools.pairwise(rows), itertools.pairwise(columns))
    boxes = [Box(x.shape, (a, c), (b - a, d - c)) for (a, b), (c, d) in boxes]
    return of_shards(x.shape, "float32", parts_of(x, boxes), None, "stats")


def parts_of(x, boxes):
    return [(x[box.within(Box(x.shape, (0,) * x.ndim, x.shape))], box) for box in boxes]


@pytest.mark.each_value
@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize(("fmt", "usage"), PLANES, ids=str)
def test_of_rectangles_are_of_the_whole(fmt, usage, cut):
    for dtype, kinds in ((DTYPES[0], None), (DTYPES[1], TAME)):
        x = awkward_values((96, 160), 3, dtype, **({} if kinds is None else {"kinds": kinds}))
        made = rectangles_of(x, *cut)
        if (fmt.scaling.four_over_six or (fmt.hadamard and usage is Usage.COLUMNWISE)) and any(
            place % length for places, length in zip(cut, fmt.block_of(usage), strict=True) for place in places
        ):
            with pytest.raises(ValueError, match=r"stats: x \(96, 160\) is sharded within its 1"):
                stats(made, fmt, usage)
            return
        assert_same_stats(stats(made, fmt, usage, seed=5), stats(x, fmt, usage, seed=5))


@pytest.mark.parametrize(("fmt", "usage"), PLANES[:: len(PLANES) // 12], ids=str)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_leading_axes_may_be_cut(fmt, usage, axis):
    """Shards of an axis that has others before it are not rectangles of the matrix."""
    x = awkward_values((3, 32, 64), 1, kinds=TAME)
    step = {0: 1, 1: 16, 2: 32}[axis]
    size = tuple(step if a == axis else n for a, n in enumerate(x.shape))
    starts = [tuple(i * (a == axis) for a in range(3)) for i in range(0, x.shape[axis], step)]
    made = of_shards(x.shape, "float32", parts_of(x, [Box(x.shape, start, size) for start in starts]), None, "stats")
    assert_same_stats(stats(made, fmt, usage, seed=2), stats(x, fmt, usage, seed=2))


def test_the_worst_block_is_where_it_is_in_the_whole():
    x = np.ones((64, 64), np.float32)
    x[40:48, 32:] = 1.04  # of blocks of 32 rows, cut at 36
    made = rectangles_of(x, [0, 36, 64], [0, 64])
    fmt = MXFP8_E4M3
    assert stats(made, fmt, Usage.COLUMNWISE).worst_block == stats(x, fmt, Usage.COLUMNWISE).worst_block == (1, 32)
    assert stats(made, fmt).worst_block == stats(x, fmt).worst_block == (40, 1)


def test_zeros_around_a_rectangle_are_not_counted():
    """A NaN makes all of its block NaN, and so the zeros that stand for what other rectangles hold of it."""
    x = np.ones((32, 32), np.float32)
    x[3, 3] = np.nan
    s = stats(rectangles_of(x, [0, 5, 32], [0, 7, 32]), NVFP4_16x16)
    assert (s.nonfinite_given, s.nonfinite_made) == (1 / 1024, 255 / 1024)


def test_empty_arrays_in_rectangles():
    x = np.zeros((0, 32), np.float32)
    assert_same_stats(stats(rectangles_of(x, [0, 0], [0, 16, 32]), "FP8_E4M3"), stats(x, "FP8_E4M3"))


def test_what_is_beyond_float32_is_counted_once():
    x = np.array([[1e300, 1.0], [1e-300, 2.0]])
    assert (
        stats(rectangles_of(x, [0, 1, 2], [0, 2]), "FP8_E4M3").beyond_float32
        == stats(x, "FP8_E4M3").beyond_float32
        == 0.5
    )


def test_formats_that_rectangles_cannot_hold_are_left_out():
    x = awkward_values((64, 64), 0, kinds=TAME)
    made = rectangles_of(x, [0, 20, 64], [0, 64])
    assert [str(s.format) for s in compare(made)] == [str(s.format) for s in compare(x)]


def test_title_of_rectangles():
    pytest.importorskip("rich")
    x = awkward_values((64, 64), 0, kinds=TAME)
    made = rectangles_of(x, [0, 20, 64], [0, 64])
    assert report(made).title == report(x).title == "64 x 64, float32"


def test_shards_that_are_not_the_array_are_refused():
    x = np.ones((4, 4), np.float32)
    parts = [(x[:2], Box(x.shape, (0, 0), (2, 4))), (x[2:], Box(x.shape, (1, 0), (2, 4)))]
    for bad in (parts, parts[:1], [*parts[:1], *parts[:1]]):
        with pytest.raises(ValueError, match=r"stats: x \(4, 4\) has .* local shards with .* elements, which do not"):
            of_shards(x.shape, "float32", bad, None, "stats")
