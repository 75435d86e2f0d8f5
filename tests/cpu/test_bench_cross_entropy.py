"""The cross entropy benchmark: its contenders agree, and its rows fit the report."""

import argparse
import csv
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import bench_cross_entropy as bench

REPOSITORY = Path(__file__).parents[2]
TINY = {"rows": 48, "classes": 112, "width": 32}


@pytest.fixture
def quiet_dynamo():
    # Warnings from torch 2.13's own dynamo.
    warnings.filterwarnings("ignore", ".* should not be instantiated", DeprecationWarning)
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)


def assert_alike(made, rtol):
    first, *others = made.values()
    for other in others:
        for mine, its in zip(first, other, strict=True):
            mine, its = (np.asarray(a, np.float32) for a in (mine, its))
            np.testing.assert_allclose(mine, its, rtol=rtol, atol=rtol * np.abs(mine).max())


def test_contenders_of_pytorch_do_the_same(quiet_dynamo):
    torch.manual_seed(0)
    of_losses = bench.draw_logits(TINY["rows"], TINY["classes"])
    of_heads = bench.draw_heads(*TINY.values())
    for found, copies, rtol in ((bench.losses(), of_losses, 2e-2), (bench.heads(), of_heads, 0.2)):  # One is FP8.
        made = {name: bench.both_ways(loss, copies)(1) for name, loss in found.items()}
        assert_alike({name: [part.float() for part in parts] for name, parts in made.items()}, rtol)


def test_contenders_of_jax_do_the_same():
    jax = pytest.importorskip("jax")
    pytest.importorskip("optax")
    with jax.set_mesh(jax.make_mesh((1,), ("a",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])):
        contenders = bench.jax_contenders(*TINY.values())
        contenders.pop("jax copy")
        for words in ("cross", "linear"):
            made = {n: jax.tree.leaves(call(x[0])) for n, (call, x) in contenders.items() if n.startswith(words)}
            assert len(made) == 2
            assert_alike(made, 2e-2)


def test_rows_are_those_of_the_report(tmp_path):
    """Heads have no copy to compare with, and losses no peak of a peer."""
    options = argparse.Namespace(**TINY)
    of_torch = dict.fromkeys(["copy", *names()], 10.0)
    peaks = {name: 1.0 if "qshard" in name else 5.0 for name in of_torch}
    rows = bench.rows_of(of_torch, peaks, options, "copy")
    of_jax = dict.fromkeys(["jax copy", "cross entropy qshard.jax", "linear cross entropy qshard.jax"], 8.0)
    rows += bench.rows_of(of_jax, dict.fromkeys(of_jax, 1.0), options, "jax copy")
    shutil.copytree(REPOSITORY / "benchmarks", tmp_path / "benchmarks")
    for name in ("docs/results.md", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    origin = {"machine": "NVIDIA H200", "commit": "abc", "versions": "torch 2.11.0", "date": "2026-11-23"}
    with (tmp_path / "benchmarks" / "results" / "cross_entropy.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *origin])
        writer.writeheader()
        writer.writerows({**row, **origin} for row in rows)
    script = tmp_path / "benchmarks" / "report.py"
    subprocess.run([sys.executable, str(script)], check=True, capture_output=True)
    text = (tmp_path / "docs/results.md").read_text().partition("## Cross entropy on one GPU")[2].partition("\n## ")[0]
    lines = {line.split(" | ")[0].strip("| "): line for line in text.splitlines()}
    assert "| 48x112 | 10.0 | 1.0 | 150.0 | at least 85.0 %: met; at most 1.00 of" in lines["cross entropy qshard"]
    assert "| 48x32x112 | 10.0 | 1.0 | - |" in lines["linear cross entropy qshard"]
    assert "at most -3 peak_beside_torch_GiB: met" in lines["linear cross entropy FP8 qshard"]
    assert "| 8.0 | 1.0 | - |" in lines["linear cross entropy qshard.jax"]


def names():
    return [*bench.losses(), *bench.heads()]


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench_cross_entropy.py"])
    with pytest.raises(SystemExit) as end:
        bench.main()
    assert end.value.code == 0
    assert "no CUDA device" in capsys.readouterr().err
