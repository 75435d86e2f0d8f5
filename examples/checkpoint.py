"""Checkpoints of both scripts: a directory for each, which has its name only once it is whole.

DIR/fp8/step-20/          what the framework writes, every rank its own part (checkpoint_jax.py, checkpoint_torch.py);
                          whole.safetensors, which the other framework reads; and run.json
DIR/fp8/step-40.partial/  of a run that was killed; nobody reads it
"""

import json
import shutil
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

import interrupt
import options
from report import Run

WHOLE = "whole.safetensors"
Whole = dict[str, dict[str, np.ndarray]]
"""A training as the other framework takes it: by the names of weights, their float32 values (`weight`), the moments of
Adam (`exp_avg`, `exp_avg_sq`), and under delayed scaling the state of it (`scale.weight`, `history.weight`, ...)."""


def newest(directory: Path) -> Path | None:
    """Return the last whole checkpoint in `directory`."""
    whole = [path for path in directory.glob("step-*") if path.suffix != ".partial"]
    return max(whole, key=_step, default=None)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def check(program: str, arguments: Namespace, problem: str | None, settings: dict[str, Any], *modules: str) -> None:
    """End the program with one line if there is a `problem` already, or the checkpoints that are asked for are one."""
    if arguments.checkpoint:
        packages = {"safetensors": "safetensors", "orbax.checkpoint": "orbax-checkpoint"}
        for name in ("safetensors", *modules):
            if find_spec(name.partition(".")[0]) is None:
                problem = problem or f"--checkpoint needs {packages[name]}; pip install {packages[name]}"
        interrupt.outcome = f"checkpoints are in {arguments.checkpoint}; --resume goes on from the last one"
    problem = problem or refusal(arguments.checkpoint, arguments.formats, arguments.resume, settings)
    if problem:
        options.fail(program, problem)


def refusal(directory: Path | None, formats: list[str], resume: bool, settings: dict[str, Any]) -> str | None:
    """Say why a run with `settings` cannot use the checkpoints in `directory`, if it cannot."""
    if directory is None:
        return "--resume goes on from a checkpoint; give --checkpoint DIR" if resume else None
    found = {name: path for name in formats if (path := newest(directory / name)) is not None}
    if found and not resume:
        return f"--checkpoint {directory} has some of an earlier run; add --resume, or give another directory"
    if resume and not found:
        return f"--checkpoint {directory} has none of {', '.join(formats)}; leave --resume out"
    for path in found.values():
        old = {"experts": 0, **json.loads((path / "run.json").read_text())["settings"]}
        same = [*settings] if old["framework"] == settings["framework"] else ["text", "steps", "batch", "experts"]
        for name in same:
            if old[name] != settings[name]:
                return (
                    f"--{name} {settings[name]} is not that of {path}, {old[name]}; resume with what it was made with"
                )
    return None


def begin(directory: Path, step: int) -> Path:
    """Return where to write a checkpoint, until `finish` gives it its name."""
    partial = directory / f"step-{step}.partial"
    partial.mkdir(parents=True, exist_ok=True)
    return partial


def finish(partial: Path, whole: Whole, run: Run, settings: dict[str, Any]) -> None:
    """Add what one rank writes, then remove the checkpoints before it."""
    from safetensors.numpy import save_file

    old = [path for path in partial.parent.glob("step-*") if path != partial]
    save_file(
        {f"{name}:{part}": array for name, parts in whole.items() for part, array in parts.items()}, partial / WHOLE
    )
    (partial / "run.json").write_text(json.dumps({"settings": settings, "run": asdict(run)}))
    partial.rename(partial.with_suffix(""))
    for path in old:
        shutil.rmtree(path)


def read(path: Path, started: Run) -> tuple[int, Run, Whole | None]:
    """Return the steps that are done, what they measured, and all of the training if the other framework saved it.

    `started` is the run as this framework would start it.
    """
    from safetensors.numpy import load_file

    run = Run(**json.loads((path / "run.json").read_text())["run"])
    if run.framework == started.framework:
        return _step(path), run, None
    whole: Whole = {}
    for key, array in load_file(path / WHOLE).items():
        name, _, part = key.rpartition(":")
        whole.setdefault(name, {})[part] = array
    done = _step(path)
    return done, replace(started, losses=run.losses, validation=run.validation, first_step=done + 1), whole


def parts_of(whole: Mapping[str, Mapping[str, np.ndarray]], part: str) -> dict[str, np.ndarray]:
    """Return one kind of array, by the names of weights."""
    return {name: parts[part] for name, parts in whole.items() if part in parts}
