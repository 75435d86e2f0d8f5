"""examples/train_jax.py: modes, meshes, and runs resumed from its own checkpoints and from train_torch.py's."""

import contextlib
import functools
import importlib.util
import json
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from qshard.recipes import DelayedScaling
from support import torch_ranks
from support.awkward import assert_bits_equal
from support.examples import (
    BATCH,
    ENVIRONMENT,
    Stopped,
    digest_of,
    example,
    initial_weights,
    small_command,
    train_in_jax,
)
from support.observe import calls_of

RECIPES = list(example("options").RECIPES)
saves = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("orbax", "safetensors"))), reason="what saves is not installed"
)


trained = functools.cache(train_in_jax)  # A run takes seconds to compile and serves several tests.


def assert_same_bytes(runs):
    first, *others = runs
    assert first.gathered_sha256 != ""
    for run in others:
        assert run.gathered_sha256 == first.gathered_sha256
        # Activations may have a scale for each device, and sums another order.
        assert run.losses == pytest.approx(first.losses, rel=0.02)


MESHES = [("shard_map", "fsdp"), ("auto", "fsdp,tp"), ("explicit", "hsdp")]


@pytest.mark.slow
def test_all_modes_and_meshes_gather_the_same_bytes():
    assert_same_bytes([trained("fp8", mode, mesh, 4) for mode, mesh in MESHES])


@pytest.mark.slow
def test_primary_weights_have_the_same_losses():
    """Codes quantized once a step are those that each gather would quantize."""
    shard, primary = trained("fp8", *MESHES[2], 4), trained("fp8", *MESHES[2], 4, kind="primary")
    assert primary.gathered_sha256 == shard.gathered_sha256
    assert primary.losses == shard.losses
    assert shard.resident_bytes < primary.resident_bytes < 1.1 * shard.resident_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "mesh"), [pytest.param(*each, marks=[pytest.mark.slow] * (each != MESHES[0])) for each in MESHES]
)
def test_a_fused_loss_is_the_loss(mode, mesh):
    # Sums over two axes have another order. With one scale a tensor, and E5M2, their last bits grow within a step.
    name = "mxfp8" if mesh == "fsdp,tp" else "fp8"
    plain, fused = trained(name, mode, mesh, 4), trained(name, mode, mesh, 4, loss="fused")
    assert fused.gathered_sha256 == plain.gathered_sha256
    assert fused.losses == pytest.approx(plain.losses, rel=1e-4)
    assert "--loss fused" in fused.ranks


EXPERTS = 3


@functools.cache
def loss_in_bf16():
    return trained("bf16", steps=1, experts=EXPERTS).losses[0]


@pytest.mark.parametrize(
    ("name", "mode", "mesh"),
    [
        # Its shards end within blocks. test_the_other_framework_goes_on and test_example_experts.py train experts too.
        pytest.param("block", "shard_map", "fsdp", marks=pytest.mark.slow),
        pytest.param("fp8", "auto", "hsdp", marks=pytest.mark.slow),
        pytest.param("bf16", "shard_map", "hsdp", marks=pytest.mark.slow),
        *(
            pytest.param(name, mode, mesh, marks=pytest.mark.slow)
            for name in RECIPES[1:]
            for mode, mesh in (("shard_map", "hsdp"), ("auto", "fsdp"))
        ),
    ],
)
def test_experts(name, mode, mesh):
    """Each device sorts its own tokens, or XLA all of them; the gathered bytes are PyTorch's."""
    run = trained(name, mode, mesh, 4, steps=1, experts=EXPERTS)
    recipe = example("options").RECIPES[name]
    if not isinstance(recipe, DelayedScaling):
        assert run.gathered_sha256 == digest_of(initial_weights(EXPERTS), recipe)
    assert run.losses[0] == pytest.approx(loss_in_bf16(), rel=0.02)
    assert f"--experts {EXPERTS}" in run.ranks


@pytest.mark.slow  # test_the_other_framework_goes_on trains them too.
def test_experts_of_primary_weights():
    """With a scale for each expert, from earlier steps."""
    shard, primary = (trained("delayed", kind=kind, experts=EXPERTS) for kind in ("shard", "primary"))
    assert primary.gathered_sha256 == shard.gathered_sha256
    assert primary.losses == shard.losses


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RECIPES if name != "nvfp4"])  # Its rotation needs 16 rows a device.
def test_every_recipe_in_every_mode_on_every_mesh(name):
    runs = [
        trained(name, mode, mesh, 4)
        for mode in ("shard_map", "auto", "explicit")
        for mesh in ("fsdp", "hsdp", "fsdp,tp")
        if (mode, mesh) != ("shard_map", "fsdp,tp")
    ]
    assert_same_bytes(runs)
    auto, explicit = (trained(name, mode) for mode in ("auto", "explicit"))
    assert auto.losses == pytest.approx(explicit.losses, rel=1e-6)
    halves = {run.resident_bytes for run in runs if "hsdp" in run.ranks}
    assert min(halves) > 1.9 * runs[0].resident_bytes  # Half as many devices share a weight.


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "mesh"), [("shard_map", "hsdp"), ("auto", "fsdp"), ("explicit", "fsdp,tp")])
@pytest.mark.parametrize("name", RECIPES[1:])
def test_primary_weights_of_every_recipe(name, mode, mesh):
    shard, primary = (trained(name, mode, mesh, 4, kind=kind) for kind in ("shard", "primary"))
    assert primary.losses == shard.losses
    assert primary.gathered_sha256 == shard.gathered_sha256


def start(folder, *options):
    """Start the program with a small model."""
    command = small_command("train_jax", "--steps", 6, "--batch", BATCH, "--ranks", 2, "--out", folder, *options)
    # Programs of one test compile the same step.
    cache = {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    return subprocess.Popen(
        command, env=ENVIRONMENT | cache, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def reported(folder, *options):
    process = start(folder, *options)
    errors = process.communicate(timeout=240)[1]
    assert process.returncode == 0, errors
    (run,) = json.loads((folder / "jax.json").read_text())
    return run


@pytest.mark.slow
@saves
@pytest.mark.parametrize(
    ("name", "mode", "kind"),
    [
        ("delayed", "shard_map", "shard"),
        pytest.param("nvfp4", "auto", "shard", marks=pytest.mark.slow),
        pytest.param("fp8", "explicit", "primary", marks=pytest.mark.slow),
        pytest.param("delayed", "auto", "primary", marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_goes_on_with_the_same_losses(name, mode, kind, tmp_path):
    """Bit for bit, from the last complete checkpoint, with a partial one present."""
    saved = tmp_path / "saved"
    options = ["--formats", name, "--mode", mode, "--weights", kind]
    untouched = trained(name, mode, kind=kind, steps=6)
    options += ["--checkpoint", saved, "--every", "1"]
    process = start(tmp_path, *options)
    try:
        deadline = time.monotonic() + 240
        while not list(saved.glob(f"{name}/step-?")):
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stderr.close()
    done = [path.name for path in (saved / name).glob("step-?")]
    assert done
    assert "step-6" not in done
    (saved / name / "step-6.partial" / "arrays").mkdir(parents=True, exist_ok=True)
    resumed = reported(tmp_path, *options, "--resume")
    assert resumed["losses"] == untouched.losses
    assert resumed["validation"] == [list(point) for point in untouched.validation]
    assert resumed["gathered_sha256"] == untouched.gathered_sha256
    assert [path.name for path in (saved / name).iterdir()] == ["step-6"]


@saves
@pytest.mark.slow
def test_a_run_goes_on_with_other_devices(tmp_path):
    """Orbax restores onto the new mesh; the weights have the saved bits."""
    with pytest.raises(Stopped):
        trained("fp8", "auto", "fsdp", 2, steps=4, folder=tmp_path, stops=2)
    want = whole_of(tmp_path, "fp8")
    with loaded("checkpoint_jax") as seen:
        trained("fp8", "explicit", "fsdp,tp", 4, steps=4, folder=tmp_path, resume=True)
    assert_same(seen[0], want)


def whole_of(folder, name):
    """Load the last checkpoint's file for the other framework."""
    from safetensors.numpy import load_file

    return load_file(max((folder / name).glob("step-?")) / "whole.safetensors")


@contextlib.contextmanager
def loaded(name):
    """Record the training state of a script right after it loads a checkpoint, as it would save it."""
    module, seen = example(name), []

    def record(call):
        state = call.result[2:] or [*call.arguments.values()][1:3]
        whole = module._whole(*state)
        seen.append({f"{name}:{part}": np.array(a) for name, parts in whole.items() for part, a in parts.items()})

    with calls_of(module.load, record):
        yield seen


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name, array in want.items():
        assert_bits_equal(got[name], array, name)


def resume_in_torch(name, folder, want, kind, experts):
    """Resume JAX's step-2 checkpoint on each rank and train to step 4."""
    import torch.distributed as dist

    module = importlib.util.spec_from_file_location("kinds", Path(__file__).with_name("test_example_torch_kinds.py"))
    kinds = importlib.util.module_from_spec(module)
    module.loader.exec_module(kinds)
    with loaded("checkpoint_torch") as seen, pytest.raises(Stopped):
        kinds.trained(name, kind, steps=6, folder=folder, resume=True, stops=4, experts=experts)
    if dist.get_rank() == 0:
        assert_same(seen[0], want)


@pytest.mark.slow
@saves
@pytest.mark.parametrize(
    ("name", "kind", "experts"),
    [
        ("delayed", "primary", EXPERTS),
        pytest.param("delayed", "shard", 0, marks=pytest.mark.slow),
        pytest.param("nvfp4", "primary", 0, marks=pytest.mark.slow),
        pytest.param("fp8", "shard", 0, marks=pytest.mark.slow),
        pytest.param("mxfp8", "zero", 0, marks=pytest.mark.slow),
        pytest.param("fp8", "shard", EXPERTS, marks=pytest.mark.slow),
    ],
)
def test_the_other_framework_goes_on(name, kind, experts, tmp_path):
    """From JAX to PyTorch and back: weights, moments and scales keep their bytes, and so do their codes."""
    ours = "primary" if kind == "primary" else "shard"
    with pytest.raises(Stopped):
        trained(name, steps=6, folder=tmp_path, stops=2, kind=ours, experts=experts)
    given = {"name": name, "folder": tmp_path, "want": whole_of(tmp_path, name), "kind": kind, "experts": experts}
    torch_ranks.run(2, resume_in_torch, **given)
    want = whole_of(tmp_path, name)
    with loaded("checkpoint_jax") as seen:
        run = trained(name, steps=6, folder=tmp_path, resume=True, kind=ours, experts=experts)
    assert_same(seen[0], want)
    assert (run.first_step, len(run.losses)) == (5, 6)
    recipe = example("options").RECIPES[name]
    if not isinstance(recipe, DelayedScaling):  # Delayed scales come from earlier steps.
        assert run.losses == pytest.approx(
            trained(name, steps=6, experts=experts).losses, rel=0.02 if not experts else 0.1
        )
        weights = {key.removesuffix(":weight"): array for key, array in want.items() if key.endswith(".weight:weight")}
        assert run.gathered_sha256 == digest_of(weights, recipe)


@saves
@pytest.mark.slow  # tests/cpu/test_jax_muon.py loads checkpoints, and PyTorch's example resumes with Muon.
@pytest.mark.parametrize("kind", ["shard", "primary"])
def test_a_resumed_run_with_muon_has_the_same_losses(kind, tmp_path):
    options = {"kind": kind, "steps": 3, "optimizer": "muon"}
    whole = train_in_jax("fp8", *MESHES[0], **options)
    with pytest.raises(Stopped):
        train_in_jax("fp8", *MESHES[0], folder=tmp_path, stops=2, **options)
    again = train_in_jax("fp8", *MESHES[0], folder=tmp_path, resume=True, stops=0, **options)
    assert again.losses == whole.losses
