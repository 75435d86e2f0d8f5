"""Multithreaded reductions over the elements of a plane, tile by tile.

A tile fits in cache and either has whole blocks or lies within one block. Tiles depend only on the shape, and their
sums are added in a fixed order, so results do not depend on the number of threads.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from qshard import num_threads
from qshard._core import quantize_steps
from qshard._core.quantize_steps import Plane
from qshard.formats import Format
from qshard.layout import PlaneLayout

TILE = (128, 256)
"""Rows and columns of a tile: 32 K elements, which fit in L2 cache as float64. Tiles of narrow matrices are longer."""
SIZE = TILE[0] * TILE[1]
TILES_OF_A_JOB = 16
LEAST = -149  # exponent of the smallest float32
EXPONENTS = 128 - LEAST

Advance = Callable[[int], None]
Block = tuple[int, int]  # row and column of a block in the grid of `scale_inv`
Tile = tuple[slice, slice]  # rows and columns of the stored matrix


@dataclass(frozen=True)
class Floats:
    """An array in a dtype that kernels accept, and the number of its elements that were out of range of float32."""

    array: NDArray[Any]
    beyond: int = 0

    @property
    def dtype(self) -> str:
        return str(self.array.dtype)


@np.errstate(all="ignore")
def as_float(x: Any, op: str) -> Floats:
    """Convert an array to float32, bfloat16 or float16 in NumPy. Host arrays of these dtypes are not copied."""
    if hasattr(x, "detach"):  # torch
        x = _torch_to_numpy(x.detach().cpu())
    if np.ma.is_masked(x):
        raise TypeError(
            f"{op}: x (masked array) has masked elements, which would count; pass x.filled(0) or x.compressed()"
        )
    array = np.from_dlpack(x) if hasattr(x, "__dlpack__") and not hasattr(x, "__array__") else np.asarray(x)
    if array.dtype.kind in "cOSUMm" or array.dtype.names:
        advice = "its real and imaginary parts separately" if array.dtype.kind == "c" else "an array of a float dtype"
        raise TypeError(f"{op}: x ({array.dtype}) is not an array of real numbers; pass {advice}")
    if array.dtype.name in ("float32", "bfloat16", "float16") and array.dtype.isnative:
        return Floats(array)
    narrow = array.astype(np.float32)
    if array.dtype.kind != "f" or array.dtype.itemsize <= 4:
        return Floats(narrow)
    return Floats(
        narrow, int(np.count_nonzero((np.isinf(narrow) & np.isfinite(array)) | ((narrow == 0) & (array != 0))))
    )


def _torch_to_numpy(x: Any) -> Any:
    """Convert a torch tensor to NumPy. bfloat16 shares memory; narrower dtypes become float32, which is exact."""
    torch = sys.modules["torch"]
    if x.dtype == torch.bfloat16:
        return x.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy() if x.dtype in (torch.float16, torch.float64) or not x.is_floating_point() else x.float().numpy()


class WorstBlock(NamedTuple):
    """A block and its noise-to-signal ratio."""

    ratio: float
    block: Block


@dataclass
class Sums:
    """Sums from which `Stats` is computed; counts have the names of its shares. Index 0 of arrays is exponent `LEAST`.

    An element counts if it and its quantized value are finite and it is not 0.

    Attributes:
      largest: largest relative error.
      errors: sums of relative errors by exponent.
      counts: numbers of elements that count, by exponent.
      worst: the whole block with the largest noise-to-signal ratio; among equal blocks the first.
      parts: signal and noise so far of blocks that are longer than a tile or shared with other rectangles.
    """

    signal: float = 0.0
    noise: float = 0.0
    largest: float = 0.0
    errors: NDArray[np.float64] = field(default_factory=lambda: np.zeros(EXPONENTS))
    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(EXPONENTS, np.int64))
    zeros_made: int = 0
    saturated: int = 0
    subnormal: int = 0
    nonfinite_given: int = 0
    nonfinite_made: int = 0
    elements: int = 0
    worst: WorstBlock | None = None
    parts: dict[Block, tuple[float, float]] = field(default_factory=dict)

    def __iadd__(self, other: Sums) -> Sums:
        largest, worst, parts = max(self.largest, other.largest), _worse(self.worst, other.worst), self.parts
        for block, (signal, noise) in other.parts.items():
            before = parts.get(block, (0.0, 0.0))
            parts[block] = before[0] + signal, before[1] + noise
        for name in vars(other).keys() - {"largest", "worst", "parts"}:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.largest, self.worst = largest, worst
        return self

    @property
    def error_by_exponent(self) -> dict[int, float]:
        """Mean relative errors by exponent."""
        found = np.flatnonzero(self.counts).tolist()
        return {i + LEAST: float(self.errors[i] / self.counts[i]) for i in found}

    @property
    def worst_block(self) -> WorstBlock | None:
        """The worst block, including the blocks of `parts`."""
        worst = self.worst
        for block, (signal, noise) in self.parts.items():
            worst = _worse(worst, WorstBlock(noise / signal, block) if signal else None)
        return worst


@dataclass(frozen=True)
class Comparison:
    """A matrix and one quantized plane of it.

    Attributes:
      scales: fp32 decode scale of each block.
      first: grid position of the first block in the whole tensor; without blocks, position of the first element.
      own: region of the stored matrix to measure, if it is surrounded by zero padding; None: all of it.
      shared: whether other rectangles have parts of its only block.
    """

    ops: Any
    x: NDArray[Any]
    parts: Plane
    format: Format
    where: PlaneLayout
    scales: NDArray[np.float32]
    first: Block = (0, 0)
    own: Tile | None = None
    shared: bool = False

    @property
    def starting_scales(self) -> NDArray[np.float32]:
        """Scales of the blocks that start in this rectangle, so that all rectangles together count each block once."""
        if self.own is None:
            return self.scales if self.first == (0, 0) or not self.shared else self.scales.reshape(-1)[:0]
        assert self.where.block is not None
        rows, columns = (-(-own.start // length) for own, length in zip(self.own, self.where.block, strict=True))
        return self.scales.reshape(-(-self._stored_shape[0] // self.where.block[0]), -1)[rows:, columns:]

    def sums(self, advance: Advance) -> Sums:
        """Compute the sums over all elements. Calls `advance` on the calling thread with the number of new elements."""
        shape, block = self._stored_shape, self.where.scaled_shape
        steps = [SIZE // max(min(other, size), 1) for other, size in zip(shape[::-1], TILE[::-1], strict=True)]
        tiles = list(itertools.product(*map(split_axis, shape, block, steps)))
        jobs = [tiles[i : i + TILES_OF_A_JOB] for i in range(0, len(tiles), TILES_OF_A_JOB)]
        total = Sums()
        for part in _map_in_order(self._job, jobs):
            total += part
            advance(part.elements)
        return total

    @property
    def _stored_shape(self) -> tuple[int, int]:
        rows, cols = self.x.shape
        return (cols, rows) if self.where.transposed else (rows, cols)

    @np.errstate(all="ignore")  # numpy keeps the error state per thread
    def _job(self, tiles: list[Tile]) -> Sums:
        total = Sums()
        for tile in tiles:
            total += self._tile(tile)
        return total

    def _tile(self, tile: Tile) -> Sums:
        rows, cols = tile
        given = np.ascontiguousarray(self.x[cols, rows].T if self.where.transposed else self.x[tile], np.float32)
        part = self.part(tile)
        value = quantize_steps.dequantize(self.ops, part, self.format, self.where.usage, "float32")
        codes = magnitudes(part.data, self.format)
        nonzero, finite, counted = given != 0, np.isfinite(given), np.isfinite(value)
        counted &= finite
        ours = self._measured(tile)
        size = given[ours].size  # zero padding causes no error unless its scale is NaN
        nonfinite = given.size - _count(finite)
        total = Sums(
            elements=size,
            zeros_made=_count(nonzero & (value == 0)),
            subnormal=_count(codes - np.uint8(1) < 2**self.format.element.mantissa_bits - 1),  # 0 - 1 wraps to 255
            saturated=self._count_saturated(given, codes, tile),
            nonfinite_given=nonfinite,
            nonfinite_made=size - nonfinite - _count(counted[ours]),
        )
        counted &= nonzero  # a zero stays zero and adds nothing
        self._add_blocks(total, given, value, counted, tile)
        if not counted.all():
            given, value = given[counted], value[counted]
        if given.size:
            _add_errors(total, given.reshape(-1), value.reshape(-1))
        return total

    def _measured(self, tile: Tile) -> Tile:
        if self.own is None:
            return slice(None), slice(None)
        rows, columns = (
            slice(max(own.start - run.start, 0), max(min(own.stop, run.stop) - run.start, 0))
            for own, run in zip(self.own, tile, strict=True)
        )
        return rows, columns

    def _has_others(self, tile: Tile) -> bool:
        """Return whether blocks of a tile have elements in other rectangles."""
        if self.own is None:
            return self.shared
        return any(run.start < own.start or run.stop > own.stop for own, run in zip(self.own, tile, strict=True))

    def part(self, tile: Tile) -> Plane:
        """Return the part of the plane that covers a tile."""
        (rows, cols), (data, scale_inv, whole) = tile, self.parts
        per, block = self.format.element.codes_per_byte, self.where.scaled_shape
        if scale_inv.ndim:
            blocks = tuple(
                slice(run.start // size, -(-run.stop // size)) for run, size in zip(tile, block, strict=True)
            )
            scale_inv = np.ascontiguousarray(scale_inv[blocks])
        if whole is not None and self.format.row_scaled:
            whole = whole[rows]
        return Plane(np.ascontiguousarray(data[rows, cols.start // per : cols.stop // per]), scale_inv, whole)

    def _add_blocks(
        self,
        total: Sums,
        given: NDArray[np.float32],
        value: NDArray[np.float32],
        counted: NDArray[np.bool_],
        tile: Tile,
    ) -> None:
        """Add signal and noise of the blocks of a tile, as parts if blocks extend beyond the tile."""
        size = given.astype(np.float64)
        error = np.subtract(value, size)
        if not counted.all():
            size[~counted] = error[~counted] = 0
        block = self.where.scaled_shape
        row, col = (
            first + run.start // length
            for first, run, length in zip((0, 0) if self.format.per_tensor else self.first, tile, block, strict=True)
        )
        signal, noise = (_block_sums(np.square(part, out=part), block) for part in (size, error))
        ends = zip(tile, block, self._stored_shape, strict=True)
        splits_blocks = any(run.start % length or (run.stop % length and run.stop != end) for run, length, end in ends)
        if splits_blocks or self._has_others(tile):
            for i, j in np.ndindex(signal.shape):
                total.parts[row + i, col + j] = float(signal[i, j]), float(noise[i, j])
            return
        there = signal > 0
        ratio = np.divide(noise, signal, out=np.full_like(noise, -1), where=there)
        if there.any():
            i, j = divmod(int(ratio.argmax()), ratio.shape[1])
            total.worst = WorstBlock(float(ratio[i, j]), (row + i, col + j))

    def _count_saturated(self, given: NDArray[np.float32], codes: NDArray[np.uint8], tile: Tile) -> int:
        """Count the elements that are too large for their scale. All of them are stored as the largest code."""
        element, block = self.format.element, self.where.scaled_shape
        largest = np.flatnonzero(codes == element.max_code)
        step = 2.0 ** (element.max_exponent - element.mantissa_bits)
        scale: NDArray[Any] = self.scales
        if scale.ndim:
            row, col = np.divmod(largest, given.shape[1])
            scale = scale[(row + tile[0].start) // block[0], (col + tile[1].start) // block[1]]
        scale = scale.astype(np.float64)
        size = np.abs(given.reshape(-1)[largest]).astype(np.float64)
        return _count((scale > 0) & (size > (element.max + step / 2) * scale))


def _worse(a: WorstBlock | None, b: WorstBlock | None) -> WorstBlock | None:
    if a is None or b is None:
        return a or b
    return min(a, b, key=lambda each: (-each.ratio, each.block))


def _block_sums(x: NDArray[np.float64], block: tuple[int, int]) -> NDArray[np.float64]:
    """Sum over blocks. The last block of an axis may be shorter."""
    for axis in (1, 0):
        if x.shape[axis] % block[axis]:
            x = np.add.reduceat(x, range(0, x.shape[axis], block[axis]), axis)
        else:
            x = x.reshape(*x.shape[:axis], -1, block[axis], *x.shape[axis + 1 :]).sum(axis + 1)
    return x


def split_axis(size: int, block: int, step: int) -> list[slice]:
    """Split an axis into runs of about `step` elements. A run has whole blocks, or is part of one longer block.

    >>> split_axis(70, 16, 40), split_axis(70, 50, 40)
    ([slice(0, 32, None), slice(32, 64, None), slice(64, 70, None)], \
[slice(0, 40, None), slice(40, 50, None), slice(50, 70, None)])
    """
    unit = max(step // max(block, 1), 1) * block
    starts = [i for first in range(0, size, max(unit, 1)) for i in range(first, min(first + unit, size), step)]
    return [slice(start, stop) for start, stop in itertools.pairwise([*starts, size])]


def exponents(x: NDArray[np.float32]) -> NDArray[np.int32]:
    """Return `floor(log2 x) - LEAST` for positive finite `x`."""
    field_of = x.view(np.int32) >> 23
    found = field_of + (-127 - LEAST)
    if x.size and not field_of.min():
        subnormal = np.flatnonzero(field_of == 0)
        found[subnormal] = np.frexp(x[subnormal])[1] - 1 - LEAST
    return found


def exponent_counts(x: NDArray[np.float32]) -> dict[int, int]:
    """Count the positive finite numbers of `x` by `floor(log2 x)`."""
    counts, flat = np.zeros(EXPONENTS, np.int64), x.reshape(-1)
    for first in range(0, flat.size, SIZE):
        part = flat[first : first + SIZE]
        counts += np.bincount(exponents(part[np.isfinite(part) & (part > 0)]), minlength=EXPONENTS)
    return {i + LEAST: int(counts[i]) for i in np.flatnonzero(counts).tolist()}


def _map_in_order(run: Callable[[Any], Sums], jobs: list[Any]) -> Iterator[Sums]:
    """Yield the results of all jobs in order. On Ctrl-C or an error, `map` cancels jobs that have not begun."""
    threads = min(num_threads(), len(jobs))
    if threads <= 1:
        yield from map(run, jobs)
        return
    with ThreadPoolExecutor(threads, "qshard.numerics") as pool:
        yield from pool.map(run, jobs)


def magnitudes(data: NDArray[np.uint8], fmt: Format) -> NDArray[np.uint8]:
    """Return the codes without their signs, one per byte."""
    if fmt.element.packed:
        codes = np.empty((*data.shape, 2), np.uint8)
        codes[..., 0], codes[..., 1] = data, data >> 4
        data = codes.reshape(data.shape[0], -1)
    return data & np.uint8(2 ** (fmt.element.bits - 1) - 1)


def _add_errors(total: Sums, given: NDArray[np.float32], value: NDArray[np.float32]) -> None:
    error = np.subtract(value, given, dtype=np.float64)
    np.abs(error, out=error)
    given = np.abs(given)
    size = given.astype(np.float64)
    # Not BLAS: its sums depend on its number of threads.
    total.signal, total.noise = float(np.einsum("i,i", size, size)), float(np.einsum("i,i", error, error))
    np.divide(error, size, out=error)
    total.largest = float(error.max())
    exponent = exponents(given)
    total.errors += np.bincount(exponent, error, EXPONENTS)
    total.counts += np.bincount(exponent, minlength=EXPONENTS)


def _count(mask: NDArray[np.bool_]) -> int:
    return int(np.count_nonzero(mask))
