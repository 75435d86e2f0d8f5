"""Checkpoints of train_torch.py: a directory for each, which has its name only once it is whole.

DIR/fp8/step-20/          what torch.distributed.checkpoint writes, every rank its own part, and run.json
DIR/fp8/step-40.partial/  of a run that was killed; nobody reads it
"""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import qshard.torch_bridge as qshard
from report import Run


def newest(directory: Path) -> Path | None:
    """Return the last whole checkpoint in `directory`."""
    whole = [path for path in directory.glob("step-*") if path.suffix != ".partial"]
    return max(whole, key=lambda path: int(path.name.removeprefix("step-")), default=None)


def refusal(directory: Path, formats: list[str], resume: bool, settings: dict[str, Any]) -> str | None:
    """Say why a run with `settings` cannot use the checkpoints in `directory`, if it cannot."""
    found = {name: path for name in formats if (path := newest(directory / name)) is not None}
    if found and not resume:
        return f"--checkpoint {directory} has some of an earlier run; add --resume, or give another directory"
    if resume and not found:
        return f"--checkpoint {directory} has none of {', '.join(formats)}; leave --resume out"
    for path in found.values():
        old = json.loads((path / "run.json").read_text())["settings"]
        for name, value in settings.items():
            if old[name] != value:
                return f"--{name} {value} is not that of {path}, {old[name]}; resume with what it was made with"
    return None


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All that the next step depends on: what it is cut into may differ from run to run."""
    return {
        "model": get_model_state_dict(model),  # float32, by the names of a plain model, whatever the kind of weight
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "scaling": qshard.scaling_state(model, dist.group.WORLD),  # scales and amaxes of DelayedScaling, and seeds
    }


def save(
    directory: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, run: Run, settings: dict[str, Any]
) -> None:
    """Write a checkpoint after `step` steps, then remove those before it. Collective."""
    partial, whole = directory / f"step-{step}.partial", directory / f"step-{step}"
    dcp.save(_state(model, optimizer), checkpoint_id=partial)
    if dist.get_rank() == 0:
        old = [path for path in directory.glob("step-*") if path != partial]
        (partial / "run.json").write_text(json.dumps({"settings": settings, "run": asdict(run)}))
        partial.rename(whole)
        for path in old:
            shutil.rmtree(path)
    dist.barrier()


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, Run]:
    """Go on from a checkpoint: return the steps that are done, and what they measured. Collective."""
    state = _state(model, optimizer)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    qshard.load_scaling_state(model, state["scaling"])
    return int(path.name.removeprefix("step-")), Run(**json.loads((path / "run.json").read_text())["run"])
