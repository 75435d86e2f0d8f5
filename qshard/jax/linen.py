"""Flax linen modules for recipes that keep state or draw random numbers. Requires flax."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from qshard._core.layers import ScoreFunction
from qshard.jax._delayed_scaling import init_delayed
from qshard.jax._experts.token_exchange import device_count
from qshard.jax._moe import layer
from qshard.jax._moe.expert_parallel import expert_axes
from qshard.jax._moe.grouped_mlp import grouped_mlp
from qshard.jax._nn import dot_general as dot
from qshard.recipes import RecipeLike, as_recipe

__all__ = ["EXPERT_BIAS", "STATES", "DotGeneral", "MoE"]

STATES = "scaling_states"
"""The variable collection with the states of `DelayedScaling`."""
EXPERT_BIAS = "expert_bias"
"""The variable collection with the biases of experts for the choice of `MoE`."""


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


class MoE(nn.Module):
    """A mixture-of-experts layer in place of an MLP: `topk_routing` and `grouped_mlp`, with parameters.

    The parameters are `router` `[H, E]`, `w13` `[E, H, 2 I]` with the weights of gate and up, `w2` `[E, I, H]`, and the
    layers `shared_w13` and `shared_w2` of the shared expert. States are in the collection "scaling_states", and seeds
    come from `make_rng("qshard")`, as for `DotGeneral`.

    Attributes:
      intermediate_size: I, the width of each expert between its products.
      num_experts: E.
      top_k: number of experts of each token.
      recipe: the format of each role, or its name, for the products of experts; None for no quantization. The router is
        not quantized.
      score_function: as for `topk_routing`.
      normalize: as for `topk_routing`.
      scale: as for `topk_routing`.
      expert_bias: add the variable `bias` of the collection "expert_bias" to the scores for the choice of experts, as
        in load balancing without an auxiliary loss. It starts as zeros, and the training loop updates it.
      shared_intermediate_size: I of a shared expert, which takes every token with weight 1; None for no such expert.
      kernel_init: the initializer of `w13` and `w2`.
      param_dtype: the dtype of parameters.
      options: options of `grouped_mlp`, such as `{"ep_axis": "ep"}` for expert parallelism. `init` creates all experts;
        `apply` in `shard_map` takes the experts of one device.

    >>> moe = MoE(64, num_experts=4, top_k=2, recipe="CurrentScaling")
    >>> x = jnp.ones((3, 5, 32))
    >>> variables = moe.init(jax.random.key(0), x)
    >>> y, logits = moe.apply(variables, x, return_router_logits=True)
    >>> y.shape, logits.shape
    ((3, 5, 32), (3, 5, 4))

    Sources: arXiv:2401.04088 (Mixtral); arXiv:2412.19437 (DeepSeek-V3); torchtitan (`MoE`).
    """

    intermediate_size: int
    num_experts: int
    top_k: int
    recipe: RecipeLike | None
    score_function: ScoreFunction = "softmax"
    normalize: bool = True
    scale: float = 1.0
    expert_bias: bool = False
    shared_intermediate_size: int | None = None
    kernel_init: Any = layer.INITIALIZER
    param_dtype: Any = jnp.float32
    options: Mapping[str, Any] | None = None

    @nn.compact
    def __call__(self, x: jax.Array, return_router_logits: bool = False) -> Any:
        """Apply the experts of each token of `x` `[..., H]`. Optionally also return the logits, `[..., E]`."""
        hidden, recipe = x.shape[-1], None if self.recipe is None else as_recipe(self.recipe, "MoE", by_product=False)
        given: dict[str, Any] = dict(self.options or {})
        layer.check_options("MoE", given)
        if self.is_initializing():
            given.pop("ep_axis", None)
            given.pop("capacity_factor", None)
        axes = expert_axes(*(given.get(name) for name in ("ep_axis", "axis_name", "capacity_factor")))
        local = self.num_experts // device_count(axes)
        router = self.param("router", layer.router_initializer(hidden), (hidden, self.num_experts), self.param_dtype)
        w13 = self.param("w13", self.kernel_init, (local, hidden, 2 * self.intermediate_size), self.param_dtype)
        w2 = self.param("w2", self.kernel_init, (local, self.intermediate_size, hidden), self.param_dtype)
        if recipe is not None and recipe.stateful:
            begin = functools.partial(init_delayed, recipe, (local,))
            given["states"] = tuple(self.variable(STATES, name, begin).value for name in ("w13", "w2"))
        if recipe is not None and recipe.stochastic:
            given["seeds"] = self.make_rng("qshard"), self.make_rng("qshard")
        routing: dict[str, Any] = {"score_function": self.score_function, "normalize": self.normalize}
        routing["scale"] = self.scale
        if self.expert_bias:
            routing["bias"] = self.variable(EXPERT_BIAS, "bias", jnp.zeros, self.num_experts).value
        shared = None
        if self.shared_intermediate_size is not None:
            own: dict[str, Any] = {"use_bias": False, "param_dtype": self.param_dtype}
            if recipe is not None:
                own["dot_general_cls"] = functools.partial(DotGeneral, recipe)
            up = nn.Dense(2 * self.shared_intermediate_size, name="shared_w13", **own)
            shared = up, nn.Dense(hidden, name="shared_w2", **own)

        def experts(x: jax.Array, indices: jax.Array, weights: jax.Array) -> jax.Array:
            return grouped_mlp(x, indices, weights, w13, w2, recipe, weight_layout="KN", **given)

        y, logits = layer.apply_moe(x, router, self.top_k, routing, experts, shared)
        return (y, logits) if return_router_logits else y
