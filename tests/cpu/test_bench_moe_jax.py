"""The contenders of benchmarks/bench_moe_jax.py, on a small layer and a CPU."""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import bench_moe_jax as bench


def test_contenders():
    """Each gives y and the gradients of x, the router and both weights, near the layer of bfloat16 values."""
    calls = bench.contenders((4, 2, 96, 128, 128))
    want = [np.asarray(t, np.float32) for t in calls[bench.BASE]()]
    assert set(calls) == {bench.BASE, bench.XLA, *(f"{n}{k}" for n in bench.RECIPES for k in ("", " codes"))}
    for name, call in calls.items():
        for made, expected in zip(call(), want, strict=True):
            assert np.linalg.norm(np.asarray(made, np.float32) - expected) < 0.12 * np.linalg.norm(expected), name


def test_rows():
    row = {"kind": "fp8, qwen", "ms": "2.00", "times_bf16": "1.50"}
    assert bench.rows_of({"fp8": 2.0, bench.BASE: 3.0}, "qwen")[0] == row
