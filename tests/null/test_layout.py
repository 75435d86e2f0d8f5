"""Shapes of planes, written out, and the errors for shapes without whole blocks."""

import numpy as np
import pytest

from qshard import formats, reference
from qshard.formats import Usage
from qshard.layout import plane

ROW, COL = Usage.ROWWISE, Usage.COLUMNWISE
ROW_SCALED = formats.NVFP4.with_options(global_scale="row")


@pytest.mark.parametrize(
    ("fmt", "shape", "usage", "data", "scale", "global_scale", "transposed"),
    [
        (formats.FP8_E4M3, (5, 7), ROW, (5, 7), (), None, False),
        (formats.FP8_E4M3, (5, 7), COL, (7, 5), (), None, True),
        (formats.FP8_E4M3, (2, 5, 7), ROW, (2, 5, 7), (), None, False),
        (formats.FP8_E4M3, (2, 5, 7), COL, (7, 10), (), None, True),
        (formats.FP8_E4M3, (), ROW, (), (), None, False),
        (formats.FP8_E4M3, (0, 7), COL, (7, 0), (), None, True),
        (formats.FP8_1x128, (3, 130), ROW, (3, 130), (3, 2), None, False),
        (formats.FP8_1x128, (3, 130), COL, (130, 3), (130, 1), None, True),
        (formats.FP8_1x128, (2, 3, 130), ROW, (2, 3, 130), (2, 3, 2), None, False),
        (formats.FP8_128x128, (129, 256), ROW, (129, 256), (2, 2), None, False),
        (formats.FP8_128x128, (129, 257), COL, (257, 129), (3, 2), None, True),
        (formats.FP8_128x128, (2, 65, 256), ROW, (2, 65, 256), (2, 2), None, False),
        (formats.MXFP8_E4M3, (4, 64), ROW, (4, 64), (4, 2), None, False),
        (formats.MXFP8_E4M3, (64, 4), COL, (64, 4), (2, 4), None, False),
        (formats.MXFP8_E4M3, (2, 32, 4), COL, (2, 32, 4), (2, 4), None, False),
        (formats.MXFP8_32x32, (64, 96), COL, (96, 64), (3, 2), None, True),
        (formats.NVFP4, (3, 32), ROW, (3, 16), (3, 2), (), False),
        (formats.NVFP4, (32, 3), COL, (3, 16), (3, 2), (), True),
        (formats.NVFP4, (64,), ROW, (32,), (4,), (), False),
        (formats.NVFP4, (0, 16), ROW, (0, 8), (0, 1), (), False),
        (formats.NVFP4_16x16, (16, 48), COL, (48, 8), (3, 1), (), True),
        (ROW_SCALED, (2, 3, 32), ROW, (2, 3, 16), (2, 3, 2), (2, 3), False),
    ],
    ids=str,
)
def test_shapes(fmt, shape, usage, data, scale, global_scale, transposed):
    layout = plane(fmt, shape, usage)
    assert layout.data_shape == data
    assert layout.scale_shape == scale
    assert layout.global_scale_shape == global_scale
    assert layout.transposed is transposed


@pytest.mark.parametrize(
    ("fmt", "shape", "usage", "error"),
    [
        (
            formats.MXFP8_32x32,
            (33, 30),
            ROW,
            "gather: x (33, 30) is not a whole number of 32x32 blocks of MXFP8_32x32; "
            "pad the rows to 64 and the columns to 32",
        ),
        (
            formats.NVFP4,
            (17, 32),
            COL,
            "gather: x (17, 32) is not a whole number of 16x1 blocks of NVFP4; pad the rows to 32",
        ),
        (
            ROW_SCALED,
            (16, 16),
            COL,
            "gather: x (NVFP4[global_scale=row]) has one scale per row, so it has no columnwise plane; "
            "pass Usage.ROWWISE",
        ),
        (
            formats.FP8_E4M3,
            (2, 2),
            Usage.BOTH,
            "gather: usage (Usage.BOTH) selects both planes; pass Usage.ROWWISE or Usage.COLUMNWISE",
        ),
    ],
    ids=str,
)
def test_illegal_shapes(fmt, shape, usage, error):
    with pytest.raises(ValueError, match="gather") as raised:
        plane(fmt, shape, usage, op="gather")
    assert str(raised.value) == error


@pytest.mark.parametrize(
    ("scale_shape", "block_rows", "tiles"),
    [((128, 4), 1, (1, 1)), ((129, 5), 1, (2, 2)), ((0, 4), 1, (0, 1)), ((5, 3), 32, (2, 1)), ((2, 65, 4), 1, (2, 1))],
)
def test_shape_of_swizzled_scales(scale_shape, block_rows, tiles):
    swizzled = reference.swizzle_scale(np.zeros(scale_shape, np.uint8), block_rows=block_rows)
    assert swizzled.shape == (*tiles, 32, 4, 4)
