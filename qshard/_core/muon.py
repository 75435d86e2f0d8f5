"""Muon in both front ends: its settings, the parameters it updates, and the plan that divides its matrices over ranks.

Newton-Schulz needs whole matrices, and ranks have shards. Each matrix has an owner: ranks send it their parts of the
momentum, it orthogonalizes the matrix once, and sends each rank its part of the result.

    parts of units  ->  ONE all-to-all for a bucket  ->  Newton-Schulz on owners  ->  ONE all-to-all  ->  parts of units

A unit is what an owner orthogonalizes with one call: a matrix, or some matrices of a stack `[E, N, K]`. Units do not
depend on the number of ranks. So a unit has the same products, and the same bits, wherever it is computed.

Sources: Jordan et al., https://kellerjordan.github.io/posts/muon; Liu et al., arXiv:2502.16982; owners of matrices and
all-to-alls: Canzona, arXiv:2602.06079, and microsoft/dion.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Collection, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

from qshard._core.adam import check_setting
from qshard._core.placement import Box, Tile
from qshard._core.validation import closest, join_names, quote
from qshard.layout import Shape

MUON, ADAMW = ALGORITHMS = ("muon", "adamw")

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of `torch.optim.Muon` and optax
STEPS = 5

STACK = 8  # matrices of a stack in a unit: part of the definition of bits, because batched products may round otherwise

OWNED_ELEMENTS = 1 << 26  # elements of a bucket for each rank: 128 MiB in bfloat16, many matrices, and few buckets


_WRAPPERS = ("model", "module", "transformer", "_orig_mod")
"""Parts of names that containers and wrappers add."""


class Unit(NamedTuple):
    """Matrices that are orthogonalized together.

    Attributes:
      parameter: index of the parameter in the plan.
      start: first matrix of a stack; 0 for a matrix.
      shape: `[N, K]`, or `[matrices, N, K]` for a stack.
    """

    parameter: int
    start: int
    shape: Shape

    @property
    def cost(self) -> int:
        """Multiplications of one Newton-Schulz step."""
        *lead, n, k = self.shape
        short, long = sorted((n, k))
        return math.prod(lead) * (2 * short * short * long + short**3)


class Piece(NamedTuple):
    """The part of a unit in the shard of one rank.

    Attributes:
      unit: index in the bucket.
      rank: the rank with the shard.
      sends: whether this rank sends the part to the owner. One of the ranks with equal parts does.
      local: the part in the shard.
      whole: the part in the unit.
    """

    unit: int
    rank: int
    sends: bool
    local: Tile
    whole: Tile

    @property
    def shape(self) -> Shape:
        return tuple(part.stop - part.start for part in self.whole)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class Bucket(NamedTuple):
    """Units that travel together.

    Attributes:
      parameters: indices of the parameters.
      units: the units of these parameters.
      owners: the rank that orthogonalizes each unit.
      pieces: the parts of all units, in order of units.
    """

    parameters: tuple[int, ...]
    units: tuple[Unit, ...]
    owners: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def sent_to_owner(self, rank: int, ranks: int) -> list[list[Piece]]:
        """Return the pieces that `rank` sends for orthogonalization, for each of the `ranks` that receive them."""
        return [
            [p for p in self.pieces if p.sends and p.rank == rank and self.owners[p.unit] == r] for r in range(ranks)
        ]

    def received_by_owner(self, rank: int, ranks: int) -> list[list[Piece]]:
        """Return the pieces that `rank` orthogonalizes, for each rank that sends them."""
        return [
            [p for p in self.pieces if p.sends and p.rank == r and self.owners[p.unit] == rank] for r in range(ranks)
        ]

    def returned_by_owner(self, rank: int, ranks: int) -> list[list[Piece]]:
        """Return the pieces of results that `rank` sends, for each rank."""
        return [[p for p in self.pieces if p.rank == r and self.owners[p.unit] == rank] for r in range(ranks)]

    def returned_to(self, rank: int, ranks: int) -> list[list[Piece]]:
        """Return the pieces of results that `rank` receives, for each owner."""
        return [[p for p in self.pieces if p.rank == rank and self.owners[p.unit] == r] for r in range(ranks)]


def plan_buckets(boxes: Sequence[Sequence[Box]], *, owned_elements: int = OWNED_ELEMENTS) -> list[Bucket]:
    """Divide the matrices of some parameters over ranks.

    Args:
      boxes: for each parameter, the shard of every rank. Ranks with equal boxes are replicas; other boxes are disjoint.
      owned_elements: elements of a bucket for each rank. One parameter always fits.

    Returns:
      Buckets of consecutive parameters. The most expensive units of a bucket choose their owner first: the rank with
      the least work, among these the one with the largest part of the unit.

    Every rank computes the same plan from the same boxes.

    >>> whole = Box((4, 2), (0, 0), (4, 2))
    >>> [bucket] = plan_buckets([[whole._replace(start=(2 * rank, 0), size=(2, 2)) for rank in range(2)]] * 3)
    >>> bucket.owners, [piece.whole[0] for piece in bucket.pieces[:2]]
    ((0, 1, 0), [slice(0, 2, None), slice(2, 4, None)])
    """
    if not boxes:
        return []
    ranks = len(boxes[0])
    groups: list[list[int]] = [[]]
    size = 0
    for i, of_parameter in enumerate(boxes):
        elements = math.prod(of_parameter[0].global_shape)
        if groups[-1] and size + elements > owned_elements * ranks:
            groups.append([])
            size = 0
        groups[-1].append(i)
        size += elements
    return [_bucket(group, boxes, ranks) for group in groups]


def _bucket(parameters: Sequence[int], boxes: Sequence[Sequence[Box]], ranks: int) -> Bucket:
    units = [unit for i in parameters for unit in units_of(i, boxes[i][0].global_shape)]
    parts = [[_part(unit, box) for box in boxes[unit.parameter]] for unit in units]
    work, owners = [0] * ranks, [0] * len(units)
    for u in sorted(range(len(units)), key=lambda u: -units[u].cost):
        sizes = [0 if part is None else part.size for part in parts[u]]
        owners[u] = min(range(ranks), key=lambda rank: (work[rank], -sizes[rank], rank))
        work[owners[u]] += units[u].cost
    pieces: list[Piece] = []
    for u, of_unit in enumerate(parts):
        there = [part._replace(unit=u, rank=rank) for rank, part in enumerate(of_unit) if part is not None]
        for part in there:
            copies = [other.rank for other in there if other.whole == part.whole]
            sender = owners[u] if owners[u] in copies else copies[owners[u] % len(copies)]
            pieces.append(part._replace(sends=part.rank == sender))
    return Bucket(tuple(parameters), tuple(units), tuple(owners), tuple(pieces))


def units_of(parameter: int, shape: Shape) -> list[Unit]:
    """Return the units of a matrix or a stack.

    >>> [unit.shape for unit in units_of(0, (4, 2)) + units_of(1, (10, 4, 2))]
    [(4, 2), (8, 4, 2), (2, 4, 2)]
    """
    if 0 in shape:
        return []
    if len(shape) == 2:
        return [Unit(parameter, 0, tuple(shape))]
    count, n, k = shape
    return [Unit(parameter, first, (min(STACK, count - first), n, k)) for first in range(0, count, STACK)]


def _part(unit: Unit, box: Box) -> Piece | None:
    """Return the part of a unit in a shard, or None if they do not overlap."""
    starts = (unit.start, 0, 0) if len(unit.shape) == 3 else (0, 0)
    local, whole = [], []
    for start, size, first, count in zip(starts, unit.shape, box.start, box.size, strict=True):
        begin, end = max(start, first), min(start + size, first + count)
        if begin >= end:
            return None
        local.append(slice(begin - first, end - first))
        whole.append(slice(begin - start, end - start))
    return Piece(0, 0, False, tuple(local), tuple(whole))


def algorithm_of(op: str, name: str, shape: Shape, rules: Mapping[str, str]) -> str:
    """Return the algorithm of a parameter: of the first pattern of `rules` that fits its name, else by default.

    By default matrices and stacks of matrices are updated by Muon, except for embeddings and heads, which are known by
    their names: a part of the name contains "embed" or is `wte`, `wpe` or `position`, or ends with "head", or is
    `output` at the top of the model.

    Raises:
      ValueError: a rule selects Muon for a parameter that is neither a matrix nor a stack.

    >>> names = ("blocks.0.output.weight", "output.weight", "model.embed_tokens.weight", "blocks.0.router.weight")
    >>> [algorithm_of("Muon", name, (4, 4), {"*.router.*": "adamw"}) for name in names]
    ['muon', 'adamw', 'adamw', 'adamw']
    """
    for pattern, algorithm in rules.items():
        if fnmatch.fnmatchcase(name, pattern):
            if algorithm == MUON:
                check_shape(op, name, shape)
            return algorithm
    parts = [part for part in name.lower().split(".") if part not in _WRAPPERS]
    is_embedding = any("embed" in part or part in ("wte", "wpe", "position") for part in parts)
    is_head = any(part.endswith("head") for part in parts) or parts[0] == "output"
    return MUON if len(shape) in (2, 3) and not is_embedding and not is_head else ADAMW


def check_rules(op: str, rules: Any, names: Collection[str]) -> None:
    """Raise unless every rule is a pattern that fits one of `names`, and an algorithm."""
    if not isinstance(rules, Mapping):
        raise TypeError(f"{op}: rules ({quote(rules)}) is not a dict; pass one, such as {{'*.router.*': 'adamw'}}")
    for pattern, algorithm in rules.items():
        check_algorithm(op, f"rules[{pattern!r}]", algorithm)
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            instead = closest(pattern, names, "the parameters")
            raise ValueError(f"{op}: rules[{pattern!r}] fits no name of a parameter; {instead}")


def check_algorithm(op: str, name: str, value: Any) -> None:
    if value not in ALGORITHMS:
        raise ValueError(f"{op}: {name} ({quote(value)}) is not {join_names(map(repr, ALGORITHMS))}; pass one of these")


def check_shape(op: str, name: str, shape: Shape) -> None:
    if len(shape) not in (2, 3):
        raise ValueError(
            f"{op}: {name} {tuple(shape)} is not a matrix [N, K] or a stack of matrices [E, N, K]; update it by AdamW"
        )


def check_settings(op: str, momentum: Any, nesterov: Any, coefficients: Any, eps: Any, steps: Any) -> None:
    """Raise if a setting of Newton-Schulz or of the momentum has a wrong type or is out of range."""
    check_setting(op, "momentum", momentum, is_beta=True)
    check_setting(op, "eps", eps)
    if not isinstance(nesterov, bool):
        raise TypeError(f"{op}: nesterov ({quote(nesterov)}) is not a bool; pass True or False")
    is_list = isinstance(coefficients, Sequence) and len(coefficients) == 3
    if not is_list or not all(isinstance(each, Real) and math.isfinite(each) for each in coefficients):
        raise ValueError(
            f"{op}: ns_coefficients ({quote(coefficients)}) is not three numbers; pass three, such as {COEFFICIENTS}"
        )
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps < 100:
        raise ValueError(f"{op}: ns_steps ({quote(steps)}) is not a whole number from 1 to 99; pass 5, as usual")


def update_scale(op: str, adjust: str | None, fan_out: int, fan_in: int) -> float:
    """Return the factor of the learning rate of a matrix with `fan_in` inputs and `fan_out` outputs.

        "original", None:   sqrt(max(1, fan_out / fan_in))
        "match_rms_adamw":  0.2 sqrt(max(fan_out, fan_in)), for learning rates of AdamW

    >>> update_scale("Muon", None, 64, 16), update_scale("Muon", "match_rms_adamw", 25, 16)
    (2.0, 1.0)
    """
    if adjust in (None, "original"):
        return math.sqrt(max(1, fan_out / fan_in))
    if adjust == "match_rms_adamw":
        return 0.2 * math.sqrt(max(fan_out, fan_in))
    raise ValueError(
        f"{op}: adjust_lr_fn ({quote(adjust)}) is not None, 'original' or 'match_rms_adamw'; pass one of these"
    )
