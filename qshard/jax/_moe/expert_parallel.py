"""The MLP of experts that devices share: each device has its own tokens, and other experts than the other devices.

    rows by expert  --w13-->  gate, up  --SwiGLU-->  h  --w2-->  y
              dispatch                                  combine

Forward dispatches rows of tokens and combines rows of y; backward dispatches gradients of y and combines gradients of
rows. `_experts/expert_parallel.py` says when codes are dispatched. Results are combined as values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from qshard._core.validation import join_names
from qshard.jax._experts.expert_parallel import exchanged_rows
from qshard.jax._experts.token_exchange import TokenExchange, check_capacity, device_count
from qshard.jax._ops.mesh import vary_alike
from qshard.jax._ops.validation import as_axes
from qshard.recipes import Recipe

Products = Callable[[jax.Array, Any, Any, Any, Any], jax.Array]
"""Both ragged products, with SwiGLU between. Arguments: rows, the rows of each expert for both, and both weights."""


def expert_axes(ep_axis: Any, axis_name: Any, capacity_factor: Any) -> tuple[str, ...]:
    """Return the mesh axes of experts, or raise TypeError or ValueError."""
    axes = as_axes("grouped_mlp", ep_axis, "ep_axis")
    check_capacity("grouped_mlp", capacity_factor, axes)
    if both := [axis for axis in axes if axis in as_axes("grouped_mlp", axis_name)]:
        raise ValueError(
            f"grouped_mlp: axis_name and ep_axis both have {join_names(map(repr, both))}, but rows of one expert go to "
            "one device of ep_axis; pass in axis_name only axes over which experts are the same"
        )
    return axes if device_count(axes) > 1 else ()


def parallel_mlp(
    products: Products,
    rows: jax.Array,
    w13: Any,
    w2: Any,
    group_sizes: jax.Array,
    recipe: Recipe | None,
    axes: tuple[str, ...],
    capacity_factor: float | None,
) -> jax.Array:
    """Apply the experts of all devices to rows sorted by expert. `group_sizes` counts all experts, `[E]`."""
    rows, group_sizes = vary_alike(rows, group_sizes)
    exchange = TokenExchange.of(group_sizes, rows.shape[0], axes, capacity_factor)
    if recipe is None:
        w13, w2, sizes = exchange.guard(w13), exchange.guard(w2), exchange.group_sizes
        return _combine(products(_dispatch(rows, exchange), sizes, sizes, w13, w2), exchange)
    first, second = exchanged_rows(exchange, recipe)
    return products(rows, first, second, w13, w2)


@jax.custom_vjp
def _dispatch(x: jax.Array, exchange: TokenExchange) -> jax.Array:
    """Source rows to rows of the local experts, sorted by expert."""
    return exchange.dispatch(x)[exchange.order]


@jax.custom_vjp
def _combine(y: jax.Array, exchange: TokenExchange) -> jax.Array:
    """Rows of the local experts, sorted by expert, to source rows."""
    return exchange.combine(y[exchange.position])


_dispatch.defvjp(
    lambda x, exchange: (_dispatch(x, exchange), exchange),
    lambda exchange, grad: (exchange.combine(grad[exchange.position]), None),
)
_combine.defvjp(
    lambda y, exchange: (_combine(y, exchange), exchange),
    lambda exchange, grad: (exchange.dispatch(grad)[exchange.order], None),
)
