"""The planes of the pieces of an array: the bits that the whole array has there.

What several pieces share is reduced before any is cast: the amax of the tensor or of its rows, and those of blocks that
pieces cut. Such a piece gets zeros around it, up to whole blocks, which change no amax.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qshard._core import quantize_steps
from qshard._core.flat_shards import word_pair
from qshard._core.quantize_steps import Draws, Plane
from qshard.formats import Format, Usage
from qshard.layout import PlaneLayout, matrix_shape, plane, source
from qshard.numerics import _kernels as kernels
from qshard.numerics._arrays import Piece, Whole
from qshard.numerics._cuts import are_blocks_cut, check_pieces
from qshard.numerics._sums import Compared, Tile

Array = NDArray[Any]


def compared(x: Whole, fmt: Format, usage: Usage, seed: int, op: str) -> Iterator[Compared]:
    """Each piece beside its plane, one after the other. Amaxes are reduced before the first comes."""
    where = plane(fmt, x.shape, usage, op=op)
    check_pieces(where, x, op)
    draws = kernels.draws(op, seed) if fmt.stochastic else None
    is_one, stored, matrix = x.is_one, source(fmt, usage), matrix_shape(x.shape)  # Of two planes alike, the rowwise.
    pieces = [Piece(np.ascontiguousarray(piece.array), piece.at) for piece in x.pieces]
    if where.rotated:
        plain = fmt.with_options(hadamard=False)
        pieces = [Piece(quantize_steps.rotated(kernels.ops, piece.array, fmt), piece.at) for piece in pieces]
    else:
        plain = fmt
    whole = None if is_one else _amax_of_all(x, pieces, plain)
    layout = plane(plain, matrix, stored)
    if not is_one and are_blocks_cut(layout, x):
        yield from _cut(x, pieces, layout, whole, draws)
        return
    block, shared = layout.block, not is_one and layout.block is None
    for array, at in pieces:
        merged = None if whole is None else functools.partial(_given, _of_rows(whole, at[0], len(array)))
        place = _draws_at(draws, at, matrix)
        parts = quantize_steps.quantize(kernels.ops, array, plain, stored, reduce_max=merged, draws=place)[stored]
        scales, of_piece = kernels.block_scales(parts, plain), plane(plain, array.shape, stored)
        row, column = _stored(layout, at)
        first = at if block is None else (row // block[0], column // block[1])
        yield Compared(kernels.ops, array, parts, plain, of_piece, scales, first, None, shared)


def _given(amax: NDArray[np.float32], own: Any) -> NDArray[np.float32]:
    """In the place of a reduction: that has been made."""
    return amax


def _amax_of_all(x: Whole, pieces: list[Piece], fmt: Format) -> NDArray[np.float32] | None:
    """What scales of the whole, or of its rows, are made of; None if the format has none."""
    by_row = fmt.scaling.global_scale == "row"
    if fmt.block is not None and fmt.scaling.global_scale is None:
        return None
    whole = np.zeros(matrix_shape(x.shape)[0] if by_row else (), np.float32)
    for array, (row, _) in pieces:
        found = quantize_steps.global_amax(kernels.ops, array, fmt)
        _raise_to(whole[row : row + len(array)] if by_row else whole, found)
    return x.maximum(whole)


def _cut(
    x: Whole, pieces: list[Piece], layout: PlaneLayout, whole: NDArray[np.float32] | None, draws: Draws | None
) -> Iterator[Compared]:
    """`compared` where pieces cut blocks. All is in the order in which the plane is stored, `x` or `x.T`."""
    fmt, block = layout.format, layout.block
    assert block is not None
    shape = _stored(layout, matrix_shape(x.shape))
    amaxes = np.zeros(tuple(-(-size // length) for size, length in zip(shape, block, strict=True)), np.float32)
    for piece in pieces:
        matrix, blocks, _ = _padded(piece, layout, shape)
        _raise_to(amaxes[blocks], quantize_steps.block_amax(kernels.ops, matrix, block))
    amaxes = x.maximum(amaxes)
    for piece in pieces:
        matrix, blocks, own = _padded(piece, layout, shape)
        first = blocks[0].start * block[0], blocks[1].start * block[1]
        of_rows = None if whole is None else _of_rows(whole, first[0], len(matrix))
        made = quantize_steps.scales(kernels.ops, fmt, np.ascontiguousarray(amaxes[blocks]), of_rows)
        place = _draws_at(draws, _stored(layout, first), matrix_shape(x.shape))
        if place is not None and layout.transposed:
            place = place.transposed(shape[1])
        data = quantize_steps.cast(kernels.ops, matrix, fmt, made.scale, block, place)
        parts = Plane(data, made.scale_inv, made.global_scale_inv)
        given = matrix.T if layout.transposed else matrix
        of_piece = plane(fmt, given.shape, layout.usage)
        grid = blocks[0].start, blocks[1].start
        yield Compared(kernels.ops, given, parts, fmt, of_piece, kernels.block_scales(parts, fmt), grid, own)


def _padded(piece: Piece, layout: PlaneLayout, shape: tuple[int, int]) -> tuple[Array, Tile, Tile]:
    """A piece with zeros around it, up to whole blocks or the end; which blocks these are; where in them it is."""
    assert layout.block is not None
    array, at = (piece.array.T if layout.transposed else piece.array), _stored(layout, piece.at)
    blocks, own, around = [], [], []
    for first, size, length, end in zip(at, array.shape, layout.block, shape, strict=True):
        begin, stop = first // length, -(-(first + size) // length)
        before = first - begin * length
        blocks.append(slice(begin, stop))
        own.append(slice(before, before + size))
        around.append((before, min(stop * length, end) - first - size))
    return np.ascontiguousarray(np.pad(array, around)), (blocks[0], blocks[1]), (own[0], own[1])


def _stored(layout: PlaneLayout, pair: tuple[int, int]) -> tuple[int, int]:
    """Row and column of `x` as those of the matrix that is stored, or back."""
    return pair[::-1] if layout.transposed else pair


def _of_rows(whole: NDArray[np.float32], first: int, rows: int) -> NDArray[np.float32]:
    return whole[first : first + rows] if whole.ndim else whole


def _draws_at(draws: Draws | None, at: tuple[int, int], matrix: tuple[int, int]) -> Draws | None:
    """The random numbers of a piece, by its place in the whole."""
    if draws is None:
        return None
    first = np.array(word_pair("stats: first", at[0] * matrix[1] + at[1]), np.uint32)
    return Draws(draws.seed, first, matrix[1])


def _raise_to(amaxes: NDArray[np.float32], other: Any) -> None:
    """The maximum of both, in place, with NaN above infinity."""
    bits = amaxes.view(np.int32)
    np.maximum(bits, np.asarray(other, np.float32).view(np.int32), out=bits)
