"""Quantization of the local rectangles of an array, with the bits of the whole array's planes.

Amaxes that several shards share are reduced before any shard is cast: amaxes of the tensor or of rows, and amaxes of
blocks that a shard boundary splits. Partial blocks use the algorithm of `qshard._core.placement`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qshard._core import quantize_steps
from qshard._core.placement import Box, quantize_boxes, raise_to
from qshard._core.quantize_steps import Philox
from qshard._core.validation import uint32_pair
from qshard.formats import Format, Usage
from qshard.layout import PlaneLayout, matrix_shape, plane, source
from qshard.numerics import _kernels as kernels
from qshard.numerics._arrays import LocalBox, ShardedArray, check_shards, splits_blocks
from qshard.numerics._reductions import Comparison

Array = NDArray[Any]


def compare_shards(x: ShardedArray, fmt: Format, usage: Usage, seed: int, op: str) -> Iterator[Comparison]:
    """Yield each local rectangle with its plane. Amaxes are reduced before the first rectangle is yielded."""
    where = plane(fmt, x.shape, usage, op=op)
    check_shards(where, x, op)
    key = kernels.philox(op, seed).seed if fmt.stochastic else None
    is_one, stored, matrix = x.is_one, source(fmt, usage), matrix_shape(x.shape)  # rowwise if both planes are alike
    rectangles = [(np.ascontiguousarray(array), box) for array, box in x.rectangles]
    if where.rotated:
        plain = fmt.with_options(hadamard=False)
        rectangles = [(quantize_steps.rotate(kernels.ops, array, fmt), box) for array, box in rectangles]
    else:
        plain = fmt
    whole = None if is_one else _reduced_amax(x, rectangles, plain)
    layout = plane(plain, matrix, stored)
    if not is_one and splits_blocks(layout, x):
        yield from _compare_partial_blocks(x, rectangles, layout, whole, key)
        return
    block, shared = plain.block_shape(stored), not is_one and plain.per_tensor
    for array, box in rectangles:
        first_row, first_column = box.start
        own = whole if whole is None or not whole.ndim else whole[first_row : first_row + len(array)]
        merged = None if own is None else functools.partial(lambda reduced, amax: reduced, own)  # reduced already
        philox = _philox(key, box)
        parts = quantize_steps.quantize(kernels.ops, array, plain, stored, reduce_max=merged, philox=philox)[stored]
        scales, of_rectangle = kernels.block_scales(parts, plain), plane(plain, array.shape, stored)
        row, column = first_row // block[0], first_column // block[1]
        first = (column, row) if layout.transposed else (row, column)
        yield Comparison(kernels.ops, array, parts, plain, of_rectangle, scales, first, None, shared)


def _reduced_amax(x: ShardedArray, rectangles: list[LocalBox], fmt: Format) -> NDArray[np.float32] | None:
    """Compute the reduced amax of the tensor or of its rows, or return None if the format has no such scale."""
    if not (fmt.tensor_scaled or fmt.row_scaled):
        return None
    whole = np.zeros(matrix_shape(x.shape)[0] if fmt.row_scaled else (), np.float32)
    for array, box in rectangles:
        found = quantize_steps.global_amax(kernels.ops, array, fmt)
        raise_to(np, whole[box.start[0] : box.stop[0]] if fmt.row_scaled else whole, found)
    return x.maximum(whole)


def _compare_partial_blocks(
    x: ShardedArray,
    rectangles: list[LocalBox],
    layout: PlaneLayout,
    whole: NDArray[np.float32] | None,
    key: Array | None,
) -> Iterator[Comparison]:
    """Implement `compare_shards` for shards that split blocks. Matrices are in plane order: `x` or `x.T`."""
    fmt, block, transposed = layout.format, layout.block, layout.transposed
    assert block is not None
    boxes = [box.transposed if transposed else box for _, box in rectangles]

    def shards() -> Iterator[tuple[Array, Box]]:
        for (array, _), box in zip(rectangles, boxes, strict=True):
            yield np.ascontiguousarray(array.T if transposed else array), box

    def philox(outer: Box) -> Philox | None:
        return _philox(key, outer.transposed if transposed else outer, transposed)

    amaxes = np.zeros(layout.scale_shape, np.float32)
    planes = quantize_boxes(kernels.ops, shards, fmt, block, amaxes, x.maximum, whole=whole, philox=philox)
    for box, (values, outer, parts) in zip(boxes, planes, strict=True):
        given = values.T if transposed else values
        of_rectangle = plane(fmt, given.shape, layout.usage)
        first, own = [blocks.start for blocks in outer.blocks(block)], box.within(outer)
        scales = kernels.block_scales(parts, fmt)
        yield Comparison(kernels.ops, given, parts, fmt, of_rectangle, scales, (first[0], first[1]), (own[0], own[1]))


def _philox(key: Array | None, box: Box, of_transpose: bool = False) -> Philox | None:
    """Return the Philox key and offset of a box of the matrix, or of its transpose."""
    if key is None:
        return None
    philox = box.philox(key, lambda offset: np.array(uint32_pair("stats: offset", offset), np.uint32))
    return philox.transposed(box.size[0]) if of_transpose else philox
