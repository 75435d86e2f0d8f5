"""examples/train_jax.py: modes, meshes, and runs resumed from its own checkpoints and from train_torch.py's."""

import functools
import importlib.util
import json
import signal
import subprocess
import time
from argparse import Namespace

import jax
import numpy as np
import pytest

from qshard.recipes import DelayedScaling
from support import torch_ranks
from support.awkward import assert_bits_equal
from support.examples import (
    BATCH,
    ENVIRONMENT,
    TEXT,
    Stopped,
    assert_refused,
    digest_of,
    example,
    initial_weights,
    refusals,
    small,
    small_command,
    text,
)

RECIPES = list(example("options").RECIPES)
saves = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("orbax", "safetensors"))), reason="what saves is not installed"
)


class Progress:
    def __getattr__(self, name):
        return lambda *values: None


@functools.cache  # A run takes seconds to compile and serves several tests.
def trained(
    name,
    mode="shard_map",
    mesh="fsdp",
    ranks=2,
    steps=2,
    folder=None,
    resume=False,
    stops=None,
    kind="shard",
    loss="plain",
    experts=0,
):
    """Run the training; it may stop before a step."""
    script, modes = small("train_jax"), example("modes")
    arguments = Namespace(steps=steps, batch=BATCH, weights=kind, mesh=mesh, mode=mode, loss=loss, experts=experts)
    arguments.log_numerics = None
    arguments.checkpoint, arguments.every, arguments.resume = folder, 2, resume
    with jax.set_mesh(modes.make_mesh(mesh, mode, jax.devices()[:ranks])):
        return script.train(name, text(script, stops), arguments, Progress())


def assert_same_bytes(runs):
    first, *others = runs
    assert first.gathered_sha256 != ""
    for run in others:
        assert run.gathered_sha256 == first.gathered_sha256
        # Activations may have a scale for each device, and sums another order.
        assert run.losses == pytest.approx(first.losses, rel=0.02)


def test_all_modes_gather_the_same_bytes():
    runs = [trained("fp8", mode) for mode in ("shard_map", "auto", "explicit")]
    assert_same_bytes(runs)
    assert runs[1].losses == pytest.approx(runs[2].losses, rel=1e-6)


def test_primary_weights_have_the_same_losses():
    """Codes quantized once a step are those that each gather would quantize."""
    shard, primary = trained("fp8", "explicit"), trained("fp8", "explicit", kind="primary")
    assert primary.gathered_sha256 == shard.gathered_sha256
    assert primary.losses == shard.losses
    assert shard.resident_bytes < primary.resident_bytes < 1.1 * shard.resident_bytes


MESHES = [("shard_map", "fsdp"), ("auto", "fsdp,tp"), ("explicit", "hsdp")]


@pytest.mark.parametrize(
    ("mode", "mesh"), [pytest.param(*each, marks=[pytest.mark.slow] * (each != MESHES[0])) for each in MESHES]
)
def test_a_fused_loss_is_the_loss(mode, mesh):
    plain, fused = (trained("mxfp8", mode, mesh, 2 if mesh == "fsdp" else 4, loss=loss) for loss in ("plain", "fused"))
    assert fused.gathered_sha256 == plain.gathered_sha256
    assert fused.losses == pytest.approx(plain.losses, rel=1e-4)
    assert "--loss fused" in fused.ranks


def test_meshes_gather_the_same_bytes():
    assert_same_bytes([trained("mxfp8", mode, mesh, 4, loss="plain") for mode, mesh in MESHES[1:]])


EXPERTS = 3


@functools.cache
def loss_in_bf16():
    return trained("bf16", steps=1, experts=EXPERTS).losses[0]


@pytest.mark.parametrize(
    ("name", "mode", "mesh"),
    [
        ("block", "shard_map", "fsdp"),  # its shards end within blocks
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
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_in_every_mode_on_every_mesh(name):
    runs = [
        trained(name, mode, mesh, 4)
        for mode in ("shard_map", "auto", "explicit")
        for mesh in ("fsdp", "hsdp", "fsdp,tp")
        if (mode, mesh) != ("shard_map", "fsdp,tp")
    ]
    assert_same_bytes(runs)
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
    untouched = reported(tmp_path, *options)
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
    for what in ("losses", "validation", "gathered_sha256"):
        assert resumed[what] == untouched[what]
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


class loaded:
    """Record the training state of a script right after it loads a checkpoint, as it would save it."""

    def __init__(self, name):
        self.module, self.load = example(name), example(name).load

    def __enter__(self):
        seen = []

        def load(path, *rest):
            made = self.load(path, *rest)
            whole = self.module._whole(*(rest[:2] if len(made) == 2 else made[2:]))
            seen.append({f"{name}:{part}": np.array(a) for name, parts in whole.items() for part, a in parts.items()})
            return made

        self.module.load = load
        return seen

    def __exit__(self, *error):
        self.module.load = self.load


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name, array in want.items():
        assert_bits_equal(got[name], array, name)


def resume_in_torch(name, folder, want, kind, experts):
    """Resume JAX's step-2 checkpoint on each rank and train to step 4."""
    import torch.distributed as dist

    module = importlib.util.spec_from_file_location("kinds", TEXT)
    kinds = importlib.util.module_from_spec(module)
    module.loader.exec_module(kinds)
    with loaded("checkpoint_torch") as seen, pytest.raises(Stopped):
        kinds.trained(name, kind, steps=6, folder=folder, resume=True, stops=4, experts=experts)
    if dist.get_rank() == 0:
        assert_same(seen[0], want)


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


REFUSED = {
    "--mode shard_map --mesh fsdp,tp": "--mesh fsdp,tp is not for --mode shard_map, whose program would have to say it",
    "--experts 4 --mode explicit": "--experts 4 is not for --mode explicit: JAX types no ragged product; give",
    "--experts 4 --mode auto --mesh fsdp,tp": "--experts 4 is not for --mesh fsdp,tp, whose layers all tokens pass",
    "--resume --checkpoint some --steps 6 --experts 2": "--experts 2 is not that of some/fp8/step-4, 0; resume with",
    "--mesh hsdp --ranks 2": "--mesh hsdp needs an even number of ranks, 4 or more, not 2; give --ranks 4",
    "--weights primary --recipe bf16": "--weights primary is not for bf16, which has no codes to keep; leave bf16 out",
    "--resume": "--resume goes on from a checkpoint; give --checkpoint DIR",
    "--resume --checkpoint none": "--checkpoint none has none of bf16, fp8; leave --resume out",
    "--checkpoint some": "--checkpoint some has some of an earlier run; add --resume, or give another directory",
    "--resume --checkpoint some --steps 7": "--steps 7 is not that of some/fp8/step-4, 6; resume with",
}


@saves
def test_refused_in_one_line(tmp_path):
    (tmp_path / "some" / "fp8" / "step-4").mkdir(parents=True)
    settings = {"framework": "torch", "text": "pydoc_data.topics", "steps": 6, "batch": 32}
    (tmp_path / "some" / "fp8" / "step-4" / "run.json").write_text(json.dumps({"settings": settings, "run": {}}))
    said = refusals("train_jax", REFUSED, tmp_path)
    for line in REFUSED:
        assert_refused(said[line], REFUSED[line])
