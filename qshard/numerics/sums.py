"""Sums over the elements of a plane, tile by tile, on several threads.

A tile fits in cache and has whole blocks, or lies in one. Which tiles there are follows from the shape alone, and their
sums are added in one order, so results do not depend on the number of threads.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qshard import num_threads, pipeline
from qshard.formats import Format
from qshard.layout import PlaneLayout
from qshard.pipeline import Plane

TILE = (128, 256)
"""Rows and columns: 32 K elements, whose float64 are a part of an L2 cache. A narrow matrix has longer tiles."""
SIZE = TILE[0] * TILE[1]
TILES_OF_A_JOB = 16
LEAST = -149
"""The exponent of the smallest float32."""
EXPONENTS = 128 - LEAST
_POOLS = itertools.count()

Advance = Callable[[int], None]
Tile = tuple[slice, slice]
"""Rows and columns of the matrix as it is stored."""


@dataclass
class Sums:
    """What `Stats` is made of. Arrays are by exponent, from `LEAST` up.

    Attributes:
      signal, noise: sums of `x**2` and of `(value - x)**2` over the elements that count: both finite and `x` not 0.
      largest: the largest relative error.
      errors, counts: sums of relative errors, and numbers of elements.
      zeros_made, saturated, subnormal, nonfinite_given, nonfinite_made: numbers of elements.
      elements: number of all.
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

    def __iadd__(self, other: Sums) -> Sums:
        largest = max(self.largest, other.largest)
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        self.largest = largest
        return self


@dataclass(frozen=True)
class Compared:
    """A matrix and one plane of it.

    Attributes:
      ops: those that the plane was made with.
      x: the matrix.
      parts, format, where: the plane, what it is in, and how it is laid out.
      scales: what the elements of each block are multiplied by.
    """

    ops: Any
    x: NDArray[Any]
    parts: Plane
    format: Format
    where: PlaneLayout
    scales: NDArray[np.float32]

    def sums(self, advance: Advance) -> Sums:
        """Those of all elements. `advance` is told of elements as they are done, on the calling thread."""
        shape = self.x.shape[::-1] if self.where.transposed else self.x.shape
        block = self.where.block or shape
        steps = [SIZE // max(min(other, size), 1) for other, size in zip(shape[::-1], TILE[::-1], strict=True)]
        tiles = list(itertools.product(*map(cuts, shape, block, steps)))
        jobs = [tiles[i : i + TILES_OF_A_JOB] for i in range(0, len(tiles), TILES_OF_A_JOB)]
        total = Sums()
        for part in _in_order(self._job, jobs):
            total += part
            advance(part.elements)
        return total

    @np.errstate(all="ignore")  # Of the thread that runs it.
    def _job(self, tiles: list[Tile]) -> Sums:
        total = Sums()
        for tile in tiles:
            total += self._tile(tile)
        return total

    def _tile(self, tile: Tile) -> Sums:
        rows, cols = tile
        given = np.ascontiguousarray(self.x[cols, rows].T if self.where.transposed else self.x[tile], np.float32)
        part = self._part(tile)
        value = pipeline.dequantize(self.ops, part, self.format, self.where.usage, "float32")
        codes = _magnitudes(part.data, self.format)
        nonzero, finite, counted = given != 0, np.isfinite(given), np.isfinite(value)
        counted &= finite
        nonfinite = given.size - _count(finite)
        total = Sums(
            elements=given.size,
            zeros_made=_count(nonzero & (value == 0)),
            subnormal=_count(codes - np.uint8(1) < 2**self.format.element.mantissa_bits - 1),  # 0 - 1 is 255.
            saturated=self._saturated(given, codes, tile),
            nonfinite_given=nonfinite,
            nonfinite_made=given.size - nonfinite - _count(counted),
        )
        counted &= nonzero  # A zero stays zero, so it adds nothing to any sum.
        if not counted.all():
            given, value = given[counted], value[counted]
        if given.size:
            _add_errors(total, given.reshape(-1), value.reshape(-1))
        return total

    def _part(self, tile: Tile) -> Plane:
        """A tile of the plane."""
        (rows, cols), (data, scale_inv, whole) = tile, self.parts
        per, block = self.format.element.codes_per_byte, self.where.block
        if block is not None:
            blocks = tuple(
                slice(cut.start // size, -(-cut.stop // size)) for cut, size in zip(tile, block, strict=True)
            )
            scale_inv = np.ascontiguousarray(scale_inv[blocks])
        if whole is not None and self.where.row_scaled:
            whole = whole[rows]
        return Plane(np.ascontiguousarray(data[rows, cols.start // per : cols.stop // per]), scale_inv, whole)

    def _saturated(self, given: NDArray[np.float32], codes: NDArray[np.uint8], tile: Tile) -> int:
        """How many elements are too large for their scale. Only what is stored as the largest can be."""
        element, block = self.format.element, self.where.block
        largest = np.flatnonzero(codes == element.max_code)
        step = 2.0 ** (element.max_exponent - element.mantissa_bits)
        scale: NDArray[Any] = self.scales
        if block is not None:
            row, col = np.divmod(largest, given.shape[1])
            scale = scale[(row + tile[0].start) // block[0], (col + tile[1].start) // block[1]]
        scale = scale.astype(np.float64)
        size = np.abs(given.reshape(-1)[largest]).astype(np.float64)
        return _count((scale > 0) & (size > (element.max + step / 2) * scale))


def cuts(size: int, block: int, step: int) -> list[slice]:
    """An axis in runs of about `step` elements: of whole blocks, or of parts of one block where blocks are longer.

    >>> cuts(70, 16, 40), cuts(70, 50, 40)
    ([slice(0, 32, None), slice(32, 64, None), slice(64, 70, None)], \
[slice(0, 40, None), slice(40, 50, None), slice(50, 70, None)])
    """
    unit = max(step // max(block, 1), 1) * block
    starts = [i for first in range(0, size, max(unit, 1)) for i in range(first, min(first + unit, size), step)]
    return [slice(start, stop) for start, stop in itertools.pairwise([*starts, size])]


def exponents(x: NDArray[np.float32]) -> NDArray[np.int32]:
    """floor(log2 x) - LEAST of positive, finite `x`."""
    field_of = x.view(np.int32) >> 23
    found = field_of + (-127 - LEAST)
    if x.size and not field_of.min():
        subnormal = np.flatnonzero(field_of == 0)
        found[subnormal] = np.frexp(x[subnormal])[1] - 1 - LEAST
    return found


def exponent_counts(x: NDArray[np.float32]) -> dict[int, int]:
    """`floor(log2 x)` -> how many, of the positive and finite numbers among `x`."""
    counts, flat = np.zeros(EXPONENTS, np.int64), x.reshape(-1)
    for first in range(0, flat.size, SIZE):
        part = flat[first : first + SIZE]
        counts += np.bincount(exponents(part[np.isfinite(part) & (part > 0)]), minlength=EXPONENTS)
    return {i + LEAST: int(counts[i]) for i in np.flatnonzero(counts).tolist()}


def _in_order(run: Callable[[Any], Sums], jobs: list[Any]) -> Iterator[Sums]:
    """The results of all jobs. Ctrl-C, or an error, waits for those that run, and starts no other."""
    threads = min(num_threads(), len(jobs))
    if threads <= 1:
        yield from map(run, jobs)
        return
    name = f"qshard.numerics.{next(_POOLS)}"
    pool = ThreadPoolExecutor(threads, name)
    try:
        yield from pool.map(run, jobs)
    finally:
        try:
            pool.shutdown(cancel_futures=True)
        finally:  # If Ctrl-C comes as a thread starts or ends, the pool forgets it.
            for thread in threading.enumerate():
                if thread.name.startswith(f"{name}_") and thread.is_alive():
                    thread.join()


def _magnitudes(data: NDArray[np.uint8], fmt: Format) -> NDArray[np.uint8]:
    """Codes without their signs, one a byte."""
    if fmt.element.codes_per_byte > 1:
        codes = np.empty((*data.shape, 2), np.uint8)
        codes[..., 0], codes[..., 1] = data, data >> 4
        data = codes.reshape(data.shape[0], -1)
    return data & np.uint8(2 ** (fmt.element.bits - 1) - 1)


def _add_errors(total: Sums, given: NDArray[np.float32], value: NDArray[np.float32]) -> None:
    """Sums of finite elements that are not 0."""
    error = np.subtract(value, given, dtype=np.float64)
    np.abs(error, out=error)
    given = np.abs(given)
    size = given.astype(np.float64)
    # No BLAS, whose sums depend on its threads.
    total.signal, total.noise = float(np.einsum("i,i", size, size)), float(np.einsum("i,i", error, error))
    np.divide(error, size, out=error)
    total.largest = float(error.max())
    exponent = exponents(given)
    total.errors += np.bincount(exponent, error, EXPONENTS)
    total.counts += np.bincount(exponent, minlength=EXPONENTS)


def _count(mask: NDArray[np.bool_]) -> int:
    return int(np.count_nonzero(mask))
