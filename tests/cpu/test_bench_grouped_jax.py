"""The contenders of benchmarks/bench_grouped_jax.py, on a small layer and a CPU."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import bench_grouped_jax as bench


@pytest.mark.slow
def test_contenders():
    """Each gives y and the gradients of x and w, near the product of bfloat16 values."""
    calls = bench.contenders(bench.Shape(experts=4, tokens=64, width=128, hidden=256))
    want = [np.asarray(t, np.float32) for t in calls[bench.BASE]()]
    kinds = {f"{name}{kind}" for name in bench.RECIPES for kind in ("", " codes", " gathered")}
    assert set(calls) == {bench.BASE, bench.XLA, *kinds}
    for name, call in calls.items():
        y, dx, dw = (np.asarray(t, np.float32) for t in call())
        dw = dw.swapaxes(1, 2) if name == bench.XLA else dw
        for made, expected in zip((y, dx, dw), want, strict=True):
            assert np.linalg.norm(made - expected) < 0.1 * np.linalg.norm(expected), name


def test_rows():
    assert bench.rows_of({"fp8": 2.0, bench.BASE: 3.0}, "qwen")[0] == {
        "kind": "fp8",
        "shape": "qwen",
        "ms": "2.00",
        "times_bf16": "1.50",
    }


def test_times():
    """Slow contenders run once per round."""
    counts, times = [], {"slow": 100.0, "fast": 1.0}

    def timed(call, count):
        counts.append(count)
        return times[call()]

    ms = bench.milliseconds({"slow": lambda: "slow", "fast": lambda: "fast"}, 2, timed)
    assert ms == {"slow": 100.0, "fast": 1.0}
    assert counts == [1, 1, 1, 1, 1, bench.CALLS, 1, bench.CALLS]
