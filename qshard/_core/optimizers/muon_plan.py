"""The plan of Muon: which rank orthogonalizes which matrix, and what ranks send for it.

Newton-Schulz needs whole matrices, and ranks have shards. Each matrix has an owner: ranks send it their parts of the
momentum, it orthogonalizes the matrix once, and sends each rank its part of the result.

    parts of units  ->  ONE all-to-all for a bucket  ->  Newton-Schulz on owners  ->  ONE all-to-all  ->  parts of units

An owner orthogonalizes a unit with one call: a matrix, or some matrices of a stack `[E, N, K]`. A unit is a box of its
parameter, and does not depend on the number of ranks. So it has the same products, and the same bits, wherever it is
computed. Shards are boxes of the parameter, or flat slices: boxes of the flattened parameter.

Sources: Jordan et al., https://kellerjordan.github.io/posts/muon; Liu et al., arXiv:2502.16982; owners of matrices and
all-to-alls: Canzona, arXiv:2602.06079, and microsoft/dion.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from qshard._core.placement import Box, Index
from qshard.layout import Shape

STACK = 8  # matrices of a stack in a unit: part of the definition of bits, because batched products may round otherwise

OWNED_ELEMENTS = 1 << 26  # elements of a bucket for each rank: 128 MiB in bfloat16, many matrices, and few buckets


class UnitPart(NamedTuple):
    """The part of a unit in the shard of one rank.

    Attributes:
      unit: index in the bucket.
      rank: the rank with the shard.
      sends: whether this rank sends the part to the owner. One of the ranks with equal parts does.
      local: the part in the shard.
      whole: the part in the unit; for flat slices, in the flattened unit.
    """

    unit: int
    rank: int
    sends: bool
    local: Index
    whole: Index

    @property
    def shape(self) -> Shape:
        return tuple(part.stop - part.start for part in self.whole)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class MatrixBucket(NamedTuple):
    """Units that are sent together.

    Attributes:
      parameters: indices of the parameters.
      units: the units of these parameters, each with the index of its parameter.
      owners: the rank that orthogonalizes each unit.
      parts: the parts of all units, in order of units.
    """

    parameters: tuple[int, ...]
    units: tuple[tuple[int, Box], ...]
    owners: tuple[int, ...]
    parts: tuple[UnitPart, ...]

    def sent_to_owner(self, rank: int, ranks: int) -> list[list[UnitPart]]:
        """Return the parts that `rank` sends for orthogonalization, for each of the `ranks` that receive them."""
        return [
            [p for p in self.parts if p.sends and p.rank == rank and self.owners[p.unit] == r] for r in range(ranks)
        ]

    def received_by_owner(self, rank: int, ranks: int) -> list[list[UnitPart]]:
        """Return the parts that `rank` orthogonalizes, for each rank that sends them."""
        return [
            [p for p in self.parts if p.sends and p.rank == r and self.owners[p.unit] == rank] for r in range(ranks)
        ]

    def returned_by_owner(self, rank: int, ranks: int) -> list[list[UnitPart]]:
        """Return the parts of results that `rank` sends, for each rank."""
        return [[p for p in self.parts if p.rank == r and self.owners[p.unit] == rank] for r in range(ranks)]

    def returned_to(self, rank: int, ranks: int) -> list[list[UnitPart]]:
        """Return the parts of results that `rank` receives, for each owner."""
        return [[p for p in self.parts if p.rank == rank and self.owners[p.unit] == r] for r in range(ranks)]


def plan_buckets(
    shapes: Sequence[Shape], boxes: Sequence[Sequence[Box]], *, owned_elements: int = OWNED_ELEMENTS
) -> list[MatrixBucket]:
    """Divide the matrices of some parameters over ranks.

    Args:
      shapes: the whole shape of each parameter.
      boxes: for each parameter, the shard of every rank, as boxes of the whole shape or of the flattened parameter.
        Ranks with equal boxes are replicas; other boxes are disjoint.
      owned_elements: elements of a bucket for each rank. One parameter always fits.

    Returns:
      Buckets of consecutive parameters. The most expensive units of a bucket choose their owner first: the rank with
      the least work, among these the one with the largest part of the unit.

    Every rank computes the same plan from the same boxes.

    >>> whole = Box((4, 2), (0, 0), (4, 2))
    >>> rows = [whole._replace(start=(2 * rank, 0), size=(2, 2)) for rank in range(2)]
    >>> [bucket] = plan_buckets([(4, 2)] * 3, [rows] * 3)
    >>> bucket.owners, [part.whole[0] for part in bucket.parts[:2]]
    ((0, 1, 0), [slice(0, 2, None), slice(2, 4, None)])
    >>> [bucket] = plan_buckets([(4, 2)], [[Box((8,), (0,), (3,)), Box((8,), (3,), (5,))]])
    >>> [part.whole for part in bucket.parts]
    [(slice(0, 3, None),), (slice(3, 8, None),)]
    """
    if not boxes:
        return []
    ranks = len(boxes[0])
    groups: list[list[int]] = [[]]
    size = 0
    for i, shape in enumerate(shapes):
        elements = math.prod(shape)
        if groups[-1] and size + elements > owned_elements * ranks:
            groups.append([])
            size = 0
        groups[-1].append(i)
        size += elements
    return [_bucket(group, shapes, boxes) for group in groups]


def _bucket(parameters: Sequence[int], shapes: Sequence[Shape], boxes: Sequence[Sequence[Box]]) -> MatrixBucket:
    units = [(i, unit) for i in parameters for unit in units_of(shapes[i])]
    places = [unit if boxes[i][0].global_shape == shapes[i] else _flat_box(unit) for i, unit in units]
    shared = [[place.intersection(box) for box in boxes[i]] for (i, _), place in zip(units, places, strict=True)]
    sizes = [[math.prod(part.size) for part in of_unit] for of_unit in shared]
    owners = assign_owners([newton_schulz_cost(unit.size) for _, unit in units], sizes)
    parts: list[UnitPart] = []
    for u, ((i, _), of_unit) in enumerate(zip(units, shared, strict=True)):
        for rank, part in enumerate(of_unit):
            if not sizes[u][rank]:
                continue
            copies = [other for other, its in enumerate(of_unit) if its == part]
            sender = owners[u] if owners[u] in copies else copies[owners[u] % len(copies)]
            parts.append(UnitPart(u, rank, rank == sender, part.within(boxes[i][rank]), part.within(places[u])))
    return MatrixBucket(tuple(parameters), tuple(units), tuple(owners), tuple(parts))


def _flat_box(unit: Box) -> Box:
    """Return a unit, which has consecutive elements, as a box of the flattened parameter."""
    return Box((math.prod(unit.global_shape),), (unit.philox_offset(),), (math.prod(unit.size),))


def newton_schulz_cost(shape: Shape) -> int:
    """Return the multiplications of one Newton-Schulz step for `[N, K]` or `[matrices, N, K]`."""
    *lead, n, k = shape
    short, long = sorted((n, k))
    return math.prod(lead) * (2 * short * short * long + short**3)


def assign_owners(costs: Sequence[int], sizes: Sequence[Sequence[int]]) -> list[int]:
    """Return the owner of each unit: the rank with the least work, among these the one with the largest part.

    The most expensive units choose first.

    Args:
      costs: the cost of each unit.
      sizes: for each unit, the elements of its part on each rank.

    >>> assign_owners([1, 3, 1, 1], [[1, 1]] * 4)
    [1, 0, 1, 1]
    """
    owners = [0] * len(costs)
    work = [0] * len(sizes[0]) if sizes else []
    for u in sorted(range(len(costs)), key=lambda u: -costs[u]):
        owners[u] = min(range(len(work)), key=lambda rank: (work[rank], -sizes[u][rank], rank))
        work[owners[u]] += costs[u]
    return owners


def units_of(shape: Shape) -> list[Box]:
    """Return the units of a matrix or a stack.

    >>> [unit.size for unit in units_of((4, 2)) + units_of((10, 4, 2))]
    [(4, 2), (8, 4, 2), (2, 4, 2)]
    """
    if 0 in shape:
        return []
    if len(shape) == 2:
        return [Box(shape, (0, 0), shape)]
    count, n, k = shape
    return [Box(shape, (first, 0, 0), (min(STACK, count - first), n, k)) for first in range(0, count, STACK)]
