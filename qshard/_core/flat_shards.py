"""Quantization of master weights that are sharded into flat slices with arbitrary boundaries.

    amax of each slice  ->  ONE max-reduction for all weights  ->  scales, on every rank  ->  codes of each slice

Each rank gets its part of the bytes of `quantize` of the whole weights. A maximum is exact in any order, every rank
computes all scales from the same amaxes, so scales are never gathered, and the code of an element depends only on its
scale. A slice is `[start, start + length)` of the row-major weight. It may split rows, blocks and bytes, be empty or
absent, or extend past the end of the weight into padding. A stack of matrices `[E, N, K]` is one weight. Each matrix
has its own scales, as if it were quantized alone.

Weights with equal format, usage and dtypes form a batch. A batch costs one amax op, one or two ops for scales, and
one cast, for any number of weights. `cast_master` runs all steps. Callers that overlap other work, as FSDP2 overlaps
gathers, call the steps `amaxes`, `scales` and `cast` themselves.

Two E2M1 codes share a byte, which a shard boundary may split. Each rank writes its half and leaves the other half
unchanged. In a piece (`piece_bytes`), the buffer for the codes of one slice, the other half is initially zero, so
`join_pieces` of the front ends can combine gathered halves by OR or addition. Shards of `plan_shards` split no byte.

Sources: TransformerEngine `quantize_master_weights` (partial amax, reduce, partial cast); ZeRO, arXiv:1910.02054.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from qshard._core import quantize_steps
from qshard._core.quantize_steps import Plane, Scales
from qshard._core.validation import FormatLike, as_format, join_names, quote
from qshard.formats import FLOATS, Format, Usage
from qshard.layout import PlaneLayout, Shape, matrix_shape, slice_plane

Array = Any
T = TypeVar("T")

TILE_COLS = 128
"""Columns of a tile of slices, `kSliceCols` of `slices.cuh`. Only speed depends on it."""


@dataclass(frozen=True)
class FlatSlice:
    """A flat slice of the master of one weight, and the plane to quantize it to. A key in the cache of plans.

    Attributes:
      shape: shape of the whole weight.
      dtype: dtype of the master: float32, bfloat16 or float16.
      start: index in the weight of the first element of the slice. Plans do not depend on it.
      usage: plane to compute. It must be stored in the order of the weight: `ROWWISE`, or `COLUMNWISE` for MXFP8 with
        1-D blocks. For both, list the weight twice. With 2-D blocks or one scale, the columnwise plane is the transpose
        of the rowwise plane: compute it after the gather.
      rounded_to: with None, codes are of `quantize(master)`; with a dtype, of `quantize(master.astype(dtype))`, as for
        a model that stores its weights in that dtype.
      is_stack: whether the weight is a stack `[E, N, K]` of matrices with their own scales. Where `layout.splits_stack`
        holds, only empty slices have a meaning.
    """

    shape: Shape
    fmt: Format
    dtype: str = "float32"
    start: int = 0
    usage: Usage = Usage.ROWWISE
    rounded_to: str | None = None
    is_stack: bool = False

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.shape, self.fmt, self.dtype, self.start, self.usage, self.rounded_to, self.is_stack))

    def __hash__(self) -> int:  # cached, because front ends look up plans in every step
        return self._hash


@dataclass(frozen=True)
class SliceBatch:
    """Weights that share op calls.

    Their amaxes are contiguous in a buffer: the grids of all weights, then, if the format has a global scale, the
    amaxes of all tensors or of all rows.

    Attributes:
      rounded_to: dtype that masters are rounded to before quantization.
      indices: positions of the weights in the plan.
      begin: offset of the batch's amaxes in the buffer of the plan.
      matrix: (rows, columns) of each matrix, if the weights are stacks and a scale serves a whole matrix; else None.
    """

    fmt: Format
    usage: Usage
    rounded_to: str
    indices: tuple[int, ...]
    planes: tuple[PlaneLayout, ...]
    begin: int
    matrix: tuple[int, int] | None = None

    @functools.cached_property
    def grids(self) -> tuple[int, ...]:
        """Number of blocks of each weight."""
        return tuple(math.prod(where.scale_shape) for where in self.planes)

    @functools.cached_property
    def wholes(self) -> tuple[int, ...]:
        """Number of tensor or row amaxes of each weight; 0 without a global scale."""
        return tuple(0 if w.global_scale_shape is None else math.prod(w.global_scale_shape) for w in self.planes)

    @functools.cached_property
    def blocks(self) -> int:
        return sum(self.grids)

    @functools.cached_property
    def amaxes(self) -> int:
        return self.blocks + sum(self.wholes)

    @functools.cached_property
    def run(self) -> int:
        """Largest number of blocks that divides the blocks of every tensor or row amax."""
        each = zip(self.wholes, self.grids, strict=True)
        return math.gcd(*(blocks // wholes for wholes, blocks in each if wholes)) or 1

    @functools.cached_property
    def runs(self) -> tuple[int, ...]:
        """Number of runs of `run` blocks for each tensor or row amax."""
        each = zip(self.wholes, self.grids, strict=True)
        return tuple(blocks // wholes // self.run for wholes, blocks in each for _ in range(wholes))

    def part(self, amaxes: Array) -> tuple[Array, Array | None]:
        """Return the batch's block amaxes, and its tensor or row amaxes or None, as slices of the plan's amaxes."""
        middle, stop = self.begin + self.blocks, self.begin + self.amaxes
        # A weight without rows still has row scales: an empty array, not None.
        of_wholes = any(where.global_scale_shape is not None for where in self.planes)
        return amaxes[self.begin : middle], amaxes[middle:stop] if of_wholes else None

    def split(self, of_blocks: Array, of_wholes: Array | None) -> list[tuple[Array, Array | None]]:
        """Split the batch's block values, and its tensor or row values, by weight, in the shapes of scales."""
        grids = _split(of_blocks, [where.scale_shape for where in self.planes])
        shapes = [where.global_scale_shape or () for where in self.planes]
        wholes = [None] * len(grids) if of_wholes is None else _split(of_wholes, shapes)
        return list(zip(grids, wholes, strict=True))

    @functools.cached_property
    def attributes(self) -> dict[str, Any]:
        """Attributes that all ops on slices take."""
        rows, cols = self.fmt.block_of(self.usage) or self._matrix_block or (0, 0)
        return {
            "block_cols": cols,
            "block_rows": rows,
            "rounded_to": self.rounded_to,
            "shapes": tuple(size for where in self.planes for size in self._slice_shape(where, rows, cols)),
        }

    @property
    def _matrix_block(self) -> tuple[int, int] | None:
        """A matrix as one block, of the width of a tile where its size allows: its tiles are then contiguous."""
        if self.matrix is None:
            return None
        size = math.prod(self.matrix)
        return self.matrix if size % TILE_COLS else (size // TILE_COLS, TILE_COLS)

    def _slice_shape(self, where: PlaneLayout, rows: int, cols: int) -> tuple[int, int]:
        """Return the (rows, cols) of the weight as ops divide it into blocks."""
        if not where.is_stack:
            return matrix_shape(where.shape)
        if self.fmt.per_tensor:
            return where.shape[0] * rows, cols
        return math.prod(where.scale_shape[:-1]) * rows, where.shape[-1]


@dataclass(frozen=True)
class MasterPlan:
    """The plan of `cast_master`. Computed once, and equal on every rank.

    Attributes:
      slices: the slice of each weight.
      batches: weights that share op calls, in the order that every rank processes them.
    """

    slices: tuple[FlatSlice, ...]
    batches: tuple[SliceBatch, ...]

    @property
    def amaxes(self) -> int:
        """Number of amaxes in the max-reduction over all weights."""
        return sum(batch.amaxes for batch in self.batches)

    def split_amaxes(self, amaxes: Array) -> list[tuple[Array, Array | None]]:
        """Split amaxes by weight: of its blocks, and of its tensor or rows or None, in the shapes of scales."""
        return self.by_weight(batch.split(*batch.part(amaxes)) for batch in self.batches)

    def by_weight(self, of_batches: Iterable[Iterable[T]]) -> list[T]:
        """Put the items of each batch, one for each of its weights, in the order of the weights."""
        found: dict[int, T] = {}
        for batch, items in zip(self.batches, of_batches, strict=True):
            found.update(zip(batch.indices, items, strict=True))
        return [found[i] for i in range(len(self.slices))]


def plan_master(slices: Sequence[FlatSlice], *, op: str = "plan_master") -> MasterPlan:
    """Plan `cast_master` for a list of weights.

    Args:
      slices: the slice of each weight. Ranks without a slice pass one too, so that all plans are equal.
      op: name of the caller in errors.

    Raises:
      TypeError: an entry is not a `FlatSlice`, or its format is not a `Format`.
      ValueError: a format does not support a shape, a plane is stored transposed, the scales of a format depend on more
        than amaxes (`four_over_six`), or a dtype is not supported.

    >>> from qshard.formats import FP8_E4M3, NVFP4_16x16
    >>> plan = plan_master(
    ...     [FlatSlice((64, 32), NVFP4_16x16), FlatSlice((8, 8), FP8_E4M3), FlatSlice((16, 16), NVFP4_16x16)]
    ... )
    >>> [batch.indices for batch in plan.batches], plan.amaxes
    ([(0, 2), (1,)], 12)
    """
    members: dict[Any, list[int]] = {}
    for i, s in enumerate(slices):
        if not isinstance(s, FlatSlice):
            raise TypeError(f"{op}: slices[{i}] ({quote(s)}) is not a FlatSlice; pass one per weight")
        if not isinstance(s.fmt, Format):
            raise TypeError(f"{op}: slices[{i}].fmt ({quote(s.fmt)}) is not a Format; pass one of qshard.formats")
        # Rounding to float32, or to the master's own dtype, changes nothing.
        rounded_to = "float32" if s.rounded_to in (None, s.dtype) else s.rounded_to
        for name, dtype in (("dtype", s.dtype), ("rounded_to", rounded_to)):
            if dtype not in FLOATS:
                raise ValueError(
                    f"{op}: slices[{i}].{name} ({quote(dtype)}) is not {join_names(FLOATS)}; cast the masters first"
                )
        matrix = s.shape[-2:] if s.is_stack and s.fmt.tensor_scaled else None
        members.setdefault((s.fmt, s.usage, s.dtype, rounded_to, matrix), []).append(i)
    batches: list[SliceBatch] = []
    begin = 0
    for (fmt, usage, _, rounded_to, matrix), indices in members.items():
        planes = tuple(slice_plane(fmt, slices[i].shape, usage, op=op, is_stack=slices[i].is_stack) for i in indices)
        batches.append(SliceBatch(fmt, usage, rounded_to, tuple(indices), planes, begin, matrix))
        begin += batches[-1].amaxes
    return MasterPlan(tuple(slices), tuple(batches))


def cast_master(
    ops: Any,
    data: Sequence[Array],
    masters: Sequence[Array],
    starts: Array,
    reduce_max: Callable[[Array], Array] | None,
    *,
    plan: MasterPlan,
    pieces: bool = False,
    seeds: Array | None = None,
) -> list[Plane]:
    """Quantize the local slices: write their codes to `data`, and compute the scales of the whole weights.

    Args:
      ops: ops of a front end: every op of `qshard.op_table.table`; every op of `multi_table` as a function that returns
        its updated operands; `zeros(count)` in fp32; `concatenate(arrays)`; `of_batch(pairs, batch)`, the rows of the
        batch's weights; and `repeat_values(values, batch)`, which repeats each tensor or row amax for each of its
        runs of blocks (`SliceBatch.run`).
      data: uint8 codes of each weight, in any shape: of the whole weight, or with `pieces` of the slice
        (`piece_bytes`).
      masters: the slices as 1-D arrays in the dtype of the plan; empty on ranks without a slice.
      starts: index in its weight of the first element of each slice: `[n, 2]`, uint64 as two uint32, low first.
      reduce_max: max-reduction over ranks of fp32 amaxes as integers, called once. None: no block and no scale is
        shared by ranks (`plan_shards`).
      plan: the plan, equal on every rank.
      pieces: whether `data` has pieces instead of whole weights.
      seeds: seed of stochastic rounding of each weight: `[n, 2]`, uint64 as two uint32.

    Returns:
      The updated codes of each weight, and the scales of the whole weight in the shapes of `layout.plane`.

    Collective: every rank calls it, even if all its slices are empty. Such a rank contributes amaxes of 0.
    """
    if seeds is None and any(s.fmt.stochastic for s in plan.slices):
        raise ValueError(
            "cast_master: a format uses stochastic rounding and needs `seeds`; pass new seeds on each call, one per "
            "weight"
        )
    if not plan.batches:
        return []
    found = amaxes(ops, plan, masters, starts)
    made = scales(ops, plan, found if reduce_max is None else reduce_max(found))
    codes = cast(ops, plan, data, masters, starts, [each.scale for each in made], pieces=pieces, seeds=seeds)
    stored = [b.split(each.scale_inv, each.global_scale_inv) for b, each in zip(plan.batches, made, strict=True)]
    pairs = zip(plan.by_weight(codes), plan.by_weight(stored), strict=True)
    return [Plane(data, *of_weight) for data, of_weight in pairs]


def amaxes(ops: Any, plan: MasterPlan, masters: Sequence[Array], starts: Array) -> Array:
    """Compute the local amaxes of all weights, to be max-reduced over ranks: fp32 `[plan.amaxes]`.

    Arguments as in `cast_master`; the plan has at least one weight.
    """
    found = [_amaxes(ops, batch, masters, starts) for batch in plan.batches]
    return found[0] if len(found) == 1 else ops.concatenate(found)


def _amaxes(ops: Any, batch: SliceBatch, masters: Sequence[Array], starts: Array) -> Array:
    is_global = batch.fmt.scaling.global_scale is not None
    by_matrix = is_global and batch.matrix is not None
    found = ops.amax_slices(
        ops.of_batch(starts, batch),
        ops.zeros(batch.blocks if by_matrix else batch.amaxes),
        [masters[i] for i in batch.indices],
        whole=batch.fmt.scaling.global_scale if is_global and not by_matrix else "none",
        **batch.attributes,
    )
    if not by_matrix:
        return found
    # All matrices of the batch have as many blocks, next to each other: a run.
    return ops.concatenate([found, ops.amax_tensor(found.reshape(batch.blocks // batch.run, batch.run), lead=1)])


def scales(ops: Any, plan: MasterPlan, found: Array) -> list[Scales]:
    """Compute the scales of each batch from reduced amaxes."""
    return [_scales(ops, batch, *batch.part(found)) for batch in plan.batches]


def _scales(ops: Any, batch: SliceBatch, amax: Array, wholes: Array | None) -> Scales:
    if wholes is None:
        return quantize_steps.scales(ops, batch.fmt, amax)
    runs = amax.reshape(batch.blocks // batch.run, batch.run)
    made = quantize_steps.scales(
        ops, batch.fmt, runs, wholes, repeated=functools.partial(ops.repeat_values, batch=batch)
    )
    return Scales(made.scale.reshape(-1), made.scale_inv.reshape(-1), made.global_scale_inv)


def cast(
    ops: Any,
    plan: MasterPlan,
    data: Sequence[Array],
    masters: Sequence[Array],
    starts: Array,
    scales: Sequence[Array],
    *,
    pieces: bool = False,
    seeds: Array | None = None,
) -> list[Sequence[Array]]:
    """Write the codes of the slices to `data`. Return the updated codes of the weights of each batch.

    `scales` has `Scales.scale` of each batch; other arguments as in `cast_master`.
    """
    codes = []
    for batch, scale in zip(plan.batches, scales, strict=True):
        lists = ([masters[i] for i in batch.indices], [data[i] for i in batch.indices])
        options = {**batch.attributes, "pieces": pieces}
        if batch.fmt.stochastic:
            words = (ops.of_batch(starts, batch), ops.of_batch(seeds, batch))
            codes.append(ops.cast_slices_stochastic(*words, scale, *lists, **options))
        else:
            options |= {"element": batch.fmt.element.name, "nonfinite": batch.fmt.nonfinite}
            codes.append(ops.cast_slices(ops.of_batch(starts, batch), scale, *lists, **options))
    return codes


def _split(array: Array, shapes: Sequence[Shape]) -> list[Array]:
    ends = itertools.pairwise([0, *itertools.accumulate(map(math.prod, shapes))])
    return [array[start:stop].reshape(shape) for (start, stop), shape in zip(ends, shapes, strict=True)]


def plan_shards(
    shapes: Sequence[Shape],
    fmt: FormatLike,
    world: int,
    *,
    usage: Usage = Usage.ROWWISE,
    op: str = "plan_shards",
    name: str = "x",
) -> list[list[tuple[int, int]]]:
    """Shard weights into flat slices that split no block and no byte: for each weight, the range of each rank.

    A weight has `ceil(size / unit)` units (`PlaneLayout.unit`). Each rank in order takes `ceil(units / world)` of them,
    so the first range is the longest, and the last ranks may have fewer units or none. With such shards `cast_master`
    needs no reduction, unless a scale serves the whole tensor.

    Raises ValueError if `fmt` does not support a shape, or `world` is not positive.

    >>> from qshard.formats import MXFP8_32x32, NVFP4
    >>> plan_shards([(96, 64)], MXFP8_32x32, 2)
    [[(0, 4096), (4096, 6144)]]
    >>> plan_shards([(3, 16)], NVFP4, 2)
    [[(0, 32), (32, 48)]]
    """
    check_world(op, world)
    shards = []
    for shape in shapes:
        unit = slice_plane(as_format(fmt, op), tuple(shape), usage, op=op, name=name).unit
        size = math.prod(shape)
        longest = -(-size // max(1, unit * world)) * unit
        shards.append([(min(size, r * longest), min(size, (r + 1) * longest)) for r in range(world)])
    return shards


def check_world(op: str, world: int) -> None:
    """Raise ValueError unless `world` is a positive number of ranks."""
    if not isinstance(world, int) or world < 1:
        raise ValueError(f"{op}: world ({quote(world)}) is not a positive integer; pass the number of ranks")


def piece_bytes(fmt: Format, length: int) -> int:
    """Return the bytes of a buffer for the codes of a slice at any start.

    Packed codes may start in the middle of a byte.

    >>> from qshard.formats import FP8_E4M3, NVFP4
    >>> piece_bytes(FP8_E4M3, 5), piece_bytes(NVFP4, 5), piece_bytes(NVFP4, 4), piece_bytes(NVFP4, 0)
    (5, 3, 3, 0)
    """
    per_byte = fmt.element.codes_per_byte
    return -(-(length + per_byte - 1) // per_byte) if length else 0
