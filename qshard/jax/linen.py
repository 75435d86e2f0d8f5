"""Flax linen modules for recipes that keep state or draw random numbers. Requires flax."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax

from qshard.jax._delayed_scaling import init_delayed
from qshard.jax._nn import dot_general as dot
from qshard.recipes import RecipeLike

__all__ = ["STATES", "DotGeneral"]

STATES = "scaling_states"
"""The variable collection with the states of `DelayedScaling`."""


class DotGeneral(nn.Module):
    """A `qshard.jax.DotGeneral` for linen layers, with the state and the seeds that a recipe needs.

    Pass it to a layer: `nn.Dense(features, dot_general_cls=functools.partial(DotGeneral, recipe))`.

    A recipe with stochastic rounding takes its seeds from `make_rng("qshard")`. Under `DelayedScaling`, each layer has
    a `LinearState` in the collection "scaling_states". The gradient with respect to the collection is the amaxes of the
    step; `update_delayed` computes the next states from them. This differs from flax's `_overwrite_with_gradient`: the
    gradient is not the next state, and microbatches are merged with `merge_observed`, not added.

    Attributes:
      recipe: the recipe, or its name, such as "DelayedScaling". Pass a `qshard.jax.DotGeneral` to set options.

    >>> import functools
    >>> from qshard.jax import update_delayed
    >>> layer = nn.Dense(16, dot_general_cls=functools.partial(DotGeneral, "DelayedScaling"))
    >>> x = jax.numpy.ones((4, 16))
    >>> variables = layer.init(jax.random.key(0), x)
    >>> grads = jax.grad(lambda variables: layer.apply(variables, x).sum())(variables)
    >>> states = update_delayed(variables[STATES], grads[STATES], "DelayedScaling")
    >>> states["DotGeneral_0"]["state"].activation.scale
    Array(448., dtype=float32)
    """

    recipe: RecipeLike | dot.DotGeneral

    @nn.compact
    def __call__(
        self, x: jax.Array, w: jax.Array, dimension_numbers: Any, precision: Any = None, **per_call: Any
    ) -> jax.Array:
        """Call `qshard.jax.DotGeneral` with the state and the seed of this layer."""
        dot_general = self.recipe if isinstance(self.recipe, dot.DotGeneral) else dot.DotGeneral(self.recipe)
        made = dot_general.recipe
        if made.stateful:
            per_call["state"] = self.variable(STATES, "state", lambda: init_delayed(made)).value
        if made.stochastic:
            per_call["seed"] = self.make_rng("qshard")
        return dot_general(x, w, dimension_numbers, precision, **per_call)
