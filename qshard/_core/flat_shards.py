"""Master weights to quantized weights, where each rank holds a flat slice of the master, cut anywhere.

    amax of each slice  ->  ONE max-reduction for all weights  ->  scales, on every rank  ->  codes of each slice

gives, on each rank, its part of the bytes of `quantize` of the whole weights: a maximum is exact in any order, every
rank makes all scales of the same amaxes, so scales are never gathered, and codes of an element depend on its scale
alone. A slice is `[start, start + length)` of the row-major weight: it may cut rows, blocks and bytes, be empty or
absent, or reach past the end of the weight, where it holds padding.

Weights of one format, dtype and parity are a bucket, which costs one amax op, one or two for its scales and one cast,
whatever their number. `cast_master` takes all steps at once; who has other things to do in between, as FSDP2 has
gathers, takes them one by one: `amaxes`, `scales`, `cast`.

Two E2M1 codes are a byte, and two ranks may share one. Each writes its own half and leaves the other as it was. In a
piece (`piece_bytes`), the buffer of the codes of one slice, the other half is zero from the start, so after a gather
the halves meet by OR, or by addition: the front ends' `join_pieces`. Cuts of `plan_shards` cut no byte.

Sources: TransformerEngine `quantize_master_weights` (partial amax, reduce, partial cast); ZeRO, arXiv:1910.02054.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

from qshard._core import quantize_steps
from qshard._core.quantize_steps import Plane, Scales
from qshard._core.validation import FormatLike, as_format, join_names, quote
from qshard.formats import FLOATS, Format, Usage
from qshard.layout import PlaneLayout, Shape, matrix_shape, slice_plane

Array = Any


@dataclass(frozen=True)
class Bucket:
    """Weights that one call serves.

    Their amaxes lie one after the other in a buffer: the grids of all of them, then, if the format has a global scale,
    the amaxes of all tensors, or of all rows.

    Attributes:
      dtype, rounded_to: of the masters, and what they are rounded to first.
      indices, planes: of the weights in the plan.
      begin: where the amaxes of this bucket begin in the buffer of all.
    """

    fmt: Format
    usage: Usage
    dtype: str
    rounded_to: str
    indices: tuple[int, ...]
    planes: tuple[PlaneLayout, ...]
    begin: int

    @functools.cached_property
    def grids(self) -> tuple[int, ...]:
        """How many blocks each weight has."""
        return tuple(math.prod(where.scale_shape) for where in self.planes)

    @functools.cached_property
    def wholes(self) -> tuple[int, ...]:
        """How many amaxes of the tensor, or of rows, each weight has."""
        return tuple(0 if w.global_scale_shape is None else math.prod(w.global_scale_shape) for w in self.planes)

    @functools.cached_property
    def blocks(self) -> int:
        return sum(self.grids)

    @functools.cached_property
    def amaxes(self) -> int:
        return self.blocks + sum(self.wholes)

    @functools.cached_property
    def run(self) -> int:
        """Blocks of the longest runs of which each amax of a tensor, or of a row, serves a whole number."""
        each = zip(self.wholes, self.grids, strict=True)
        return math.gcd(*(blocks // wholes for wholes, blocks in each if wholes)) or 1

    @functools.cached_property
    def runs(self) -> tuple[int, ...]:
        """How many runs each amax of a tensor, or of a row, serves."""
        each = zip(self.wholes, self.grids, strict=True)
        return tuple(blocks // wholes // self.run for wholes, blocks in each for _ in range(wholes))

    def found(self, amaxes: Array) -> tuple[Array, Array | None]:
        """The amaxes of blocks, and of tensors or rows, of all weights of the bucket, among those of the plan."""
        middle, stop = self.begin + self.blocks, self.begin + self.amaxes
        # A weight without rows has a scale per row all the same: an empty array, not None.
        of_wholes = any(where.global_scale_shape is not None for where in self.planes)
        return amaxes[self.begin : middle], amaxes[middle:stop] if of_wholes else None

    def split(self, of_blocks: Array, of_wholes: Array | None) -> list[tuple[Array, Array | None]]:
        """What each weight has of numbers for all blocks, and of those for tensors or rows, in the shapes of scales."""
        grids = _split(of_blocks, [where.scale_shape for where in self.planes])
        shapes = [where.global_scale_shape or () for where in self.planes]
        wholes = [None] * len(grids) if of_wholes is None else _split(of_wholes, shapes)
        return list(zip(grids, wholes, strict=True))

    def split_scales(self, made: Scales) -> list[Scales]:
        encoding, stored = self.split(made.scale, None), self.split(made.scale_inv, made.global_scale_inv)
        return [Scales(scale, *each) for (scale, _), each in zip(encoding, stored, strict=True)]

    @functools.cached_property
    def attributes(self) -> dict[str, Any]:
        """Those that all ops on slices have."""
        rows, cols = self.fmt.block_of(self.usage) or (0, 0)
        return {
            "block_cols": cols,
            "block_rows": rows,
            "rounded_to": self.rounded_to,
            "shapes": tuple(size for where in self.planes for size in matrix_shape(where.shape)),
        }


@dataclass(frozen=True)
class MasterPlan:
    """What `cast_master` knows of the weights before it sees one: made once, the same on every rank.

    Its buckets are weights that share calls, in the order in which each rank makes them.
    """

    shapes: tuple[Shape, ...]
    formats: tuple[Format, ...]
    usages: tuple[Usage, ...]
    dtypes: tuple[str, ...]
    buckets: tuple[Bucket, ...]

    @property
    def amaxes(self) -> int:
        """How many numbers the max-reduction of all weights has."""
        return sum(bucket.amaxes for bucket in self.buckets)


@dataclass(frozen=True)
class FlatSlice:
    """The slice of one weight that a rank holds, as far as it is known before any values: a key of a plan's cache.

    Attributes:
      shape, fmt: of the whole weight, and what its codes are.
      dtype: of the master.
      start: index of the first element of the slice in the weight.
    """

    shape: Shape
    fmt: Format
    dtype: str
    start: int = 0

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.shape, self.fmt, self.dtype, self.start))

    def __hash__(self) -> int:  # Front ends look plans up in each step.
        return self._hash


def plan_master(
    shapes: Sequence[Shape],
    formats: FormatLike | Sequence[FormatLike],
    *,
    usages: Usage | Sequence[Usage] = Usage.ROWWISE,
    dtype: str | Sequence[str] = "float32",
    rounded_to: str | Sequence[str | None] | None = None,
    op: str = "plan_master",
) -> MasterPlan:
    """Prepares `cast_master` for some weights.

    Args:
      shapes: of the whole weights.
      formats: one for each, or for all.
      usages: the plane to make, one that is stored in the order of the weight: `ROWWISE`, or `COLUMNWISE` of MXFP8
        vectors. To have both of those, list a weight twice. The columnwise plane of square blocks, or of one scale, is
        the transpose of the rowwise one: make it after the gather.
      dtype: of the masters, for each or for all: float32, bfloat16 or float16. Given, not found, so that ranks without
        a slice agree.
      rounded_to: the parity. None: the codes of `quantize(master)`. A dtype: those of `quantize(master.astype(dtype))`,
        what a model that keeps its weights in that dtype would quantize.
      op: who is called, for errors.

    Raises:
      TypeError: a format is none, nor the name of one.
      ValueError: a format cannot hold a shape, a plane is stored in another order, or the scales of a format depend on
        more than amaxes (`four_over_six`).

    >>> from qshard.formats import FP8_E4M3, NVFP4_16x16
    >>> plan = plan_master([(64, 32), (8, 8), (16, 16)], [NVFP4_16x16, FP8_E4M3, NVFP4_16x16])
    >>> [bucket.indices for bucket in plan.buckets], plan.amaxes
    ([(0, 2), (1,)], 12)
    """
    n = len(shapes)
    if any(isinstance(shape, int) for shape in shapes):
        raise TypeError(f"{op}: shapes ({quote(shapes)}) is not a list of shapes; pass one shape per weight")
    all_shapes = tuple(tuple(shape) for shape in shapes)
    given = {"formats": formats, "usages": usages, "dtype": dtype, "rounded_to": rounded_to}
    all_formats, all_usages, dtypes, parities = (_each(op, name, value, n) for name, value in given.items())
    all_formats = tuple(as_format(fmt, op, "formats") for fmt in all_formats)
    for name, values in (("dtype", dtypes), ("rounded_to", [parity for parity in parities if parity])):
        if wrong := [value for value in values if value not in FLOATS]:
            raise ValueError(f"{op}: {name} ({wrong[0]}) is not {join_names(FLOATS)}; cast the masters first")
    # Nothing is rounded to float32, nor to the dtype that it has.
    rounded = ["float32" if p in (None, d) else p for p, d in zip(parities, dtypes, strict=True)]
    members: dict[Any, list[int]] = {}
    for i, key in enumerate(zip(all_formats, all_usages, dtypes, rounded, strict=True)):
        members.setdefault(key, []).append(i)
    buckets: list[Bucket] = []
    begin = 0
    for (fmt, usage, kind, rounding), indices in members.items():
        planes = tuple(slice_plane(fmt, all_shapes[i], usage, op=op) for i in indices)
        buckets.append(Bucket(fmt, usage, kind, rounding, tuple(indices), planes, begin))
        begin += buckets[-1].amaxes
    return MasterPlan(all_shapes, all_formats, all_usages, dtypes, tuple(buckets))


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
    """The codes of the slices, written into `data`, and the scales of the whole weights.

    Args:
      ops: of a front end: the ops of `qshard.op_table.table`, and those of `multi_table` as functions that return what
        they changed; `zeros(count)`, fp32; `joined(arrays)`, one array after the other; `of_bucket(pairs, bucket)`, the
        rows of its weights; `repeated(values, bucket)`, each of its whole-weight amaxes for each run of blocks that it
        serves (`Bucket.run`).
      data: uint8 codes of each weight, of any shape: of all of it, or with `pieces` those of the slice (`piece_bytes`).
      masters: the slices, flat, of the dtype of the plan; empty where a rank has none.
      starts: the index of the first element of each slice in its weight, `[n, 2]` words, the low one first.
      reduce_max: the maximum over ranks of fp32 amaxes, as integers. Called once. None: no rank shares a block, or a
        scale, with another (`FlatShards.reduces`).
      plan: the same on every rank.
      pieces: what `data` is.
      seeds: of stochastic rounding, one pair of words for each weight.

    Returns:
      For each weight its codes as they are now, and the scales of the whole, in the shapes of `layout.plane`.

    Raises:
      ValueError: a format rounds stochastically and there are no seeds.

    Collective, also where all slices of a rank are empty: there, amaxes are zeros.
    """
    if seeds is None and any(fmt.stochastic for fmt in plan.formats):
        raise ValueError(
            "cast_master: a format uses stochastic rounding and needs `seeds`; pass new seeds on each call, one per "
            "weight"
        )
    if not plan.buckets:
        return []
    found = amaxes(ops, plan, masters, starts)
    made = scales(ops, plan, found if reduce_max is None else reduce_max(found))
    codes = cast(ops, plan, data, masters, starts, [each.scale for each in made], pieces=pieces, seeds=seeds)
    results: dict[int, Plane] = {}
    for bucket, of_bucket, changed in zip(plan.buckets, made, codes, strict=True):
        for i, each, of in zip(bucket.indices, changed, bucket.split_scales(of_bucket), strict=True):
            results[i] = Plane(each, of.scale_inv, of.global_scale_inv)
    return [results[i] for i in range(len(plan.shapes))]


def amaxes(ops: Any, plan: MasterPlan, masters: Sequence[Array], starts: Array) -> Array:
    """What a rank knows of the amaxes of all weights, to be max-reduced over ranks: `plan.amaxes` of them, fp32.

    The arguments are those of `cast_master`, of one weight at least.
    """
    found = [
        ops.amax_slices(
            ops.of_bucket(starts, bucket),
            ops.zeros(bucket.amaxes),
            [masters[i] for i in bucket.indices],
            whole=bucket.fmt.scaling.global_scale or "none",
            **bucket.attributes,
        )
        for bucket in plan.buckets
    ]
    return found[0] if len(found) == 1 else ops.concatenate(found)


def scales(ops: Any, plan: MasterPlan, found: Array) -> list[Scales]:
    """The scales of all weights of each bucket, one after the other, from their reduced amaxes.

    `Bucket.split_scales` has those of each weight.
    """
    return [_scales(ops, bucket, *bucket.found(found)) for bucket in plan.buckets]


def _scales(ops: Any, bucket: Bucket, amax: Array, wholes: Array | None) -> Scales:
    if wholes is None:
        return quantize_steps.scales(ops, bucket.fmt, amax)
    runs = amax.reshape(bucket.blocks // bucket.run, bucket.run)
    made = quantize_steps.scales(
        ops, bucket.fmt, runs, wholes, repeated=functools.partial(ops.repeat_values, bucket=bucket)
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
    """The codes of the slices of each bucket, written into `data`, under `Scales.scale` of each bucket.

    All other arguments are those of `cast_master`.
    """
    codes = []
    for bucket, scale in zip(plan.buckets, scales, strict=True):
        lists = ([masters[i] for i in bucket.indices], [data[i] for i in bucket.indices])
        options = {**bucket.attributes, "pieces": pieces}
        if bucket.fmt.stochastic:
            words = (ops.of_bucket(starts, bucket), ops.of_bucket(seeds, bucket))
            codes.append(ops.cast_slices_stochastic(*words, scale, *lists, **options))
        else:
            options |= {"element": bucket.fmt.element.name, "nonfinite": bucket.fmt.nonfinite}
            codes.append(ops.cast_slices(ops.of_bucket(starts, bucket), scale, *lists, **options))
    return codes


def _split(array: Array, shapes: Sequence[Shape]) -> list[Array]:
    ends = itertools.pairwise([0, *itertools.accumulate(map(math.prod, shapes))])
    return [array[start:stop].reshape(shape) for (start, stop), shape in zip(ends, shapes, strict=True)]


@dataclass(frozen=True)
class FlatShards:
    """How one weight is cut into a flat slice for each rank.

    Attributes:
      starts, stops: of each rank's slice, in elements.
      padded: what every rank's buffer has room for: the length of the longest slice.
      reduces: whether ranks must max-reduce amaxes, for the whole tensor has a scale.
    """

    starts: tuple[int, ...]
    stops: tuple[int, ...]
    padded: int
    reduces: bool


def plan_shards(
    shapes: Sequence[Shape],
    fmt: FormatLike,
    world: int,
    *,
    usage: Usage = Usage.ROWWISE,
    op: str = "plan_shards",
    name: str = "x",
) -> tuple[FlatShards, ...]:
    """Cuts of weights that cut no block and no byte, for those who may choose.

    Ranks in order take `ceil(units / world)` units of a weight each (`PlaneLayout.unit`), so the last may have fewer,
    or none. With such cuts `cast_master` needs no reduction, unless the whole tensor has a scale.

    Args:
      shapes: of the whole weights.
      fmt: the format of all of them.
      world: the number of ranks.
      usage: of the plane that is made.
      op, name: who is called, and what has the shapes, for errors.

    Raises:
      ValueError: `fmt` cannot hold a shape, or `world` is not positive.

    >>> from qshard.formats import MXFP8_32x32, NVFP4
    >>> plan_shards([(96, 64)], MXFP8_32x32, 2)
    (FlatShards(starts=(0, 4096), stops=(4096, 6144), padded=4096, reduces=False),)
    >>> plan_shards([(3, 16)], NVFP4, 2)
    (FlatShards(starts=(0, 32), stops=(32, 48), padded=32, reduces=True),)
    """
    check_world(op, world)
    shards = []
    for shape in shapes:
        where = slice_plane(as_format(fmt, op), tuple(shape), usage, op=op, name=name)
        size = math.prod(shape)
        padded = -(-size // max(1, where.unit * world)) * where.unit
        starts = tuple(min(size, r * padded) for r in range(world))
        stops = tuple(min(size, (r + 1) * padded) for r in range(world))
        shards.append(FlatShards(starts, stops, min(padded, size), world > 1 and where.format.tensor_scaled))
    return tuple(shards)


def check_world(op: str, world: int) -> None:
    """Raises unless it is a number of ranks."""
    if not isinstance(world, int) or world < 1:
        raise ValueError(f"{op}: world ({quote(world)}) is not a positive integer; pass the number of ranks")


def piece_bytes(fmt: Format, length: int) -> int:
    """Bytes of a buffer for the codes of a slice, wherever it starts: half a byte more if it starts amid one.

    >>> from qshard.formats import FP8_E4M3, NVFP4
    >>> piece_bytes(FP8_E4M3, 5), piece_bytes(NVFP4, 5), piece_bytes(NVFP4, 4), piece_bytes(NVFP4, 0)
    (5, 3, 3, 0)
    """
    per_byte = fmt.element.codes_per_byte
    return -(-(length + per_byte - 1) // per_byte) if length else 0


def word_pair(what: str, number: SupportsIndex) -> tuple[int, int]:
    """A start or a seed of 64 bits as ops take it: two words of 32 bits, the low one first. `what` names it in errors.

    >>> word_pair("quantize: seed", 2**32 + 5)
    (5, 1)
    """
    try:
        number = operator.index(number)
    except TypeError:
        raise TypeError(f"{what} ({quote(number)}) is not an integer; pass one in [0, 2**64)") from None
    if not 0 <= number < 2**64:
        raise ValueError(f"{what} ({number}) is not in [0, 2**64); pass an integer in that range")
    return number & 0xFFFFFFFF, number >> 32


def _each(op: str, name: str, value: Any, n: int) -> tuple[Any, ...]:
    values = tuple(value) if isinstance(value, list | tuple) else (value,) * n
    if len(values) != n:
        raise ValueError(
            f"{op}: {name} has {len(values)} entries for {n} weights; pass one per weight, or a single one"
        )
    return values
