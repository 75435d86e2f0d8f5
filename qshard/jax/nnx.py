"""Flax nnx modules for recipes that keep state or draw random numbers. Requires flax."""

from __future__ import annotations

from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from flax import nnx

from qshard._core.layers import ScoreFunction, check_scores
from qshard._core.validation import quote
from qshard.jax._delayed_scaling import LinearState, init_delayed
from qshard.jax._moe import layer
from qshard.jax._moe.grouped_mlp import grouped_mlp
from qshard.jax._nn import dot_general
from qshard.recipes import Recipe, RecipeLike, as_recipe

__all__ = ["DotGeneral", "Einsum", "ExpertBias", "GroupedMLP", "MoE", "ScalingState"]


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
        self.rngs: nnx.RngStream | None = nnx.data(_stream_of("DotGeneral", made, rngs, layers))

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


def _stream_of(
    op: str, recipe: Recipe | None, rngs: nnx.Rngs | nnx.RngStream | None, layers: tuple[int, ...] = ()
) -> nnx.RngStream | None:
    """Return the random stream of a layer; None if its recipe does not round stochastically."""
    if recipe is None or not recipe.stochastic:
        return None
    if not isinstance(rngs, nnx.Rngs | nnx.RngStream):
        raise ValueError(
            f"{op}: {type(recipe).__name__} uses stochastic rounding and needs `rngs`, not {quote(rngs)}; pass "
            "rngs=nnx.Rngs(qshard=0)"
        )
    own = rngs["qshard"] if isinstance(rngs, nnx.Rngs) else rngs
    stream: nnx.RngStream = own.split(layers) if layers else own.fork()
    return stream


class GroupedMLP(nnx.Module):
    """A `qshard.jax.grouped_mlp` for one `MoE` layer, with the states and seeds that a recipe needs.

    Args:
      recipe: the recipe, or its name; None for no quantization.
      num_experts: E.
      rngs: source of seeds, as for `DotGeneral`.
      layers: sizes of leading axes of states and the stream, as for `DotGeneral`.
      options: options of `grouped_mlp`, such as `ep_axis`. `weight_layout` is "KN".

    Attributes:
      w13_state, w2_state: a `ScalingState` with a scale for each expert under `DelayedScaling`, else None.
      rngs: a random stream if the recipe rounds stochastically, else None.

    Raises:
      TypeError: `grouped_mlp` has no such option.
      ValueError: the recipe rounds stochastically and `rngs` is missing.

    >>> mlp = GroupedMLP("CurrentScaling", 4)
    >>> x, w13, w2 = jnp.ones((2, 32)), jnp.ones((4, 32, 64)), jnp.full((4, 32, 32), 0.125)
    >>> mlp(x, jnp.array([[0, 1], [3, 0]]), jnp.full((2, 2), 0.5), w13, w2)[:, 0].round()
    Array([4096., 4096.], dtype=float32)
    """

    def __init__(
        self,
        recipe: RecipeLike | None,
        num_experts: int,
        *,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        layers: tuple[int, ...] = (),
        **options: Any,
    ) -> None:
        layer.check_options("GroupedMLP", options)
        self.recipe = None if recipe is None else as_recipe(recipe, "GroupedMLP", by_product=False)
        self.options = nnx.static(tuple(options.items()))
        made = self.recipe
        scales = [
            ScalingState(init_delayed(made, (*layers, num_experts))) if made is not None and made.stateful else None
            for _ in range(2)
        ]
        self.w13_state: ScalingState | None = nnx.data(scales[0])
        self.w2_state: ScalingState | None = nnx.data(scales[1])
        self.rngs: nnx.RngStream | None = nnx.data(_stream_of("GroupedMLP", made, rngs, layers))

    def __call__(
        self, x: jax.Array, indices: jax.Array, weights: jax.Array, w13: jax.Array, w2: jax.Array
    ) -> jax.Array:
        """Call `grouped_mlp` with the states and the seeds of this layer."""
        given: dict[str, Any] = dict(self.options)
        if self.w13_state is not None and self.w2_state is not None:
            given["states"] = self.w13_state.get_value(), self.w2_state.get_value()
        if self.rngs is not None:
            given["seeds"] = self.rngs(), self.rngs()
        return grouped_mlp(x, indices, weights, w13, w2, self.recipe, weight_layout="KN", **given)


class ExpertBias(nnx.Variable[jax.Array]):
    """The bias of each expert for the choice of `MoE`, which the training loop updates. It is not a parameter."""


class MoE(nnx.Module):
    """A mixture-of-experts layer in place of an MLP: `topk_routing` and `grouped_mlp`, with parameters.

    `convert` gives it another recipe, and the sharding of its weights.

    Args:
      hidden_size: H, the width of tokens.
      intermediate_size: I, the width of each expert between its products.
      num_experts: E.
      top_k: number of experts of each token.
      recipe: the format of each role, or its name, for the products of experts; None for no quantization. The router is
        not quantized.
      score_function: as for `topk_routing`.
      normalize: as for `topk_routing`.
      scale: as for `topk_routing`.
      expert_bias: add an `ExpertBias` to the scores for the choice of experts, as in load balancing without an
        auxiliary loss. It starts as zeros, and the training loop updates it.
      shared_intermediate_size: I of a shared expert, which takes every token with weight 1; None for no such expert.
      kernel_init: the initializer of `w13` and `w2`.
      param_dtype: the dtype of parameters.
      rngs: source of parameters, and of seeds as for `DotGeneral`.
      options: options of `grouped_mlp`, such as `ep_axis` for expert parallelism. In `shard_map` a device has the
        weights of its experts.

    Attributes:
      router: `[H, E]`.
      w13: the weights of gate and up, `[E, H, 2 I]`.
      w2: `[E, I, H]`.
      experts: the `GroupedMLP`.
      shared_w13, shared_w2: the `nnx.Linear`s of the shared expert; None without one.

    Raises:
      TypeError: `grouped_mlp` has no such option.
      ValueError: as for `topk_routing` and `GroupedMLP`.

    >>> moe = MoE(32, 64, num_experts=4, top_k=2, recipe="CurrentScaling", rngs=nnx.Rngs(0))
    >>> y, logits = moe(jnp.ones((3, 5, 32)), return_router_logits=True)
    >>> y.shape, logits.shape
    ((3, 5, 32), (3, 5, 4))

    Sources: arXiv:2401.04088 (Mixtral); arXiv:2412.19437 (DeepSeek-V3); torchtitan (`MoE`).
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        num_experts: int,
        top_k: int,
        recipe: RecipeLike | None,
        score_function: ScoreFunction = "softmax",
        normalize: bool = True,
        scale: float = 1.0,
        expert_bias: bool = False,
        shared_intermediate_size: int | None = None,
        kernel_init: Any = layer.INITIALIZER,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        layer.check_options("MoE", options)
        check_scores((num_experts,), top_k, score_function, None)
        init_router = layer.router_initializer(hidden_size)
        self.router = nnx.Param(init_router(rngs.params(), (hidden_size, num_experts), param_dtype))
        w13, w2 = (num_experts, hidden_size, 2 * intermediate_size), (num_experts, intermediate_size, hidden_size)
        self.w13 = nnx.Param(kernel_init(rngs.params(), w13, param_dtype))
        self.w2 = nnx.Param(kernel_init(rngs.params(), w2, param_dtype))
        self.experts = GroupedMLP(recipe, num_experts, rngs=rngs, **options)
        self.top_k = top_k
        self.routing = nnx.static((("score_function", score_function), ("normalize", normalize), ("scale", scale)))
        bias = ExpertBias(jnp.zeros(num_experts)) if expert_bias else None
        self.expert_bias: ExpertBias | None = nnx.data(bias)
        shared: list[nnx.Linear | None] = [None, None]
        if shared_intermediate_size is not None:
            sizes = (hidden_size, 2 * shared_intermediate_size), (shared_intermediate_size, hidden_size)
            for i, (inputs, outputs) in enumerate(sizes):
                own: dict[str, Any] = {} if recipe is None else {"dot_general": DotGeneral(recipe, rngs=rngs)}
                shared[i] = nnx.Linear(inputs, outputs, use_bias=False, param_dtype=param_dtype, rngs=rngs, **own)
        self.shared_w13: nnx.Linear | None = nnx.data(shared[0])
        self.shared_w2: nnx.Linear | None = nnx.data(shared[1])

    @overload
    def __call__(self, x: jax.Array, return_router_logits: Literal[False] = False) -> jax.Array: ...
    @overload
    def __call__(self, x: jax.Array, return_router_logits: Literal[True]) -> tuple[jax.Array, jax.Array]: ...
    def __call__(self, x: jax.Array, return_router_logits: bool = False) -> jax.Array | tuple[jax.Array, jax.Array]:
        """Apply the experts of each token of `x` `[..., H]`. Optionally also return the logits, `[..., E]`."""
        bias = None if self.expert_bias is None else self.expert_bias.get_value()
        routing: dict[str, Any] = {"bias": bias, **dict(self.routing)}
        w13, w2 = self.w13.get_value(), self.w2.get_value()
        shared = None if self.shared_w13 is None or self.shared_w2 is None else (self.shared_w13, self.shared_w2)
        experts = lambda x, indices, weights: self.experts(x, indices, weights, w13, w2)  # noqa: E731
        y, logits = layer.apply_moe(x, self.router.get_value(), self.top_k, routing, experts, shared)
        return (y, logits) if return_router_logits else y
