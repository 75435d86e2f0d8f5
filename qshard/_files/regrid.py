"""Change of the blocks of a quantized tensor, if every element keeps its scale.

Engines store one scale a row where qshard shares one between 16, 32 or all rows. If those rows have equal scales, their
codes are also codes of the format with larger blocks, and no value changes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qshard._core.quantize_steps import Plane
from qshard._core.serialization import Description
from qshard.formats import Format, Usage
from qshard.layout import matrix_shape, plane


def regrid(parts: Plane, what: Description, fmt: Format) -> tuple[Plane, Format] | None:
    """Return a rowwise plane of NumPy arrays as a plane of another format with the same values, or None.

    - `parts`: codes and one-byte scales as uint8, of a tensor `what`.
    - `fmt`: the other format. Options that only affect casts do not matter, except that the returned format has
      `pow2=False` if the scales are not powers of two.

    None: the formats differ in more than their blocks, or scales within a block of `fmt` differ.

    >>> from qshard.formats import FP8_128x128, FP8_E4M3
    >>> what = Description(format=FP8_E4M3, shape=(256, 128), dtype="bfloat16", planes=(Usage.ROWWISE,))
    >>> codes = Plane(np.zeros((256, 128), np.uint8), np.float32(3))
    >>> found, fmt = regrid(codes, what, FP8_128x128)
    >>> found.scale_inv.tolist(), str(fmt)
    ([[3.0], [3.0]], 'FP8_128x128[pow2=False]')
    """
    own = what.format
    if (own.element, own.scaling.dtype, own.row_scaled) != (fmt.element, fmt.scaling.dtype, fmt.row_scaled):
        return None
    try:
        target = plane(fmt, what.shape, Usage.ROWWISE)
    except ValueError:
        return None
    source, rows_and_cols = plane(own, what.shape, Usage.ROWWISE), matrix_shape(what.shape)
    grid = parts.scale_inv.reshape(matrix_shape(source.scale_shape))
    blocks = source.scaled_shape, target.scaled_shape
    starts = [_starts(size, *pair) for size, pair in zip(rows_and_cols, zip(*blocks, strict=True), strict=True)]
    every = _at(grid, starts, blocks[0])
    first = [np.arange(0, size, block) for size, block in zip(rows_and_cols, blocks[1], strict=True)]
    scale = _at(grid, first, blocks[0])
    if _at(scale, starts, blocks[1]).tobytes() != every.tobytes():
        return None
    if fmt.power_scales and scale.dtype == np.float32 and np.any(np.frexp(scale)[0] != 0.5):
        fmt = fmt.with_options(pow2=False)
    return parts._replace(scale_inv=np.ascontiguousarray(scale).reshape(target.scale_shape)), fmt


def _starts(size: int, one: int, other: int) -> NDArray[np.int64]:
    """Return the indices at which a block of either size begins."""
    return np.union1d(np.arange(0, size, one), np.arange(0, size, other))


def _at(grid: NDArray[Any], at: list[NDArray[np.int64]], block: tuple[int, int]) -> NDArray[Any]:
    """Return the scales of the elements at the product of row and column indices."""
    found: NDArray[Any] = grid[np.ix_(at[0] // block[0], at[1] // block[1])]
    return found
