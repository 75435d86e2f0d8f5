"""The model of many GPUs: docs/dev/scaling.md is what the rows give, and its law of time, bytes and memory."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import scaling_page
from model_shapes import SHAPES
from scaling_model import PARTS, Anchor, Links, predict, step_megabytes, wire
from tables import read

LINKS = Links(nvlink=2e11, network=4e10, nvlink_hop=1e-6, network_hop=5e-6)
SHAPE = SHAPES["2b"]


def anchor(kind="bf16 compiled", ms=10.0, ranks=2):
    return Anchor(kind, ranks, SHAPE, dict.fromkeys(PARTS, ms), 30 * 2**30)


def test_the_page_is_that_of_the_rows():
    script = scaling_page.PAGE.parents[2] / "benchmarks" / "scaling_model.py"
    command = [sys.executable, str(script), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_a_changed_page_is_found(tmp_path):
    page = tmp_path / "scaling.md"
    page.write_text(scaling_page.PAGE.read_text().replace("| bf16 compiled |", "| bf16 |", 1))
    with pytest.raises(SystemExit, match=r"differs from the rows; run python benchmarks/scaling_model.py"):
        scaling_page.write(page, check=True)
    scaling_page.write(page, check=False)
    scaling_page.write(page, check=True)


@pytest.mark.parametrize(
    "row",
    [row for row in read()["fsdp2"] if row["recipe"] in scaling_page.RECIPES and row["kind"] != "primary"],
    ids=lambda row: f"{row['recipe']} {row['kind']}",
)
def test_bytes_are_those_that_were_counted(row):
    """To a thousandth, and to the digits of the row; the rest are norms and single scales."""
    for name, megabytes in step_megabytes(f"{row['recipe']} {row['kind']}", SHAPE).items():
        assert megabytes == pytest.approx(float(row[f"{name}_MB"]), rel=1e-3, abs=0.06)


def test_rings_and_trees():
    assert LINKS.ring(1e9, 1) == LINKS.all_reduce(1e9, 1) == 0
    assert LINKS.ring(2e9, 8) == pytest.approx(7 / 8 * 2e9 / 2e11 + 7e-6)
    assert LINKS.ring(4e9, 64) == pytest.approx(63 / 64 * 4e9 / 4e10 + 8 * 5e-6 + 55e-6)
    assert LINKS.all_reduce(1e9, 4) == pytest.approx(2 * (3 / 4 * 1e9 / 2e11 + 2e-6))
    assert LINKS.all_reduce(1e9, 4, on_hosts=True) == pytest.approx(2 * (3 / 4 * 1e9 / 4e10 + 10e-6))


def test_a_step_is_the_longer_of_compute_and_communication():
    """One GPU has compute alone; a network that is fast enough adds only its ends; a slow one is all of the time."""
    compute = 10e-3 * (len(PARTS) - 1)
    assert predict(anchor(), SHAPE, 1, LINKS).seconds == pytest.approx(compute + 20e-3)  # the optimizer of two shards
    fast = predict(anchor(), SHAPE, 64, replace(LINKS, network=4e11))
    assert fast.sent_for_compute < 1
    assert fast.seconds == pytest.approx(compute + 10e-3 * 2 / 64 + fast.ends)
    slow = predict(anchor(), SHAPE, 64, replace(LINKS, network=1e9))
    sent = wire("bf16", SHAPE)
    bytes_of_all = SHAPE.layers * (2 * sent.block + sent.gradients) + 2 * sent.root + sent.block + sent.gradients
    assert slow.sent_for_compute > 1
    assert slow.seconds == pytest.approx(63 / 64 * bytes_of_all / 1e9, rel=0.01)


def test_hsdp_sends_only_gradients_between_hosts():
    """A step does not wait for a network on which FSDP2 over all GPUs is slow, and has the memory of one host."""
    found = predict(anchor(), SHAPE, 512, LINKS, group=8)
    assert found.all_reduce == pytest.approx(2 * (63 / 64 * wire("bf16", SHAPE).gradients / 8 / 4e10 + 6 * 5e-6))
    assert found.seconds < predict(anchor(), SHAPE, 512, LINKS).seconds
    assert scaling_page.network_bytes("bf16", SHAPE, 512, 8) < scaling_page.network_bytes("bf16", SHAPE, 512, 0) / 10


def test_memory():
    """The measured peak at its own number of GPUs; with fewer, each weight of a lost shard adds 12 bytes."""
    assert anchor().peak_bytes(SHAPE, 2) == 30 * 2**30
    assert anchor().peak_bytes(SHAPE, 1) == 30 * 2**30 + 6 * SHAPE.weights
    assert SHAPE.weights == pytest.approx(2.2e9, rel=0.01)
    assert SHAPES["8b"].weights == pytest.approx(8.03e9, rel=0.01)


def test_rows_of_more_gpus_are_checked_against_those_of_the_fewest():
    """A row on one GPU becomes the basis; others are predictions, also of the 8 B model and of other tokens."""
    tables = {name: read()[name] for name in ("step_torch", "step_torch_profile", "stream_weights")}
    row, profile = tables["step_torch"][1], tables["step_torch_profile"][1]
    assert row["kind"] == "bf16 compiled"
    rows = {"scaling_torch_1": ("1", "8192"), "scaling_torch_4": ("4", "8192"), "scaling_torch_8b_4": ("4", "4096")}
    for name, (ranks, tokens) in rows.items():
        tables[name] = [{**row, "ranks": ranks, "tokens": tokens}]
        tables[f"{name}_profile"] = [{**profile, "ranks": ranks, "exposed": "0.0"}]
    lines = [line.split(" | ") for line in scaling_page.check(tables).splitlines() if "bf16 compiled" in line]
    assert [(line[0], line[1], line[2]) for line in lines] == [
        ("| 2.0 B, H200", "2", "bf16 compiled"),
        ("| 2.0 B, H200", "1", "bf16 compiled (basis)"),
        ("| 2.0 B, H200", "4", "bf16 compiled"),
        ("| 8 B, H200", "4", "bf16 compiled"),
    ]
    assert lines[1][5] == "+0.0"
    assert 380 < float(lines[3][4]) < 500  # four times the blocks and half of the tokens, but not of the copies
