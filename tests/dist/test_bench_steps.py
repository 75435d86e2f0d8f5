"""Benchmarks of steps on several ranks: what they measure runs, and one case that fails takes no other with it."""

from __future__ import annotations

import argparse
import csv
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from torch.profiler import ProfilerActivity, profile

from qshard.torch_bridge._ops.eager import may_skip_dispatcher
from support.bench_cases import measure_or_fail
from support.torch_ranks import on_ranks

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import bench_expert_parallel
import bench_grouped
import bench_moe
import bench_step_torch
import bench_stream_weights
import bench_tensor_parallel
import step_profile
from cases import measure_cases
from model_shapes import SHAPES


@pytest.mark.slow
def test_a_case_that_fails_takes_no_other_with_it(tmp_path, capfd):
    arguments = argparse.Namespace(ranks=2, out=str(tmp_path))
    assert measure_cases(measure_or_fail, ["a", "raises", "b", "dies"], arguments, device="cpu") == 1
    for name in ("time", "profile"):
        with (tmp_path / f"{name}.csv").open(newline="") as file:
            assert [(row["kind"], row["of"]) for row in csv.DictReader(file)] == [("a", name), ("b", name)]
    errors = capfd.readouterr().err
    assert "this case cannot be" in errors
    assert errors.endswith("2 of 4 failed: raises, dies\n")
    assert measure_cases(measure_or_fail, ["a"], argparse.Namespace(ranks=1, out=str(tmp_path)), device="cpu") == 0


@on_ranks(2)
@pytest.mark.parametrize(
    "kind",
    [
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in ("bf16", "fp8 fused bf16-states", "fp8 compiled", "fp8 zero", "nvfp4 zero muon")
        ),
        *("delayed primary", "fp8 zero codes", "fp8 muon-fp8"),
    ],
)
def test_kinds_of_steps(kind):
    """Each trains: the loss falls on tokens that are the same in every step."""
    # What dynamo of torch 2.13 does against torch 2.13's own advice.
    warnings.filterwarnings("ignore", ".* should not be instantiated", DeprecationWarning)
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
    step = bench_step_torch.build(kind, SHAPES["tiny"])
    losses = [step().item() for _ in range(4)]
    assert losses[-1] < losses[0] < 10


@pytest.mark.parametrize(
    "kind",
    [
        *("fp7", "fp8 fast", "bf16 primary", "torchao zero", "te-block compiled", "fp8 primary zero", "fp8 zero whole"),
        *("fp8 muon muon-fp8", "fp8 muon-fp8 whole", "fp8 muon-fp8 bf16-states", ""),
    ],
)
def test_kinds_that_are_not_there(kind):
    assert bench_step_torch.wrong_with(kind)


@pytest.mark.parametrize("bench", [bench_step_torch, bench_tensor_parallel])
def test_kinds_by_default_are_there(bench):
    assert not any(bench.wrong_with(kind) for kind in bench.KINDS)


@pytest.mark.parametrize(
    "kind", ["fp7", "fp8 fast", "fp8 async", "bf16 codes", "fp8 codes overlap", "fp8 compiled codes", ""]
)
def test_kinds_of_tensor_parallelism_that_are_not_there(kind):
    assert bench_tensor_parallel.wrong_with(kind)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["bf16", "fp8", "fp8 codes", "block overlap"])
def test_kinds_of_tensor_parallelism(kind):
    step = bench_tensor_parallel.build(kind, replace(SHAPES["tiny"], context=256))
    assert step() == step()


@on_ranks(4)
@pytest.mark.parametrize("kind", ["bf16", pytest.param("fp8 overlap", marks=pytest.mark.slow), "nvfp4 codes"])
def test_kinds_of_tensor_parallelism_under_fsdp2(kind):
    """Weights are gathered over the groups, and y is the same as without FSDP2."""
    shape = replace(SHAPES["tiny"], context=128)
    step = bench_tensor_parallel.build(kind, shape, 2)
    assert step() == step()


def test_a_profile_leaves_qshard_its_fast_way():
    with profile(activities=[ProfilerActivity.CPU], acc_events=True):
        assert not may_skip_dispatcher([])
        with step_profile.host_as_without_profiler():
            assert may_skip_dispatcher([])
        assert not may_skip_dispatcher([])


def test_contenders_of_experts():
    """Each gives gradients of x and of all weights, near those of bfloat16."""
    calls = bench_grouped.contenders(bench_grouped.Shape(4, 64, 128, 256))
    expected = calls[bench_grouped.BASE]()
    assert {name.split(",")[0] for name in calls} == {"bf16 torch", *bench_grouped.RECIPES}
    for call in calls.values():
        for a, b in zip(call(), expected, strict=True):
            assert a.shape == b.shape
            assert (a - b).float().norm() < 0.1 * b.float().norm()
    found = bench_grouped.rows_of(dict.fromkeys(calls, 2.0) | {bench_grouped.BASE: 3.0}, "small")
    assert found[1] == {"kind": "small: one scale, codes, device", "ms": "2.00", "times_bf16": "1.50"}


def test_contenders_of_whole_layers():
    """Each gives gradients of x, the router and all weights, near those of bfloat16."""
    calls = bench_moe.contenders(bench_moe.Shape(4, 2, 96, 128, 128))
    expected = calls[bench_moe.BASE]()
    kinds = {f"{name}{codes}" for name in bench_moe.RECIPES for codes in ("", " codes")}
    assert {*calls} >= {bench_moe.BASE, bench_moe.PLAIN, *kinds}
    for name, call in calls.items():
        for a, b in zip(call(), expected, strict=True):
            assert a.shape == b.shape
            assert (a - b).float().norm() < 0.12 * b.float().norm(), name
    found = bench_moe.rows_of(dict.fromkeys(calls, 2.0) | {bench_moe.BASE: 3.0}, "mixtral")
    assert found[1] == {"kind": "bf16 plain, mixtral", "ms": "2.00", "times_bf16": "1.50"}


@on_ranks(2)
def test_contenders_of_expert_parallelism():
    """Each gives gradients near those of bfloat16. With one scale, half of the rows are sent as codes."""
    calls = bench_expert_parallel.contenders(bench_moe.Shape(4, 2, 96, 128, 128))
    expected = calls[bench_moe.BASE]()
    for name, call in calls.items():
        for a, b in zip(call(), expected, strict=True):
            assert (a - b).float().norm() < 0.12 * b.float().norm(), name
    sent = {name: bench_expert_parallel.bytes_sent(call) for name, call in calls.items()}
    assert 0.7 * sent[bench_moe.BASE] < sent["fp8"] < 0.8 * sent[bench_moe.BASE]
    assert sent["block"] == sent[bench_moe.BASE]
    found = bench_expert_parallel.rows_of(dict.fromkeys(calls, 2.0), sent, "mixtral")
    assert found[1]["kind"] == "fp8, mixtral, 2 GPUs"
    assert found[1]["times_bf16"] == "1.00"


@on_ranks(2)
def test_streams_of_weights():
    """A stream has at least the bytes of its codes; the base gathers as many; rows have the ratio."""
    model = bench_stream_weights.model_of(bench_stream_weights.Shape(1, 128, 256))
    found = bench_stream_weights.contenders(model, 2**16, 1)
    elements = 4 * 128 * 128 + 3 * 128 * 256
    for kind, fmt in bench_stream_weights.KINDS.items():
        nbytes = found[kind].nbytes
        assert elements * (0.5 if fmt == "NVFP4" else 1) < nbytes < elements * 1.2
        assert 0 <= found[f"all-gather of {kind}"].nbytes - nbytes < 2
    row = bench_stream_weights.rows_of(found)[0]
    assert row["kind"] == "deepseek FP8_128x128, 2 GPUs"
    assert float(row["gb_per_s"]) >= 0
