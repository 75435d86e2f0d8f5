"""Flat slices of master weights over NCCL and in CUDA graphs, in as few launches. Bits are in test_master.py."""

import pytest

torch = pytest.importorskip("torch")

from qshard import formats, reference  # noqa: E402
from qshard.formats import Usage  # noqa: E402
from qshard.torch_bridge import CastPlan, cast_master, quantize, update_columnwise  # noqa: E402
from support.awkward import TAME, assert_bits_equal, awkward_values  # noqa: E402
from support.cuda_graphs import capture  # noqa: E402
from support.formats import SQUARES  # noqa: E402
from support.fronts import TorchFront  # noqa: E402
from support.torch_ranks import run  # noqa: E402

FRONT = TorchFront("cuda")


@pytest.mark.parametrize("world", [1, 2])
def test_ranks_over_nccl(world):
    run(world, "dist/test_torch_master.py::test_whole_weights", on="cuda")


def test_a_graph_replays_what_masters_are_then():
    fmts = SQUARES
    weights = [quantize(torch.zeros(64, 96, device="cuda"), fmt, usage=Usage.BOTH) for fmt in fmts]
    masters = [torch.zeros(64 * 96, device="cuda") for _ in fmts]
    starts = torch.zeros(len(fmts), dtype=torch.int64, device="cuda")
    plan = CastPlan(weights, parity="master")

    def step():
        cast_master(weights, masters, starts, parity="master", plan=plan)
        update_columnwise(weights)

    graph, _ = capture(step, warm_up=1)
    values = [awkward_values((64, 96), i, kinds=TAME) for i in range(len(fmts))]
    for m, v in zip(masters, values, strict=True):
        m.copy_(FRONT.array(v).view(-1))
    graph.replay()
    for w, v, fmt in zip(weights, values, fmts, strict=True):
        expected = reference.quantize(v, fmt, Usage.BOTH)
        for usage in Usage:
            got, want = getattr(w, usage.name.lower()), getattr(expected, usage.name.lower())
            assert_bits_equal(FRONT.numpy(got.data), want.data, f"{usage} codes of {fmt}")
            assert_bits_equal(FRONT.numpy(got.scale_inv), want.scale_inv, f"{usage} scales of {fmt}")


def test_launches_do_not_grow_with_the_number_of_weights():
    from torch.profiler import ProfilerActivity, profile

    counts = []
    for n in (4, 200):
        weights = [quantize(torch.zeros(32, 32, device="cuda"), formats.NVFP4_16x16) for _ in range(n)]
        masters = [torch.ones(1024, device="cuda") for _ in range(n)]
        starts = torch.zeros(n, dtype=torch.int64, device="cuda")
        plan = CastPlan(weights, parity="master")
        cast_master(weights, masters, starts, parity="master", plan=plan)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
            cast_master(weights, masters, starts, parity="master", plan=plan)
            torch.cuda.synchronize()
        names = [e.name for e in profiler.events() if "Slices" in e.name]
        counts.append(len(names))
    assert counts == [2, 2], "one for amaxes, one for codes"
