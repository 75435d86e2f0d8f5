"""examples/train_torch.py: kinds of weights, meshes, and runs resumed from a checkpoint."""

import json
import os
import signal
import subprocess
import time

import pytest

from support.examples import BATCH, ENVIRONMENT, small_command

STEPS = 6


def start(folder, *options):
    """Start the program with a small model."""
    return subprocess.Popen(
        small_command("train_torch", "--steps", STEPS, "--batch", BATCH, "--out", folder, *options),
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def train(folder, *options):
    """Run the example and return its report."""
    process = start(folder, *options)
    errors = process.communicate(timeout=240)[1]
    assert process.returncode == 0, errors
    (run,) = json.loads((folder / "torch.json").read_text())
    return run


def kill_once_saved(folder, steps, *options):
    """Kill all processes of a run with SIGKILL as soon as `steps` finds a checkpoint."""
    process = start(folder, *options)
    try:
        deadline = time.monotonic() + 240
        while not list(steps()):
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stderr.close()


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    """Return an uninterrupted run of each kind, cached."""
    runs = {}

    def of(kind, recipe):
        if (kind, recipe) not in runs:
            folder = tmp_path_factory.mktemp("untouched")
            runs[kind, recipe] = train(folder, "--weights", kind, "--formats", recipe)
        return runs[kind, recipe]

    return of


@pytest.mark.slow  # test_example_torch_kinds.py tests it on ranks that run already.
def test_kinds_gather_the_same_bytes(untouched):
    """Masters of all kinds start with the same bits; both FSDP2 kinds have the same losses too."""
    shard, primary, zero = (untouched(kind, "nvfp4") for kind in ("shard", "primary", "zero"))
    assert shard["gathered_sha256"] == primary["gathered_sha256"] == zero["gathered_sha256"] != ""
    assert shard["losses"] == primary["losses"]
    assert zero["losses"] == pytest.approx(shard["losses"], rel=0.02)
    assert shard["resident_bytes"] < primary["resident_bytes"] < 1.1 * shard["resident_bytes"]


@pytest.mark.slow  # test_example_torch_kinds.py resumes on ranks that run already; test_example_jax.py kills a run.
@pytest.mark.parametrize(
    ("kind", "recipe"), [("primary", "nvfp4"), ("shard", "delayed"), ("zero", "delayed"), ("zero", "nvfp4")]
)
def test_a_killed_run_goes_on_with_the_same_losses(kind, recipe, untouched, tmp_path):
    """Bit for bit, from the last complete checkpoint, with a partial one present."""
    saved = tmp_path / "saved"
    options = ["--weights", kind, "--formats", recipe, "--checkpoint", saved, "--every", "1"]
    kill_once_saved(tmp_path, lambda: saved.glob(f"{recipe}/step-?"), *options)
    done = [path.name for path in (saved / recipe).glob("step-?")]
    assert done
    assert f"step-{STEPS}" not in done
    (saved / recipe / f"step-{STEPS}.partial").mkdir(exist_ok=True)
    resumed = train(tmp_path, *options, "--resume")
    assert resumed["losses"] == untouched(kind, recipe)["losses"]
    assert resumed["validation"] == untouched(kind, recipe)["validation"]
    assert resumed["gathered_sha256"] == untouched(kind, recipe)["gathered_sha256"]
    assert [path.name for path in (saved / recipe).iterdir()] == [f"step-{STEPS}"]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["hsdp", "fsdp,tp"])
def test_meshes(mesh, untouched, tmp_path):
    """Weights do not depend on the sharding, so the first loss is near that of two ranks."""
    run = train(tmp_path, "--mesh", mesh, "--ranks", "4", "--formats", "mxfp8")
    two = untouched("shard", "mxfp8")
    assert run["losses"] == pytest.approx(two["losses"], rel=0.02)
    assert run["gathered_sha256"] == two["gathered_sha256"]
