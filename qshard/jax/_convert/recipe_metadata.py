"""Recipes of a model in the metadata of a checkpoint, and their check before a restore."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from qshard._core.validation import quote
from qshard._files.recipe_records import KEY, check_same, decode, encode, text_of
from qshard.jax._nn.policy import Policy
from qshard.recipes import Recipe, as_recipe


def describe_recipes(model: Any) -> dict[str, str]:
    """Describe the recipe of each layer, for the metadata of a checkpoint. Arrays do not tell it.

    Args:
      model: a `Policy`, or an `nnx.Module` after `convert`; or a recipe or its name, for programs that pass one to
        `linear`, `optimizer` or `plan_zero`.

    Returns:
      A dict with one string, under a key of qshard. Merge it with other metadata: `{**describe_recipes(policy), ...}`.

    Raises:
      TypeError, ValueError: `model` is something else.

    Sharded arrays are not read.

    >>> import jax.numpy as jnp
    >>> policy = Policy.of({"up": jnp.ones((16, 32))}, "NVFP4")
    >>> metadata = describe_recipes(policy)
    >>> check_recipes(policy, metadata)
    >>> check_recipes(policy.with_recipe("MXFP8"), metadata)
    Traceback (most recent call last):
    ValueError: check_recipes: up was saved with NVFP4(), but here it has MXFP8() (1 layer differs); use ...

    With orbax: `checkpointer.save(path, tree, custom_metadata=describe_recipes(policy))`.
    """
    return {KEY: encode(_recipes_of(model, "describe_recipes"))}


def check_recipes(model: Any, metadata: Mapping[str, Any] | None) -> None:
    """Raise if a checkpoint was saved with other recipes than `model` has. Recipes are compared by value.

    Metadata without `describe_recipes` pass: plain models and other programs save no recipes.

    Args:
      model: as for `describe_recipes`.
      metadata: the whole metadata of the checkpoint.

    Raises:
      TypeError: `model` or `metadata` has the wrong type.
      ValueError: a layer was saved with another recipe, or without one; or the metadata are damaged.

    Call it on every process, before the restore: `check_recipes(policy, checkpointer.metadata(path).custom_metadata)`.
    To go on with another recipe, check with the recipe of the run that saved, and call `switch_recipe` then.

    >>> check_recipes("MXFP8", describe_recipes("MXFP8"))
    >>> check_recipes("MXFP8", {"step": 100})
    """
    op = "check_recipes"
    own = _recipes_of(model, op)
    if metadata is not None and not isinstance(metadata, Mapping):
        raise TypeError(f"{op}: metadata ({quote(metadata)}) is not a dict; pass the metadata of the checkpoint")
    if KEY not in (metadata or {}):
        return
    assert metadata is not None
    saved = decode(metadata[KEY], op)
    if isinstance(model, Policy | Recipe | str):  # Weights that were never quantized have no name in a policy.
        saved, own = dict.fromkeys(own, text_of(None)) | saved, dict.fromkeys(saved) | own
    check_same(op, saved, own, "leave the check out")


def _recipes_of(model: Any, op: str) -> dict[str, Recipe | None]:
    if isinstance(model, Policy):
        return model.recipes
    if "flax" in sys.modules and isinstance(model, sys.modules["flax"].nnx.Module):
        from qshard.jax._convert import nnx_model

        layers = {name: each.layer for name, each in nnx_model.survey(model, {}).items() if each.layer is not None}
        return {name: None if own.current is None else own.current.recipe for name, own in layers.items()}
    if isinstance(model, Recipe | str):
        return {"*": as_recipe(model, op, "model")}
    raise TypeError(
        f"{op}: model ({quote(model)}) is not a Policy, an nnx.Module or a recipe; pass what has the recipes of the "
        "layers"
    )
