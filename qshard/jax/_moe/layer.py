"""A whole mixture-of-experts layer, for the flax modules: router, experts and an optional shared expert."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from qshard._core.validation import quote
from qshard.jax._moe.grouped_mlp import grouped_mlp
from qshard.jax._moe.router import topk_routing
from qshard.jax._nn.activations import swiglu_gate_up

Layer = Callable[[jax.Array], jax.Array]

_PER_CALL = ("x", "indices", "weights", "w13", "w2", "recipe", "seeds", "states", "weight_layout")
OPTIONS = tuple(name for name in inspect.signature(grouped_mlp).parameters if name not in _PER_CALL)
"""The arguments of `grouped_mlp` that are options of a layer."""

INITIALIZER = jax.nn.initializers.lecun_normal(batch_axis=(0,))
"""The default initializer of `w13` and `w2`: each expert as a layer by itself."""


def check_options(op: str, options: dict[str, Any]) -> None:
    """Raise TypeError for an option that `grouped_mlp` does not have."""
    for name in options:
        if name not in OPTIONS:
            raise TypeError(f"{op}: {name} ({quote(options[name])}) is not an option; pass one of {', '.join(OPTIONS)}")


def router_initializer(hidden_size: int) -> Any:
    return jax.nn.initializers.normal(hidden_size**-0.5)


def apply_moe(
    x: jax.Array,
    router: jax.Array,
    top_k: int,
    routing: dict[str, Any],
    experts: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    shared: tuple[Layer, Layer] | None,
) -> tuple[jax.Array, jax.Array]:
    """Return y and the logits of the router `[H, E]`.

    `routing` are options of `topk_routing`, `experts` a function of x, indices and weights, and `shared` the layers of
    the shared expert.
    """
    logits = jnp.matmul(x, router)
    indices, weights = topk_routing(logits, top_k, **routing)
    y = experts(x, indices, weights)
    if shared is not None:
        w13, w2 = shared
        y = y + w2(swiglu_gate_up(w13(x)))
    return y, logits
