"""What flax's nnx needs for recipes whose layers have a state or draw random numbers. It needs flax."""

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
    """The `LinearState` of a layer under `DelayedScaling`, apart from its parameters.

    A step takes the gradient with respect to it too, which is amaxes, and `update_delayed` makes the next state:

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
    """`qshard.jax.DotGeneral` with what a recipe keeps from call to call, as nnx layers take it for `dot_general=`.

    Args:
      recipe: the format of each role, or the name of a recipe, such as "NVFP4".
      rngs: where seeds come from, for a recipe that rounds stochastically: of the stream "qshard", or "default".
      layers: leading axes of what is kept, where `nnx.scan` or `nnx.vmap` go over layers.
      options: of `qshard.jax.DotGeneral`.

    Attributes:
      state: of `DelayedScaling`, a `ScalingState`; of other recipes None.
      rngs: a stream, of recipes that draw; of others None.

    Raises:
      ValueError: the recipe rounds stochastically, and there is no `rngs`.

    One for each layer, as each has a state and seeds of its own.

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
        self, x: jax.Array, w: jax.Array, dimension_numbers: Any, precision: Any = None, **asked: Any
    ) -> jax.Array:
        """As `qshard.jax.DotGeneral`; the state and the seed are its own."""
        return self.dot_general(x, w, dimension_numbers, precision, **asked, **self._kept())

    def _kept(self) -> dict[str, Any]:
        """The state and the seed of a call."""
        state = None if self.state is None else self.state.get_value()
        return {"state": state, "seed": None if self.rngs is None else self.rngs()}


class Einsum(DotGeneral):
    """The same for `nnx.Einsum`, which takes it as `einsum_op=`.

    >>> layer = nnx.Einsum("td,dhk->thk", (16, 4, 8), rngs=nnx.Rngs(0), einsum_op=Einsum("CurrentScaling"))
    >>> layer(jax.numpy.ones((2, 16))).shape
    (2, 4, 8)
    """

    def __call__(self, subscripts: str, x: jax.Array, w: jax.Array, **asked: Any) -> jax.Array:  # type: ignore[override]
        """As `qshard.jax.einsum`; the state and the seed are its own."""
        return self.dot_general.einsum(subscripts, x, w, **asked, **self._kept())
