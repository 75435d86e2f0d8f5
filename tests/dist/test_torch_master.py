"""`cast_master` on real ranks: the law for flat slices, with one collective, which no rank ever skips."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

from qshard import formats, reference
from qshard.formats import Usage
from qshard.master import FlatShards, plan_shards
from qshard.torch_bridge import (
    CastPlan,
    QuantizedSlice,
    cast_master,
    gather_slices,
    quantize,
    update_columnwise,
)
from support import torch_ranks
from support.awkward import KINDS, TAME, assert_bits_equal, awkward_values
from support.fronts import TorchFront
from support.torch_ranks import run

FRONT = TorchFront("cpu")
RANDOM = formats.NVFP4.with_options(rounding="stochastic")
WEIGHTS = [
    (formats.FP8_E4M3, (33, 45), Usage.ROWWISE),
    (formats.NVFP4_16x16, (32, 48), Usage.ROWWISE),
    (formats.FP8_128x128, (130, 70), Usage.ROWWISE),
    (formats.MXFP8_32x32, (64, 32), Usage.ROWWISE),
    (formats.NVFP4_16x16, (16, 16), Usage.ROWWISE),
    (formats.MXFP8_E5M2, (32, 64), Usage.COLUMNWISE),
    (RANDOM, (3, 48), Usage.ROWWISE),
    (formats.NVFP4.with_options(global_scale="row"), (5, 32), Usage.ROWWISE),
    (formats.FP8_1x128, (3, 300), Usage.ROWWISE),
    (formats.FP8_E5M2, (1, 1), Usage.ROWWISE),
]
SEEDS = [2**40 + i for i in range(len(WEIGHTS))]


def uneven(size, world, seed):
    """Cuts at odd places. One rank has nothing of any weight, if there are several."""
    rng = np.random.default_rng(seed)
    inner = sorted(int(c) for c in rng.integers(0, size + 1, max(0, world - 2)))
    empty = [inner[0] if inner else size] if world > 1 else []
    bounds = [0, *sorted([*inner, *empty]), size]
    return FlatShards(tuple(bounds[:-1]), tuple(bounds[1:]), size, True)


def masters_of(values, cuts, dtype=torch.float32):
    rank = dist.get_rank()
    parts = [
        FRONT.array(w.reshape(-1)[c.starts[rank] : c.stops[rank]]).to(torch_ranks.device, dtype)
        for w, c in zip(values, cuts, strict=True)
    ]
    return [p if p.numel() else None for p in parts], [c.starts[rank] for c in cuts]


def assert_weight(q, w, fmt, usage, seed=0):
    expected = getattr(reference.quantize(w, fmt, usage, seed=seed), usage.name.lower())
    plane = getattr(q, usage.name.lower())
    assert_bits_equal(FRONT.numpy(plane.data), expected.data, f"codes of {fmt}")
    assert_bits_equal(FRONT.numpy(plane.scale_inv), expected.scale_inv, f"scales of {fmt}")
    if expected.global_scale_inv is not None:
        assert_bits_equal(FRONT.numpy(plane.global_scale_inv), expected.global_scale_inv, f"global scale of {fmt}")


def cast_pieces(parity, kinds, dtype="float32"):
    values = [awkward_values(shape, i, np.dtype(dtype), kinds=kinds) for i, (_, shape, _) in enumerate(WEIGHTS)]
    cuts = [uneven(w.size, dist.get_world_size(), i) for i, w in enumerate(values)]
    dtype = getattr(torch, dtype)
    masters, starts = masters_of(values, cuts, dtype)
    slices = [
        QuantizedSlice.empty(fmt, shape, c.stops[dist.get_rank()] - start, usage=usage, device=torch_ranks.device)
        for (fmt, shape, usage), c, start in zip(WEIGHTS, cuts, starts, strict=True)
    ]
    plan = CastPlan(slices, parity=parity, dtype=dtype)
    for _ in range(2):
        cast_master(slices, masters, starts, dist.group.WORLD, parity=parity, dtype=dtype, seeds=SEEDS, plan=plan)
    whole = gather_slices(slices, cuts, dist.group.WORLD)
    for q, w, (fmt, _, usage), seed in zip(whole, values, WEIGHTS, SEEDS, strict=True):
        assert_weight(q, w if parity == "master" else w.astype("bfloat16"), fmt, usage, seed)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("parity", ["master", "model"])
def test_gathered_slices_are_the_whole(world, parity):
    """Cuts of rows, blocks and bytes; ranks with nothing."""
    run(world, cast_pieces, parity=parity, kinds=TAME)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_awkward_masters(dtype):
    """A NaN or an infinity that one rank has reaches the scales of all."""
    run(3, cast_pieces, parity="master", kinds=KINDS, dtype=dtype)


def cast_whole_weights():
    """ZeRO-1: each rank has all codes, casts its own, and gathers."""
    world, rank = dist.get_world_size(), dist.get_rank()
    shapes, fmt = [(64, 48), (16, 32), (80, 16)], formats.NVFP4_16x16
    values = [awkward_values(shape, i, kinds=TAME) for i, shape in enumerate(shapes)]
    cuts = plan_shards(shapes, fmt, world)
    weights = [
        quantize(torch.full(shape, float(rank), device=torch_ranks.device), fmt, usage=Usage.BOTH) for shape in shapes
    ]
    masters, starts = masters_of(values, cuts)
    cast_master(weights, masters, starts, dist.group.WORLD, parity="master")
    assert all(q.columnwise is None for q in weights)
    for q, c in zip(weights, cuts, strict=True):
        # Cuts of whole bytes: ranks broadcast theirs.
        flat = q.parts(Usage.ROWWISE).data.view(-1)
        for r in range(world):
            if c.stops[r] > c.starts[r]:
                dist.broadcast(flat[c.starts[r] // 2 : c.stops[r] // 2], r)
    update_columnwise(weights)
    for q, w in zip(weights, values, strict=True):
        assert_weight(q, w, fmt, Usage.ROWWISE)
        assert_weight(q, w, fmt, Usage.COLUMNWISE)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_whole_weights(world):
    run(world, cast_whole_weights)


def count_collectives(empty_rank):
    values = [awkward_values(shape, i, kinds=TAME) for i, (_, shape, _) in enumerate(WEIGHTS)]
    slices = [QuantizedSlice.empty(fmt, shape, 0, usage=usage) for fmt, shape, usage in WEIGHTS]
    masters: list[torch.Tensor | None] = [None] * len(slices)
    if dist.get_rank() != empty_rank:
        masters = [FRONT.array(w).view(-1) for w in values]
        slices = [QuantizedSlice.empty(fmt, s, w.size, usage=u) for (fmt, s, u), w in zip(WEIGHTS, values, strict=True)]
    with CommDebugMode() as comm:
        cast_master(slices, masters, [0] * len(slices), dist.group.WORLD, parity="master", seeds=SEEDS)
    assert comm.get_total_counts() == 1
    for s, w, (fmt, _, usage) in zip(slices, values, WEIGHTS, strict=True):
        expected = getattr(reference.quantize(w, fmt, usage), usage.name.lower())
        assert_bits_equal(s.scale_inv.numpy(), expected.scale_inv, f"scales of {fmt}")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("empty_rank", [0, 1])
def test_a_rank_without_any_slice_takes_part(empty_rank):
    """One collective for all weights; scales are those of the whole on the empty rank too."""
    run(2, count_collectives, empty_rank=empty_rank)


def empty_on_all_ranks():
    slices = [QuantizedSlice.empty(fmt, shape, 0, usage=usage) for fmt, shape, usage in WEIGHTS]
    cast_master(slices, [None] * len(slices), [0] * len(slices), dist.group.WORLD, parity="model", seeds=SEEDS)
    for s, (fmt, shape, usage) in zip(slices, WEIGHTS, strict=True):
        expected = getattr(reference.quantize(np.zeros(shape, np.float32), fmt, usage), usage.name.lower())
        assert_bits_equal(s.scale_inv.numpy(), expected.scale_inv, f"scales of {fmt}")


def test_nothing_anywhere():
    run(2, empty_on_all_ranks)
