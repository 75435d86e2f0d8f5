"""The modules of examples/, with a small model and a text that may end a training before a step."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from qshard import reference
from qshard.recipes import Recipe
from support.xla_flags import xla_flags

EXAMPLES = Path(__file__).parents[2] / "examples"
TEXT = EXAMPLES.parent / "LICENSE"  # A text that no work on the code changes, so losses stay as they are.
BATCH = 4
SMALL = {"layers": 1, "context": 8}
# Scripts set the number of their host devices. As on a machine without a GPU, no number of GPUs limits ranks.
ENVIRONMENT = dict(os.environ) | {"XLA_FLAGS": xla_flags()}
ENVIRONMENT |= {"COLUMNS": "80", "CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu", "GLOO_SOCKET_IFNAME": "lo"}


class Stopped(Exception):
    """The end of a training before its last step."""


def example(name: str) -> ModuleType:
    sys.path.insert(0, str(EXAMPLES))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(EXAMPLES))


def small(name: str) -> ModuleType:
    """A script, with a model of one block."""
    script = example(name)
    script.CONFIG = example("gpt").GPTConfig(**SMALL)
    return script


def small_command(name: str, *options: Any) -> list[str]:
    """The command that runs a script with a model of one block and a short text."""
    runner = Path(__file__).with_name("small_example.py")
    return [str(part) for part in (sys.executable, runner, name, "--text", TEXT, *options)]


def initial_weights(experts: int) -> dict[str, np.ndarray]:
    """Return the initial weights of the small model by PyTorch's names."""
    gpt = example("gpt")
    weights: dict[str, np.ndarray] = gpt.initial_weights(gpt.GPTConfig(**SMALL, experts=experts))
    return weights


def digest_of(weights: Mapping[str, np.ndarray], recipe: Recipe | None) -> str:
    """Return the digest of gathered weights: reference codes of quantized weights, the others in bfloat16."""
    gathered = {}
    for name, array in weights.items():
        if recipe is not None and example("gpt").is_quantized(name):
            plane = reference.quantize(array, recipe.weight).rowwise
            parts = plane.data, plane.scale_inv, plane.global_scale_inv
            gathered[name] = [np.asarray(part) for part in parts if part is not None]
        else:
            gathered[name] = [array.astype(ml_dtypes.bfloat16)]
    digest: str = example("report").digest(gathered)
    return digest


class NoProgress:
    """Stands for the progress bars of train_jax.py."""

    def __getattr__(self, name: str) -> Any:
        return lambda *values: None


def train_in_jax(
    name: str,
    mode: str = "shard_map",
    mesh: str = "fsdp",
    ranks: int = 2,
    steps: int = 2,
    folder: Path | None = None,
    resume: bool = False,
    stops: int | None = None,
    kind: str = "shard",
    loss: str = "plain",
    experts: int = 0,
    log: Path | None = None,
    optimizer: str = "adamw",
) -> Any:
    """Run the training of train_jax.py in this process, and return its run; it may stop before a step."""
    import jax

    script, modes = small("train_jax"), example("modes")
    arguments = Namespace(steps=steps, batch=BATCH, weights=kind, mesh=mesh, mode=mode, loss=loss, experts=experts)
    arguments.log_numerics, arguments.optimizer = log, optimizer
    arguments.checkpoint, arguments.every, arguments.resume = folder, 2, resume
    with jax.set_mesh(modes.make_mesh(mesh, mode, jax.devices()[:ranks])):
        return script.train(name, text(script, stops), arguments, NoProgress())


def text(script: ModuleType, stops: int | None = None, batch: int = BATCH) -> Any:
    """A corpus that stops the training before step `stops`."""
    corpus = example("corpus").load(TEXT, batch, script.CONFIG.context)

    class Text(type(corpus)):  # type: ignore[misc]
        def batch(self, step: int, *sizes: int) -> Any:
            if step == stops:
                raise Stopped
            return super().batch(step, *sizes)

    return Text(corpus.name, corpus.train, corpus.held_out)


def refusals(script: str, lines: Iterable[str], folder: Path) -> dict[str, tuple[int, str]]:
    """The status and the errors of a script for some command lines, in one process, as imports take seconds."""
    code = """
import contextlib, io, json, sys
sys.path.insert(0, sys.argv[1])
script = __import__(sys.argv[2])
said = {}
for line in json.loads(sys.argv[3]):
    sys.argv = ["train.py", *line.split()]
    status = None
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            script.main()
        except SystemExit as end:
            status = end.code
    said[line] = (status, errors.getvalue())
print(json.dumps(said))
"""
    command = [sys.executable, "-c", code, EXAMPLES, script, json.dumps(list(lines))]
    result = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    said: dict[str, tuple[int, str]] = json.loads(result.stdout)
    return said


def assert_refused(said: tuple[int, str], text: str) -> None:
    """Assert that a script failed with one short line."""
    status, errors = said
    assert status in (1, 2)
    assert errors.startswith(f"train.py: error: {text}"), errors
    assert errors.count("\n") == 1
    assert len(errors) < 200
