"""Tiled scales: every byte at its index, zeros elsewhere."""

import numpy as np
import pytest

from qshard import reference
from support.awkward import assert_bits_equal


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (130, 9), (33, 3), (0, 4)])
@pytest.mark.parametrize("block_rows", [1, 16])
def test_every_scale_is_at_its_index(shape, block_rows):
    scales = np.random.default_rng(0).integers(1, 256, size=shape, dtype=np.uint8)
    tiles = reference.swizzle_scale(scales, block_rows=block_rows)
    rows, blocks = shape[0] * block_rows, shape[1]
    tile_rows, tile_cols = -(-rows // 128), -(-blocks // 4)
    expected = np.zeros(tile_rows * tile_cols * 512, np.uint8)
    for i in range(rows):
        for j in range(blocks):
            at = (i // 128 * tile_cols + j // 4) * 512 + i % 32 * 16 + i % 128 // 32 * 4 + j % 4
            expected[at] = scales[i // block_rows, j]
    assert_bits_equal(tiles.reshape(-1), expected)


def test_leading_axes_are_rows():
    scales = np.arange(2 * 70 * 4, dtype=np.uint16).astype(np.uint8).reshape(2, 70, 4)
    assert_bits_equal(reference.swizzle_scale(scales), reference.swizzle_scale(scales.reshape(140, 4)))
