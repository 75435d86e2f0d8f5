"""Scales in the tiled order that block-scaled GEMMs read."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from qshard.layout import matrix_shape
from qshard.reference._elements import Codes


def swizzle_scale(scale_inv: ArrayLike, *, block_rows: int = 1) -> Codes:
    """Tile one-byte scales: `[rows / block_rows, blocks]` to `[tile_rows, tile_cols, 32, 4, 4]`, zero padded.

    The scale of row `i`, block `j` goes to byte

        (i // 128 * tile_cols + j // 4) * 512 + i % 32 * 16 + i % 128 // 32 * 4 + j % 4

    Args:
      scale_inv: uint8 scales of a rowwise or transposed plane. For a columnwise plane that is not transposed (MXFP8
        32x1), pass `scale_inv.T`.
      block_rows: rows that share a scale; each gets a copy.

    >>> tiles = swizzle_scale(np.arange(256).reshape(64, 4) % 256)
    >>> tiles.reshape(-1)[:8]
    array([  0,   1,   2,   3, 128, 129, 130, 131], dtype=uint8)

    Sources: cuBLAS documentation, "1D Block Scaling Factors Layout".
    """
    scales = np.asarray(scale_inv, np.uint8)
    rows = np.repeat(scales.reshape(matrix_shape(scales.shape)), block_rows, axis=0)
    tile_rows, tile_cols = -(-rows.shape[0] // 128), -(-rows.shape[1] // 4)
    padded = np.zeros((tile_rows * 128, tile_cols * 4), np.uint8)
    padded[: rows.shape[0], : rows.shape[1]] = rows
    return np.ascontiguousarray(padded.reshape(tile_rows, 4, 32, tile_cols, 4).transpose(0, 3, 2, 1, 4))
