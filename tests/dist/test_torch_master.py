"""`cast_master` on real ranks, beyond what test_master.py, which runs a case of this file, has for both front ends."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

from qshard import formats, reference
from qshard._core.flat_shards import plan_shards
from qshard.formats import Usage
from qshard.torch_bridge import CastPlan, cast_master, gather_slices, quantize, update_columnwise
from support import torch_ranks
from support.awkward import TAME, awkward_values
from support.formats import SLICED
from support.fronts import TorchFront, assert_plane, sliced
from support.torch_ranks import on_ranks


def cuts_masters(planes, weights, cuts, rounded_to):
    """With a plan that serves two steps, and in one reduction for all weights."""
    front, rank = TorchFront(torch_ranks.device), dist.get_rank()
    own = [w.reshape(-1)[cut[rank] : cut[rank + 1]] for w, cut in zip(weights, cuts, strict=True)]
    slices, masters, options = front.slices(planes, own, rounded_to)
    plan, starts, seeds = CastPlan(slices, **options), [cut[rank] for cut in cuts], list(range(len(planes)))
    for _ in range(2):
        with CommDebugMode() as comm:
            cast_master(slices, masters, starts, dist.group.WORLD, **options, seeds=seeds, plan=plan)
        assert comm.get_total_counts() <= 1
    flat = [list(itertools.pairwise(cut)) for cut in cuts]
    whole = gather_slices(slices, flat, dist.group.WORLD)
    for q, want, (fmt, usage, _) in zip(whole, sliced(planes, weights, rounded_to), planes, strict=True):
        assert_plane(front, getattr(q, usage.name.lower()), want, f"{fmt} {usage}")


@on_ranks(2)
def test_no_slices_are_gathered_as_no_weights():
    assert gather_slices([], [], dist.group.WORLD) == []


@on_ranks(1, 2, 4)
def test_whole_weights():
    """ZeRO-1: each rank has all codes, casts its own, and gathers."""
    front = TorchFront(torch_ranks.device)
    world, rank = dist.get_world_size(), dist.get_rank()
    shapes, fmt = [(64, 48), (16, 32), (80, 16)], formats.NVFP4_16x16
    values = [awkward_values(shape, i, kinds=TAME) for i, shape in enumerate(shapes)]
    cuts = plan_shards(shapes, fmt, world)
    weights = [
        quantize(torch.full(shape, float(rank), device=torch_ranks.device), fmt, usage=Usage.BOTH) for shape in shapes
    ]
    starts, stops = zip(*[of_ranks[rank] for of_ranks in cuts], strict=True)
    parts = [w.reshape(-1)[a:b] for w, a, b in zip(values, starts, stops, strict=True)]
    masters = [front.array(part) if part.size else None for part in parts]
    cast_master(weights, masters, starts, dist.group.WORLD, parity="master")
    assert all(q.columnwise is None for q in weights)
    for q, c in zip(weights, cuts, strict=True):
        # Cuts of whole bytes: ranks broadcast theirs.
        flat = q.parts(Usage.ROWWISE).data.view(-1)
        for r, (start, stop) in enumerate(c):
            if stop > start:
                dist.broadcast(flat[start // 2 : stop // 2], r)
    update_columnwise(weights)
    for q, w in zip(weights, values, strict=True):
        expected = reference.quantize(w, fmt, Usage.BOTH)
        assert_plane(front, q.rowwise, expected.rowwise)
        assert_plane(front, q.columnwise, expected.columnwise)


@pytest.mark.timeout(60)
@on_ranks(2)
@pytest.mark.parametrize("empty_ranks", [(0,), (1,), (0, 1)], ids=str)
def test_a_rank_without_any_slice_takes_part(empty_ranks):
    """One collective for all weights; scales are those of the whole on the empty rank too."""
    planes = [(fmt, Usage.ROWWISE, (32, 64)) for fmt in SLICED]
    values = [awkward_values(shape, i, kinds=TAME) for i, (*_, shape) in enumerate(planes)]
    front, nothing = TorchFront("cpu"), [np.zeros(0, np.float32)] * len(planes)
    own = nothing if dist.get_rank() in empty_ranks else [w.reshape(-1) for w in values]
    slices, masters, options = front.slices(planes, own, None)
    with CommDebugMode() as comm:
        cast_master(slices, masters, [0] * len(slices), dist.group.WORLD, **options, seeds=[1] * len(slices))
    assert comm.get_total_counts() == 1
    values = [w * (len(empty_ranks) < 2) for w in values]
    for s, want, (fmt, *_) in zip(slices, sliced(planes, values, None), planes, strict=True):
        assert np.array_equal(front.numpy(s.scale_inv), front.numpy(torch.from_numpy(want.scale_inv))), fmt
