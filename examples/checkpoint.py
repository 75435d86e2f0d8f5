"""Checkpoints of both training scripts. A checkpoint is a directory that gets its final name once it is complete.

DIR/fp8/step-20/          the framework's own files, one part per rank (checkpoint_jax.py, checkpoint_torch.py);
                          whole.safetensors, for the other framework; and run.json
DIR/fp8/step-40.partial/  left by a run that was killed; never read
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
COMMON_SETTINGS = ("text", "steps", "batch", "experts", "optimizer")
"""Settings that a run of the other framework must have, too."""
Whole = dict[str, dict[str, np.ndarray]]
"""A training in a form that both frameworks read. Each weight's name maps to its float32 values (`weight`), the moments
of Adam (`exp_avg`, `exp_avg_sq`) and the state of delayed scaling, if any (`scale.weight`, `history.weight`, ...).
With Muon there are no moments, because its formulas differ between the frameworks."""


def newest(directory: Path) -> Path | None:
    """Return the last complete checkpoint in `directory`, or None."""
    whole = [path for path in directory.glob("step-*") if path.suffix != ".partial"]
    return max(whole, key=_step, default=None)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def check(program: str, arguments: Namespace, problem: str | None, settings: dict[str, Any], *modules: str) -> None:
    """End the program with one line if there is a `problem` or the checkpoint arguments are not valid.

    Args:
      program: name of the program, for the message.
      arguments: the parsed command line.
      problem: an error found earlier, or None.
      settings: settings of the run that a resumed checkpoint must match.
      *modules: further modules that checkpoints need.
    """
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
    """Return why a run with `settings` cannot use the checkpoints in `directory`, or None."""
    if directory is None:
        return "--resume goes on from a checkpoint; give --checkpoint DIR" if resume else None
    found = {name: path for name in formats if (path := newest(directory / name)) is not None}
    if found and not resume:
        return f"--checkpoint {directory} has some of an earlier run; add --resume, or give another directory"
    if resume and not found:
        return f"--checkpoint {directory} has none of {', '.join(formats)}; leave --resume out"
    for path in found.values():
        old = {"experts": 0, "optimizer": "adamw", **json.loads((path / "run.json").read_text())["settings"]}
        for name in settings if old["framework"] == settings["framework"] else COMMON_SETTINGS:
            if old[name] != settings[name]:
                return (
                    f"--{name} {settings[name]} is not that of {path}, {old[name]}; resume with what it was made with"
                )
        if settings["optimizer"] == "muon" and old["framework"] != settings["framework"]:
            return f"--optimizer muon goes on in the framework that made {path}, {old['framework']}; resume it there"
    return None


def begin(directory: Path, step: int) -> Path:
    """Create and return the directory to write a checkpoint to. `finish` gives it its final name."""
    partial = directory / f"step-{step}.partial"
    partial.mkdir(parents=True, exist_ok=True)
    return partial


def finish(partial: Path, whole: Whole, run: Run, settings: dict[str, Any]) -> None:
    """Write the files that one rank writes, name the checkpoint, and delete earlier ones."""
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
    """Read a checkpoint.

    Args:
      path: the checkpoint.
      started: a new run of this framework with the same settings.

    Returns:
      The number of steps done, the run so far, and the whole training if the other framework wrote the checkpoint.
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
    """Return one kind of array, by name of weight."""
    return {name: parts[part] for name, parts in whole.items() if part in parts}
