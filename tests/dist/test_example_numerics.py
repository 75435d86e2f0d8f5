"""`--log-numerics` of both examples: a record a step, layer and tensor; of weights, the same in both frameworks."""

import json
import subprocess

import pytest

from qshard.numerics import read_log
from qshard.recipes import Role
from support.examples import BATCH, ENVIRONMENT, SMALL, small_command, train_in_jax

STEPS = 2
LAYERS = [f"blocks.{i}.{name}" for i in range(SMALL["layers"]) for name in ("qkv", "projection", "up", "down")]
COUNTS = ("amax", "zeros_made", "subnormal", "saturated", "format", "elements")


def train(script, folder, *options):
    """The log, and what the report has of the runs."""
    log = folder / "log.jsonl"
    given = ("--steps", STEPS, "--batch", BATCH, "--ranks", 2, "--out", folder, "--log-numerics", log, *options)
    command = small_command(f"train_{script}", *given)
    made = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=280)
    assert made.returncode == 0, made.stderr
    return read_log(log), json.loads((folder / f"{script}.json").read_text())


@pytest.mark.slow  # Quick tests compare the log of each framework with the reference.
def test_both_examples_log_the_same_weights(tmp_path):
    """The weights of step 0 are those that both begin with; losses are those of the report.

    PyTorch's is a program, which empties the log first, and trains in bfloat16 too, which logs nothing. JAX trains in
    this process.
    """
    (tmp_path / "log.jsonl").write_text("of another run")
    log, runs = train("torch", tmp_path, "--formats", "bf16,mxfp4")
    losses = {"torch": runs[-1]["losses"], "jax": train_in_jax("mxfp4", steps=STEPS, log=tmp_path / "jax.jsonl").losses}
    logs = {"torch": log, "jax": read_log(tmp_path / "jax.jsonl")}
    for script, log in logs.items():
        assert set(log.layers) == set(LAYERS)
        assert len(log.records()) == STEPS * len(LAYERS) * len(Role)
        assert log.series("loss", LAYERS[0], Role.WEIGHT, run="mxfp4") == dict(enumerate(losses[script]))
    for layer in LAYERS:
        for role in Role:
            rows = [
                next(r for r in log.records() if (r["step"], r["layer"], r["role"]) == (0, layer, role.value))
                for log in logs.values()
            ]
            assert rows[0]["elements"] == rows[1]["elements"]
            assert all(row["sqnr_db"] > 5 and row["amax"] > 0 for row in rows)
            if role is Role.WEIGHT:
                assert [rows[0][name] for name in COUNTS] == [rows[1][name] for name in COUNTS]
                assert rows[0]["sqnr_db"] == pytest.approx(rows[1]["sqnr_db"], rel=1e-4)
            else:  # One element, of blocks that other shards cut otherwise. Ranks have means of their halves.
                halves = 2 if role is Role.GRADIENT else 1
                assert rows[0]["amax"] == pytest.approx(halves * rows[1]["amax"], rel=0.5)


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("torch", ["--formats", "delayed", "--weights", "primary"]),
        ("torch", ["--formats", "fp8", "--weights", "zero"]),
        ("torch", ["--formats", "fp8", "--mesh", "fsdp,tp", "--ranks", "4"]),
        ("jax", ["--formats", "delayed", "--mode", "explicit", "--weights", "primary"]),
        ("jax", ["--formats", "fp8", "--mode", "auto", "--mesh", "fsdp,tp", "--ranks", "4"]),
        ("jax", ["--formats", "bf16,mxfp4"]),
    ],
    ids=str,
)
@pytest.mark.slow
def test_kinds_of_weights_meshes_and_modes(script, options, tmp_path):
    log, _ = train(script, tmp_path, *options)
    assert set(log.layers) == set(LAYERS)
    assert set(log.series("zeros_made", LAYERS[0], Role.GRADIENT)) == set(range(STEPS))
