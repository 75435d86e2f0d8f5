"""`switch_recipe`: changes the recipes of a policy or of a converted nnx model between two steps."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from qshard._core.layer_recipes import RecipesLike, Rules, check_each, list_layers
from qshard._core.validation import quote
from qshard.jax._nn.dot_general import DotGeneral
from qshard.jax._nn.policy import Policy
from qshard.recipes import Recipe

OP = "switch_recipe"


def switch_recipe(model: Any, recipe: RecipesLike | None, *, rngs: Any = None) -> Any:
    """Change the recipes of a policy or of a converted flax nnx model between two steps.

        for step, batch in enumerate(data):
            if step == first_step_of_tail:
                policy = switch_recipe(policy, "MXFP8")  # a new policy; an nnx model changes in place
            params, state, loss = train(policy, params, state, batch)  # jitted, with `policy` static

    Parameters, masters and optimizer states stay as they are, and so do shardings and options of layers. A model that
    was converted with the new recipe and has the same parameters computes the same codes, losses and gradients from
    then on, bit for bit. `jit` traces once more. Create functions of `nnx.cached_partial` again: they have a copy of
    the model with the old recipe.

    Args:
      model: a `Policy`, or an `nnx.Module` after `convert`.
      recipe: the new recipe of all weights of the policy, or of all converted layers, or its name; None: they multiply
        values, as before `convert`, which is then also the way back. Or a mapping from name patterns to recipes or
        None, as for `convert`; names without a pattern keep their recipe.
      rngs: an `nnx.Rngs` for layers that round stochastically under the new recipe only, as for `convert`. Others go on
        with their random stream.

    Returns:
      A new `Policy`, or the nnx model itself.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: no layer is converted, a pattern matches none, a kernel is not whole blocks of the formats, or `rngs`
        is missing. The model is then unchanged.

    The other forms need no call, because the recipe is an argument: pass another one to `linear`, `optimizer` or
    `plan_zero`, or build the linen model again. `PrimaryOptimizer.recast` casts masters to the codes of the new recipe.
    States of `DelayedScaling` begin anew.

    >>> import jax.numpy as jnp
    >>> params = {"up": jnp.ones((16, 32))}
    >>> policy = switch_recipe(Policy.of(params, "NVFP4"), "MXFP8")
    >>> policy(params)["up"].dot_general.recipe
    MXFP8()
    """
    if isinstance(model, Policy):
        return model.with_recipe(recipe)
    if "flax" not in sys.modules or not isinstance(model, sys.modules["flax"].nnx.Module):
        raise TypeError(
            f"{OP}: model ({quote(model)}) is not a Policy or an nnx.Module; pass the new recipe to linear, optimizer "
            "or DotGeneral instead"
        )
    from qshard.jax._convert import nnx_model

    every = nnx_model.names_of(model)
    rules = Rules.of(recipe, OP, every, may_be_none=True)
    candidates = nnx_model.survey(model, {})
    found = {name: each for name, each in candidates.items() if each.layer is not None and each.layer.current}
    if not found:
        raise ValueError(f"{OP}: model ({type(model).__name__}) has no converted layer; call convert first")
    rules.check_used([each.names for each in found.values()])
    layers = {name: each.layer for name, each in found.items() if each.layer is not None}
    patterns = {name: pattern for name, each in found.items() if (pattern := rules.pattern_of(*each.names)) is not None}
    new = {name: rules.recipes[pattern] for name, pattern in patterns.items()}
    reasons = {name: why for name, own in new.items() if own is not None and (why := layers[name].unfit) is not None}
    if reasons:
        raise ValueError(f"{OP}: layers cannot have the recipe: {list_layers(reasons)}; leave them out by patterns")
    changed: dict[str, Recipe] = {}
    checks: dict[str, Callable[[], None]] = {}
    for name, own in new.items():
        current = layers[name].current
        assert current is not None
        if own is not None and own != current.recipe:
            changed[name] = own
            multiplier = DotGeneral(own, otherwise=current.otherwise)
            checks[name] = functools.partial(layers[name].check, name, multiplier, OP)
    check_each(checks)
    made = {name: layers[name].switched(own, rngs) for name, own in changed.items()}
    for name, own in new.items():
        if own is None:
            layers[name].revert()
    for name, multiplier in made.items():
        layers[name].install(multiplier)
    return model
