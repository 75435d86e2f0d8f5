"""Checkpoints of train_jax.py: orbax for JAX itself, onto any mesh, and whole arrays for train_torch.py."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import checkpoint
import qshard.jax as qshard
from checkpoint import Whole
from gpt import expert_names, is_stacked, stacked
from report import Run

MOMENTS = {"exp_avg": "mu", "exp_avg_sq": "nu"}
ROLES = ("weight", "activation", "gradient")


def save(directory: Path, step: int, training: dict[str, Any], run: Run, settings: dict[str, Any]) -> None:
    """Write a checkpoint after `step` steps, then delete earlier ones.

    Args:
      directory: where checkpoints go.
      step: the number of steps done.
      training: everything that the next step depends on: `weights`, `states` of delayed scaling and `optimizer`.
      run: the measurements so far.
      settings: settings that a resumed run must match.
    """
    import orbax.checkpoint as ocp

    partial = checkpoint.begin(directory, step).absolute()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(partial / "arrays", training, force=True, custom_metadata=qshard.describe(training))
    checkpoint.finish(partial, _whole(training), run, settings)


def load(
    path: Path, training: dict[str, Any], started: Run, recast: Callable[[dict[str, Any]], dict[str, Any]]
) -> tuple[int, Run, dict[str, Any]]:
    """Load a checkpoint.

    Args:
      path: the checkpoint.
      training: a training with the shapes, dtypes and shardings to load into.
      started: a new run with the same settings.
      recast: computes the codes of primary weights from their masters.

    Returns:
      The number of steps done, the run so far, and the training, sharded like `training`.
    """
    done, run, whole = checkpoint.read(path, started)
    if whole is not None:
        return done, run, recast(_from_whole(whole, training, done))
    import orbax.checkpoint as ocp

    target = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), training)
    with ocp.StandardCheckpointer() as checkpointer:
        arrays = (path / "arrays").absolute()
        metadata = checkpointer.metadata(arrays).custom_metadata
        return done, run, qshard.rebuild(checkpointer.restore(arrays, target), metadata)


def _whole(training: dict[str, Any]) -> Whole:
    """Convert a training to the form that train_torch.py reads."""
    masters = _masters(training)
    whole: Whole = {
        name: {"weight": np.asarray(weight if masters.get(name) is None else masters[name])}
        for name, weight in training["weights"].items()
    }
    if (adam := _adam(training)) is not None:
        for part, moment in MOMENTS.items():
            for name, array in getattr(adam, moment).items():
                whole[name][part] = np.asarray(array)
    for name, state in training["states"].items():
        for role in ROLES:
            tensor = getattr(state, role)
            whole[name] |= {
                f"scale.{role}": np.asarray(tensor.scale),
                f"history.{role}": np.asarray(tensor.amax_history),
            }
    return _each_expert(whole)


def _each_expert(whole: Whole) -> Whole:
    """Split stacked weights of experts into one weight per expert, named as in train_torch.py."""
    each: Whole = {}
    for name, parts in whole.items():
        if is_stacked(name):
            for i, own in enumerate(expert_names(name, len(parts["weight"]))):
                each[own] = {part: np.asarray(array[i]) for part, array in parts.items()}
        else:
            each[name] = parts
    return each


def _adam(training: dict[str, Any]) -> optax.ScaleByAdamState | None:
    """Return the moments of AdamW, or None with Muon."""
    is_adam = lambda node: isinstance(node, optax.ScaleByAdamState)  # noqa: E731
    return next((node for node in jax.tree.leaves(training["optimizer"], is_leaf=is_adam) if is_adam(node)), None)


def _masters(training: dict[str, Any]) -> dict[str, jax.Array | None]:
    """Return the float32 masters of primary weights, by name; empty for other kinds."""
    state = training["optimizer"]
    masters: dict[str, jax.Array | None] = state.masters if isinstance(state, qshard.PrimaryState) else {}
    return masters


def _from_whole(whole: Whole, training: dict[str, Any], done: int) -> dict[str, Any]:
    """Convert a training that train_torch.py saved. Arrays are sharded as in `training`."""
    kinds = dict.fromkeys(part for parts in whole.values() for part in parts)
    parts = {part: stacked(checkpoint.parts_of(whole, part)) for part in kinds}

    def taken(tree: Any) -> Any:
        if isinstance(tree, optax.ScaleByAdamState):
            moments = {moment: parts[part] for part, moment in MOMENTS.items()}
            return tree._replace(count=jnp.full_like(tree.count, done), **moments)
        return jnp.full_like(tree, done)  # step counts

    def state_of(name: str, state: qshard.LinearState) -> qshard.LinearState:
        tensors = {
            role: qshard.TensorState(
                parts[f"scale.{role}"][name], parts[f"history.{role}"][name], getattr(state, role).observed
            )
            for role in ROLES
        }
        return qshard.LinearState(**tensors)

    masters, state = _masters(training), training["optimizer"]
    inner = state.inner if masters else state
    inner = jax.tree.map(taken, inner, is_leaf=lambda node: isinstance(node, optax.ScaleByAdamState))
    if masters:
        values = {name: None if master is None else parts["weight"][name] for name, master in masters.items()}
        inner = state._replace(masters=values, inner=inner)
    made = {
        "weights": {
            name: parts["weight"][name] if masters.get(name) is None else weight  # codes are computed anew
            for name, weight in training["weights"].items()
        },
        "states": {name: state_of(name, state) for name, state in training["states"].items()},
        "optimizer": inner,
    }
    return jax.tree.map(lambda new, old: jax.device_put(np.asarray(new, old.dtype), old.sharding), made, training)
