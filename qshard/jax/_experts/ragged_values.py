"""`ragged_dot` without quantization: a differentiable product of bfloat16 or float16 values for each expert."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from qshard.jax._gemm import grouped_gemm
from qshard.jax._ops.scheduling import barrier
from qshard.jax._ops.second_derivatives import rules_of_product
from qshard.jax._quantized.gather import WeightSharding
from qshard.jax._sharding.shard_spec import reshard


@dataclass(frozen=True)
class ValueConfig:
    """Static options of a call. `sharding` describes the weight of one expert."""

    sharding: WeightSharding
    reshard_after_forward: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def value_product(config: ValueConfig, x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Multiply the rows of each expert in x `[M, K]` by its weight in the dtype of x, with zeros in rows of no expert.

    The first element is NaN if `group_sizes` are negative or add up to more rows than x has.
    """
    return _forward(config, x, w, group_sizes)[0]


def _forward(config: ValueConfig, x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> tuple[jax.Array, Any]:
    whole = _gather(config, w.astype(x.dtype))
    y = _row_product(x, whole, config.sharding.layout.index("K"), group_sizes)
    return y, (x, w if config.sharding.gather_axes and config.reshard_after_forward else whole, w[:0], group_sizes)


def _backward(config: ValueConfig, saved: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, w, like_w, group_sizes = saved
    gathers = bool(config.sharding.gather_axes)
    if gathers and config.reshard_after_forward:
        w, dy = barrier(w, dy)
        w = _gather(config, w.astype(x.dtype))
    dx = _row_product(dy, w, config.sharding.layout.index("N"), group_sizes)
    a, b = (dy, x) if config.sharding.layout == "NK" else (x, dy)
    dw = grouped_gemm.contract_rows(a, b, _ends(group_sizes), like_w.dtype)
    dw = jax.vmap(config.sharding.scatter)(dw)
    if gathers:  # As in `linear`: `scheduling.py`.
        dw, dx = barrier(dw, dx)
    return dx, dw, None


value_product.defvjp(*rules_of_product("ragged_dot", _forward, _backward))


def _row_product(rows: jax.Array, w: jax.Array, axis: int, group_sizes: jax.Array) -> jax.Array:
    """Multiply the rows of each expert. `axis` is the contracted axis of one weight."""
    ends, count = _ends(group_sizes), rows.shape[0]
    y = grouped_gemm.multiply_rows(rows, w, axis + 1, ends, rows.dtype)
    if not y.size:  # JAX has no index of no elements.
        return y
    fits = (ends[-1] <= count) & (group_sizes >= 0).all()
    # Writes one element. A `where` over y would read and write all of it. An index that drops the write if all is well
    # would zero the last row of each shard, where y is sharded over rows: XLA of jax 0.11 partitions such a scatter
    # wrongly. On GPUs XLA cannot compile an update of 128 bytes, or a multiple, in the result of a call.
    return jax.lax.dynamic_update_slice(y, jnp.where(fits, y[:1, :1], jnp.nan), (0, 0))


def _ends(group_sizes: jax.Array) -> jax.Array:
    return jnp.cumsum(jnp.asarray(group_sizes, jnp.int32), dtype=jnp.int32)


def _gather(config: ValueConfig, w: jax.Array) -> jax.Array:
    """Gather the weights of all experts."""
    spec, names = config.sharding.spec, config.sharding.gather_axes
    if not names:
        return w
    whole: jax.Array = jax.vmap(lambda own: reshard(own, spec, spec.without(names)))(w)
    return whole
