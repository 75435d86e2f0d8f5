"""Flax nnx modules for recipes that keep state or draw random numbers. Requires flax."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from qshard._core.validation import quote
from qshard.jax._delayed_scaling import LinearState, init_delayed
from qshard.jax._nn import dot_general
from qshard.recipes import RecipeLike

__all__ = ["DotGeneral", "Einsum", "ScalingState"]


class ScalingState(nnx.Variable[LinearState]):
    """The `LinearState` of one layer under `DelayedScaling`, as an nnx variable that is not a parameter.

    Differentiate with respect to it too: that gradient is the amaxes of the step, from which `update_delayed` computes
    the next state:

    >>> from qshard.jax import convert, update_delayed
    >>> model = convert(nnx.Linear(16, 16, rngs=nnx.Rngs(0)), "DelayedScaling")
    >>> wrt = nnx.DiffState(0, nnx.Any(nnx.Param, ScalingState))
    >>> grads = nnx.grad(lambda model, x: model(x).sum(), argnums=wrt)(model, jax.numpy.ones((4, 16)))
    >>> grads, amaxes = nnx.split_state(grads, nnx.Param, ScalingState)
    >>> nnx.update(model, update_delayed(nnx.state(model, ScalingState), amaxes, "DelayedScaling"))
    >>> float(model.dot_general.state.get_value().activation.scale)
    448.0
    """


class DotGeneral(nnx.Module):
    """A `qshard.jax.DotGeneral` for the `dot_general=` of one nnx layer, with the state and seeds that a recipe needs.

    Create one for each layer: layers must not share state or seeds.

    Args:
      recipe: the recipe, or its name, such as "NVFP4".
      rngs: source of seeds for a recipe with stochastic rounding: the stream "qshard" of `nnx.Rngs`, else "default".
      layers: sizes of leading axes of the state and the stream, for layers under `nnx.scan` or `nnx.vmap`.
      options: options of `qshard.jax.DotGeneral`.

    Attributes:
      state: a `ScalingState` under `DelayedScaling`, else None.
      rngs: a random stream if the recipe rounds stochastically, else None.

    Raises:
      ValueError: the recipe rounds stochastically and `rngs` is missing.

    >>> layer = nnx.Linear(16, 16, rngs=nnx.Rngs(0), dot_general=DotGeneral("NVFP4", rngs=nnx.Rngs(qshard=1)))
    >>> layer(jax.numpy.ones((2, 16))).shape
    (2, 16)
    """

    def __init__(
        self,
        recipe: RecipeLike,
        *,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        layers: tuple[int, ...] = (),
        **options: Any,
    ) -> None:
        self.dot_general = dot_general.DotGeneral(recipe, **options)
        made = self.dot_general.recipe
        state = ScalingState(init_delayed(made, layers)) if made.stateful else None
        self.state: ScalingState | None = nnx.data(state)
        stream = None
        if made.stochastic:
            if not isinstance(rngs, nnx.Rngs | nnx.RngStream):
                raise ValueError(
                    f"DotGeneral: {type(made).__name__} uses stochastic rounding and needs `rngs`, not {quote(rngs)}; "
                    "pass rngs=nnx.Rngs(qshard=0)"
                )
            own = rngs["qshard"] if isinstance(rngs, nnx.Rngs) else rngs
            stream = own.split(layers) if layers else own.fork()
        self.rngs: nnx.RngStream | None = nnx.data(stream)

    def __call__(
        self, x: jax.Array, w: jax.Array, dimension_numbers: Any, precision: Any = None, **per_call: Any
    ) -> jax.Array:
        """Call `qshard.jax.DotGeneral` with the state and the seed of this layer."""
        return self.dot_general(x, w, dimension_numbers, precision, **per_call, **self._state_and_seed())

    def _state_and_seed(self) -> dict[str, Any]:
        """The state and a new seed for one call."""
        state = None if self.state is None else self.state.get_value()
        return {"state": state, "seed": None if self.rngs is None else self.rngs()}


class Einsum(DotGeneral):
    """A `DotGeneral` for the `einsum_op=` of one `nnx.Einsum` layer.

    >>> layer = nnx.Einsum("td,dhk->thk", (16, 4, 8), rngs=nnx.Rngs(0), einsum_op=Einsum("CurrentScaling"))
    >>> layer(jax.numpy.ones((2, 16))).shape
    (2, 4, 8)
    """

    def __call__(self, subscripts: str, x: jax.Array, w: jax.Array, **per_call: Any) -> jax.Array:  # type: ignore[override]
        """Call `qshard.jax.einsum` with the state and the seed of this layer."""
        return self.dot_general.einsum(subscripts, x, w, **per_call, **self._state_and_seed())
