"""The contenders of benchmarks/bench_moe_jax.py and bench_expert_parallel_jax.py, on a small layer and CPUs."""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import bench_expert_parallel_jax as parallel
import bench_moe_jax as bench

SHAPE = (4, 2, 96, 128, 128)


def assert_near(made, base, name):
    """Compare y and the gradients of x, the router and both weights with those of the layer of bfloat16 values."""
    for a, b in zip(made, base, strict=True):
        a, b = (np.asarray(t, np.float32) for t in (a, b))
        assert np.linalg.norm(a - b) < 0.12 * np.linalg.norm(b), name


@pytest.mark.slow
def test_contenders():
    calls = bench.contenders(SHAPE)
    base = calls[bench.BASE]()
    assert set(calls) == {bench.BASE, bench.XLA, *(f"{n}{k}" for n in bench.RECIPES for k in ("", " codes"))}
    for name, call in calls.items():
        assert_near(call(), base, name)


def test_rows():
    row = {"kind": "fp8, qwen", "ms": "2.00", "times_bf16": "1.50"}
    assert bench.rows_of({"fp8": 2.0, bench.BASE: 3.0}, "qwen")[0] == row


@pytest.mark.slow
def test_contenders_of_expert_parallelism():
    """On two devices; and what GPUs send: codes of x and dy, and values of y and dx."""
    calls = parallel.contenders(SHAPE, parallel.mesh_of(jax.devices()[:2]), capacity=2.0)
    assert_near(calls["fp8 codes"](), calls[bench.BASE](), "fp8 codes")
    rows, width = SHAPE[2] * SHAPE[1], SHAPE[3]
    for name, of_value in ((bench.BASE, 8), ("fp8", 6), ("block", 8)):
        assert parallel.bytes_sent(calls[name], rows) == of_value * rows * width, name
    row = {"kind": "fp8, qwen, 2 GPUs", "ms": "3.00", "times_bf16": "1.50", "wire_mib": "0.5"}
    sent = {"fp8": parallel.MIB // 2, bench.BASE: parallel.MIB}
    assert parallel.rows_of({"fp8": 3.0, bench.BASE: 2.0}, sent, "qwen", 2)[0] == row


@pytest.mark.slow
def test_all_contenders_of_expert_parallelism():
    calls = parallel.contenders(SHAPE, parallel.mesh_of(jax.devices()[:2]), capacity=2.0)
    base = calls[bench.BASE]()
    for name, call in calls.items():
        assert_near(call(), base, name)
