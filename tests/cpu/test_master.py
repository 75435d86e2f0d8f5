"""Slices of master weights, cut anywhere: cast of every split == split of the cast, bit for bit, in both frameworks.

Ranks are simulated: what each has is cast in turn, and their amaxes meet in one maximum, as in a collective.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qshard import formats, reference
from qshard.formats import Usage
from qshard.layout import plane
from qshard.master import MasterPlan, cast_master, piece_bytes, plan_master, plan_shards
from support import master_steps
from support.awkward import DTYPES, KINDS, TAME, assert_bits_equal, awkward_values
from support.formats import PLANES

RANDOM = formats.NVFP4.with_options(rounding="stochastic")
PLANES = [
    *PLANES,
    *(
        (fmt, Usage.ROWWISE)
        for fmt in (
            formats.FP8_E5M2.with_options(pow2=True, eps=0.25),
            formats.FP8_1x128.with_options(pow2=False, block=(3, 5)),
            formats.FP8_1x128.with_options(block=(40, 24), eps=1e-3),
        )
    ),
]
# Whole blocks for those who need them; for the others also odd sizes, and blocks that are cut.
WHOLE_BLOCKS = [(32, 96), (64, 32), (2, 32, 64)]
ANY = [(3, 7), (130, 9), (1, 1), (40, 260)]
every_step = pytest.mark.parametrize("steps", master_steps.STEPS, ids=str)
fast_step = pytest.mark.parametrize("steps", [s for s in master_steps.STEPS if s.fast], ids=str)


def shapes_of(fmt, usage):
    return [shape for shape in (*WHOLE_BLOCKS, *ANY) if not fmt.scaling.whole_blocks or shape in WHOLE_BLOCKS]


def simulate(
    steps: master_steps.Steps,
    plan: MasterPlan,
    weights: list[np.ndarray],
    cuts: list[list[int]],
    *,
    pieces: bool = False,
    seeds: list[int] | None = None,
    fill: int = 0,
) -> list[list[Any]]:
    """The results of all ranks, a list of (data, scale_inv, global_scale_inv) for each, as NumPy arrays.

    cuts: for each weight, where the slices of ranks begin and the last one ends.
    """
    world = len(cuts[0]) - 1
    amaxes: list[np.ndarray] = []

    def run(rank: int, reduce_max: Any) -> list[Any]:
        slices = [w.reshape(-1)[cut[rank] : cut[rank + 1]] for w, cut in zip(weights, cuts, strict=True)]
        data = [
            np.full(piece_bytes(fmt, s.size) if pieces else plane(fmt, shape, usage).data_shape, fill, np.uint8)
            for fmt, shape, usage, s in zip(plan.formats, plan.shapes, plan.usages, slices, strict=True)
        ]
        return steps.run(
            functools.partial(cast_master, plan=plan, pieces=pieces),
            plan,
            data,
            slices,
            [cut[rank] for cut in cuts],
            reduce_max,
            seeds,
        )

    def record(amax: np.ndarray) -> np.ndarray:
        amaxes.append(amax)
        return amax

    for rank in range(world):
        run(rank, record)
    assert len(amaxes) == world, "one reduction a step"
    merged = functools.reduce(np.maximum, [amax.view(np.int32) for amax in amaxes]).view(np.float32)
    return [run(rank, lambda amax: merged) for rank in range(world)]


def assert_law(steps, plan, weights, cuts, *, pieces=False, seeds=None, expected=None, fill=0):
    ranks = simulate(steps, plan, weights, cuts, pieces=pieces, seeds=seeds, fill=fill)
    for i, (fmt, usage, w) in enumerate(zip(plan.formats, plan.usages, weights, strict=True)):
        seed = 0 if seeds is None else seeds[i]
        source = w if expected is None else expected[i]
        whole = getattr(reference.quantize(source, fmt, usage, seed=seed), usage.name.lower())
        per_byte = fmt.element.codes_per_byte
        joined = np.zeros(whole.data.size, np.uint8)
        for rank, parts in enumerate(ranks):
            data, scale_inv, global_scale_inv = parts[i]
            assert_bits_equal(scale_inv, whole.scale_inv, f"scales of weight {i} on rank {rank}")
            if whole.global_scale_inv is not None:
                assert_bits_equal(global_scale_inv, whole.global_scale_inv, f"global scale of {i} on rank {rank}")
            start, stop = cuts[i][rank], cuts[i][rank + 1]
            if pieces:
                first = start // per_byte
                room = joined[first : first + data.size]
                room |= data[: room.size]
                assert not data[room.size :].any()
                continue
            flat = data.reshape(-1)
            own = codes_of(flat, per_byte)
            right = codes_of(whole.data.reshape(-1), per_byte)
            assert (own[start:stop] == right[start:stop]).all(), f"codes of weight {i} on rank {rank}"
            outside = np.r_[own[:start], own[stop:]]
            assert (outside == (fill & (0xFF if per_byte == 1 else 0xF))).all(), "bytes outside were touched"
        if pieces:
            assert_bits_equal(joined, whole.data.reshape(-1), f"joined pieces of weight {i}")


def codes_of(data: np.ndarray, per_byte: int) -> np.ndarray:
    return data if per_byte == 1 else np.stack([data & 0xF, data >> 4], -1).reshape(-1)


@fast_step
@settings(max_examples=60)
@given(
    where=st.lists(st.sampled_from(PLANES), min_size=1, max_size=4),
    world=st.sampled_from([1, 2, 3, 4, 8]),
    pieces=st.booleans(),
    seed=st.integers(0, 2**16),
    draw=st.data(),
)
def test_cast_of_every_split_is_the_split_of_the_cast(steps, where, world, pieces, seed, draw):
    """Odd starts, cut rows, blocks and bytes, empty slices; several formats in one call."""
    shapes = [draw.draw(st.sampled_from(shapes_of(*each))) for each in where]
    kinds = TAME if seed % 2 else KINDS
    weights = [awkward_values(shape, seed + i, kinds=kinds) for i, shape in enumerate(shapes)]
    cuts = [
        [0, *sorted(draw.draw(st.lists(st.integers(0, w.size), min_size=world - 1, max_size=world - 1))), w.size]
        for w in weights
    ]
    plan = plan_master(shapes, [fmt for fmt, _ in where], usages=[usage for _, usage in where])
    seeds = [seed * 2**33 + i for i in range(len(where))]
    assert_law(steps, plan, weights, cuts, pieces=pieces, seeds=seeds, fill=0 if pieces else 0x55)


@fast_step
@pytest.mark.parametrize("where", PLANES, ids=lambda where: f"{where[0]}-{where[1].name}")
def test_every_format(steps, where):
    """Each shape, in uneven slices with cuts at odd places, one of them empty; with halves of bytes."""
    fmt, usage = where
    for shape in shapes_of(fmt, usage):
        w = awkward_values(shape, 7, kinds=TAME)
        n = w.size
        cuts = [0, n // 3 | 1, n // 3 | 1, min(n, n // 2 + 18 | 1), n] if n > 3 else [0, 0, n]
        plan = plan_master([shape], fmt, usages=usage)
        for pieces in (False, True):
            assert_law(steps, plan, [w], [cuts], pieces=pieces, seeds=[3], fill=0 if pieces else 0x55)


@fast_step
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rounded_to", [None, "float32", "bfloat16", "float16"])
def test_parities(steps, dtype, rounded_to):
    """Codes of the master as it is, or rounded to the dtype of the model first."""
    shapes = [(32, 64), (64, 96), (33, 35)]
    fmts = [formats.NVFP4_16x16, formats.MXFP8_E4M3, formats.FP8_E4M3]
    weights = [awkward_values(shape, i, dtype, kinds=TAME) for i, shape in enumerate(shapes)]
    plan = plan_master(shapes, fmts, dtype=str(dtype), rounded_to=rounded_to)
    with np.errstate(over="ignore"):
        expected = [w if rounded_to in (None, "float32") else w.astype(rounded_to) for w in weights]
    assert_law(steps, plan, weights, [[0, 1001, w.size] for w in weights], expected=expected)


@every_step
def test_weights_of_many_formats(steps):
    """In the order of the weights, whatever calls they share."""
    shapes = [WHOLE_BLOCKS[i % 3] for i in range(len(PLANES))] + [(3, 7)]
    fmts = [*(fmt for fmt, _ in PLANES), formats.FP8_E4M3]
    plan = plan_master(shapes, fmts, usages=[*(usage for _, usage in PLANES), Usage.ROWWISE])
    weights = [awkward_values(shape, i) for i, shape in enumerate(shapes)]
    cuts = [[0, w.size // 5 | 1, w.size // 2 | 1, w.size] for w in weights]
    assert_law(steps, plan, weights, cuts, seeds=list(range(len(shapes))), fill=0x55)


@every_step
def test_long_slices(steps):
    """More than a task, or a window, of a kernel, and rows longer than the buffers of one."""
    shapes, fmts = [(16, 12_304), (9, 20_001), (32, 8192)], [formats.NVFP4, formats.FP8_E5M2, formats.MXFP8_32x32]
    weights = [awkward_values(shape, i, kinds=TAME) for i, shape in enumerate(shapes)]
    plan = plan_master(shapes, fmts, rounded_to="bfloat16")
    expected = [w.astype("bfloat16") for w in weights]
    assert_law(steps, plan, weights, [[0, 70_001, w.size] for w in weights], expected=expected)


@every_step
@pytest.mark.parametrize("past", [0, 1, 77, 2**40])
def test_what_is_past_the_end_is_padding(steps, past):
    """Slices of one length on all ranks, as in SPMD programs: the last ones reach past the end, or start there."""
    w = awkward_values((16, 32), 1, kinds=TAME)
    for fmt in (formats.NVFP4_16x16, formats.FP8_E4M3):
        plan = plan_master([w.shape], fmt)
        start = 403 if past < 2**40 else w.size + past
        padded = np.concatenate([w.reshape(-1)[start:], np.full(1 + past % 100, np.nan, np.float32)])
        for pieces in (False, True):
            shape = piece_bytes(fmt, padded.size) if pieces else plane(fmt, w.shape, Usage.ROWWISE).data_shape
            fill = 0 if pieces else 0x77
            (made,) = steps.run(
                functools.partial(cast_master, plan=plan, pieces=pieces),
                plan,
                [np.full(shape, fill, np.uint8)],
                [padded],
                [start],
                lambda amax: amax,
                None,
            )
            amax = reference.slice_amax(w.reshape(-1)[start:], fmt, w.shape, min(start, w.size))
            assert_bits_equal(made[1], reference.scales_from_amax(amax, fmt).scale_inv)
            whole = np.full(plane(fmt, w.shape, Usage.ROWWISE).data_shape, fill, np.uint8)
            reference.cast_slice(w.reshape(-1)[start:], whole, fmt, w.shape, min(start, w.size), amax)
            if pieces:
                first = min(start, w.size) // fmt.element.codes_per_byte
                tail = whole.reshape(-1)[first:]
                assert_bits_equal(made[0][: tail.size], tail)
                assert not made[0][tail.size :].any()
            else:
                assert_bits_equal(made[0], whole)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("where", PLANES, ids=lambda where: f"{where[0]}-{where[1].name}")
def test_planned_cuts_need_no_reduction(where, world):
    fmt, usage = where
    shapes = shapes_of(fmt, usage)
    steps = master_steps.STEPS[0]
    for shape, shards in zip(shapes, plan_shards(shapes, fmt, world, usage=usage), strict=True):
        size = int(np.prod(shape))
        assert shards.starts[0] == 0
        assert shards.stops[-1] == size
        assert shards.stops[:-1] == shards.starts[1:]
        assert max(b - a for a, b in zip(shards.starts, shards.stops, strict=True)) == shards.padded
        assert all(start % fmt.element.codes_per_byte == 0 for start in shards.starts)
        assert shards.reduces == (world > 1 and (fmt.block is None or fmt.scaling.global_scale == "tensor"))
        w = awkward_values(shape, 3, kinds=TAME)
        plan = plan_master([shape], fmt, usages=usage)
        whole = getattr(reference.quantize(w, fmt, usage, seed=1), usage.name.lower())
        codes = codes_of(whole.data.reshape(-1), fmt.element.codes_per_byte)
        if shards.reduces:
            continue
        for start, stop in zip(shards.starts, shards.stops, strict=True):
            (made,) = steps.run(
                functools.partial(cast_master, plan=plan),
                plan,
                [np.zeros(whole.data.shape, np.uint8)],
                [w.reshape(-1)[start:stop]],
                [start],
                None,
                [1],
            )
            own = codes_of(made[0].reshape(-1), fmt.element.codes_per_byte)
            assert (own[start:stop] == codes[start:stop]).all()


def test_bad_plans():
    four = formats.NVFP4.with_options(four_over_six="mae")
    with pytest.raises(
        ValueError, match=r"cast_master: slices of NVFP4.* cannot be cast: its scales depend on more than amaxes"
    ):
        plan_master([(16, 32)], four)
    with pytest.raises(
        ValueError, match=r"COLUMNWISE.* of FP8_128x128 is not stored in the order of the weight; gather"
    ):
        plan_master([(16, 32)], formats.FP8_128x128, usages=Usage.COLUMNWISE)
    with pytest.raises(ValueError, match=r"of NVFP4 is not stored in the order .* use a format with square blocks"):
        plan_master([(16, 32)], formats.NVFP4, usages=Usage.COLUMNWISE)
    with pytest.raises(ValueError, match=r"cast_master: x \(16, 31\) is not a whole number of 1x32 blocks"):
        plan_master([(16, 31)], formats.MXFP8_E4M3)
    with pytest.raises(ValueError, match=r"cast_master: dtype \(float64\) is not float32"):
        plan_master([(16, 32)], formats.FP8_E4M3, dtype="float64")
    with pytest.raises(ValueError, match=r"cast_master: 1 values .* are not one for each of 2 weights"):
        plan_master([(16, 32), (1, 1)], [formats.FP8_E4M3])
    with pytest.raises(ValueError, match=r"plan_shards: world \(0\) is not positive"):
        plan_shards([(16, 32)], formats.FP8_E4M3, 0)


@every_step
def test_stochastic_rounding_needs_seeds(steps):
    plan = plan_master([(1, 16)], RANDOM)
    with pytest.raises(ValueError, match=r"cast_master: stochastic rounding needs seeds"):
        simulate(steps, plan, [np.ones((1, 16), np.float32)], [[0, 16]])
