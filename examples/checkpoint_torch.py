"""Checkpoints of train_torch.py: torch.distributed.checkpoint for itself, and whole arrays for train_jax.py."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import checkpoint
import qshard.torch_bridge as qshard
from checkpoint import Whole
from report import Run

MOMENTS = ("exp_avg", "exp_avg_sq")
ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
EVERYWHERE = StateDictOptions(full_state_dict=True)


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return everything that the next step depends on. Its sharding may differ between runs."""
    return {
        "model": get_model_state_dict(model),  # float32, named as in a plain model, for each kind of weight
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "scaling": qshard.scaling_state(model, dist.group.WORLD),  # scales and amaxes of DelayedScaling, and seeds
    }


def save(
    directory: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, run: Run, settings: dict[str, Any]
) -> None:
    """Write a checkpoint after `step` steps, then delete earlier ones. Collective."""
    partial = checkpoint.begin(directory, step)
    dcp.save(_state(model, optimizer), checkpoint_id=partial, planner=qshard.RecipeSavePlanner(model))
    whole = _whole(model, optimizer)
    if dist.get_rank() == 0:
        checkpoint.finish(partial, whole, run, settings)
    dist.barrier()


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, started: Run) -> tuple[int, Run]:
    """Load a checkpoint. Return the number of steps done and the run so far. Collective."""
    done, run, whole = checkpoint.read(path, started)
    if whole is not None:
        _load_whole(whole, model, optimizer, done)
        return done, run
    state = _state(model, optimizer)
    dcp.load(state, checkpoint_id=path, planner=qshard.RecipeLoadPlanner(model))  # refuses other recipes
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    qshard.load_scaling_state(model, state["scaling"])
    return done, run


def _whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> Whole:
    """Convert a training to the form that train_jax.py reads, on rank 0. Collective."""
    weights = get_model_state_dict(model, options=ON_RANK_0)
    states = get_optimizer_state_dict(model, optimizer, options=ON_RANK_0).get("state", {})  # on rank 0 only
    scaling = qshard.scaling_state(model, dist.group.WORLD)
    whole: Whole = {}
    for name, weight in weights.items():
        parts = {"weight": weight, **{each: states[name][each] for each in MOMENTS if each in states[name]}}
        for key, buffer in scaling.items():
            layer, _, rest = key.partition(".delayed.")
            if f"{layer}.weight" == name and rest.endswith((".scale", ".amax_history")):
                role, _, what = rest.partition(".")
                parts[f"{what.removeprefix('amax_')}.{role}"] = buffer
        whole[name] = {part: tensor.detach().cpu().numpy() for part, tensor in parts.items()}
    return whole


def _load_whole(whole: Whole, model: nn.Module, optimizer: torch.optim.Optimizer, done: int) -> None:
    """Load a training that train_jax.py saved. Collective."""

    def tensors(part: str) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(np.array(array)) for name, array in checkpoint.parts_of(whole, part).items()}

    states = get_optimizer_state_dict(model, optimizer, options=EVERYWHERE)  # initializes states if there are none
    moments = {moment: tensors(moment) for moment in MOMENTS}
    for name in states["state"]:
        states["state"][name] |= {moment: moments[moment][name] for moment in MOMENTS}
        states["state"][name]["step"] = torch.tensor(float(done))
    set_model_state_dict(model, tensors("weight"), options=EVERYWHERE)
    set_optimizer_state_dict(model, optimizer, states, options=EVERYWHERE)
    scaling = dict(qshard.scaling_state(model))
    for key in scaling:
        layer, _, rest = key.partition(".delayed.")
        role, _, what = rest.partition(".")
        parts = whole.get(f"{layer}.weight", {})
        if what in ("scale", "amax_history"):
            scaling[key] = torch.from_numpy(np.array(parts[f"{what.removeprefix('amax_')}.{role}"]))
        elif what == "scale_inv":
            scale = parts[f"scale.{role}"]
            scaling[key] = torch.from_numpy(np.array(1 / scale if scale else scale, np.float32))
    qshard.load_scaling_state(model, scaling)
