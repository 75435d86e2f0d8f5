"""What flax's linen needs for recipes whose layers have a state or draw random numbers. It needs flax."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax

from qshard.jax._delayed_scaling import init_delayed
from qshard.jax._nn import dot_general as dot
from qshard.recipes import RecipeLike

__all__ = ["STATES", "DotGeneral"]

STATES = "scaling_states"
"""The collection of variables that has the states of `DelayedScaling`."""


class DotGeneral(nn.Module):
    """`qshard.jax.DotGeneral` with what a recipe keeps from call to call, as linen layers take it.

    `nn.Dense(features, dot_general_cls=functools.partial(DotGeneral, recipe))`. A recipe that rounds stochastically
    takes its seeds from `make_rng("qshard")`. `DelayedScaling` has a `LinearState` for each layer in the collection
    "scaling_states", and a step takes the gradient with respect to it too, which is amaxes; `update_delayed` makes the
    next state. It is not flax's `_overwrite_with_gradient`: what comes back is what a step has seen, and microbatches
    are merged by `merge_observed`, not added.

    Attributes:
      recipe: the format of each role, or the name of a recipe, such as "DelayedScaling"; or a `qshard.jax.DotGeneral`,
        which has options too.

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
        self, x: jax.Array, w: jax.Array, dimension_numbers: Any, precision: Any = None, **asked: Any
    ) -> jax.Array:
        """As `qshard.jax.DotGeneral`; the state and the seed are its own."""
        dot_general = self.recipe if isinstance(self.recipe, dot.DotGeneral) else dot.DotGeneral(self.recipe)
        made = dot_general.recipe
        if made.stateful:
            asked["state"] = self.variable(STATES, "state", lambda: init_delayed(made)).value
        if made.stochastic:
            asked["seed"] = self.make_rng("qshard")
        return dot_general(x, w, dimension_numbers, precision, **asked)
