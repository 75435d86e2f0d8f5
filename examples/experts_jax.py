"""Experts of train_jax.py (`--experts`): tokens are sorted by expert, and one ragged product multiplies them all.

`gpt.py` has the formulas. A weight has all experts of a layer, `[experts, rows, columns]`, and is sharded by rows.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import qshard.jax as qshard
from gpt import expert_names
from modes import Layout, gather, spec_of
from qshard.recipes import Recipe

Product = Callable[[jax.Array, jax.Array, str], jax.Array]
"""Multiplies tokens. Arguments: tokens sorted by expert, the number of tokens of each expert, the name of a layer."""


def routed(x: jax.Array, router: jax.Array, product: Product) -> tuple[jax.Array, jax.Array]:
    """Apply to each token [batch, context, width] the MLP that a router [width, experts] chooses.

    Returns:
      The result, and the imbalance of experts: 1 if all have the same number of tokens.
    """
    tokens, experts = x.reshape(-1, x.shape[-1]), router.shape[1]
    probabilities = jax.nn.softmax(tokens.astype(jnp.float32) @ router.astype(jnp.float32))
    chosen = probabilities.argmax(-1)
    sizes = jnp.bincount(chosen, length=experts)
    gate = jnp.take_along_axis(probabilities, chosen[:, None], -1)
    order = jnp.argsort(chosen, stable=True)
    hidden = jax.nn.relu(product(tokens[order], sizes, "up")) ** 2
    y = gate * product(hidden, sizes, "down")[jnp.argsort(order)]
    uneven = experts * jnp.dot(sizes / len(chosen), probabilities.mean(0))
    return y.astype(x.dtype).reshape(x.shape), uneven


def grouped_linear(
    layout: Layout,
    x: jax.Array,
    shard: jax.Array,
    sizes: jax.Array,
    name: str,
    recipe: Recipe | None,
    given: dict[str, Any],
) -> jax.Array:
    """Return `x_e @ w[e].T` for the tokens of each expert, in the recipe's formats, or in bfloat16 without a recipe.

    Args:
      layout: the mode's way to gather and reduce.
      x: tokens sorted by expert, `[tokens, columns]`.
      shard: this weight's shard.
      sizes: number of tokens of each expert.
      name: name of the weight.
      recipe: formats, or None.
      given: further arguments of `qshard.ragged_dot`.

    Returns:
      `[tokens, rows]`.
    """
    if recipe is None:
        return _bf16(layout, name, x, shard, sizes)
    where = {"weight_layout": "NK", "weight_spec": spec_of(layout.mesh, name), "gather_axis": "fsdp"}
    return qshard.ragged_dot(x, shard, sizes, recipe, **where, **given)


@partial(jax.checkpoint, static_argnums=(0, 1))
def _bf16(layout: Layout, name: str, x: jax.Array, shard: jax.Array, sizes: jax.Array) -> jax.Array:
    """The bf16 baseline. The backward pass gathers the weight again, as with a recipe."""
    return jax.lax.ragged_dot(x, _whole(layout, name, shard).swapaxes(1, 2).astype(x.dtype), sizes)


def _whole(layout: Layout, name: str, shard: jax.Array) -> jax.Array:
    return jax.vmap(partial(gather, layout, expert_names(name, 1)[0]))(shard)


def gathered_weights(
    layout: Layout, shard: Any, name: str, recipe: Recipe | None, state: qshard.LinearState | None
) -> dict[str, Any]:
    """Return the gathered weights of `grouped_linear`, by expert."""
    number = len(jax.tree.leaves(shard)[0])
    if recipe is None:
        return dict(zip(expert_names(name, number), _whole(layout, name, shard), strict=True))
    found = {}
    for i, own in enumerate(expert_names(name, number)):
        one, scale = jax.tree.map(lambda array, i=i: array[i], (shard, state))
        found[own] = layout.gathered_weight(one, own, recipe, {"state": scale, "seed": 0})
    return found
