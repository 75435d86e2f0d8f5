"""Padded rows of experts as arrays: gathered rows, and the values of experts for each of their rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from qshard.jax._ops.uint64 import multiply_uint64


def gather_rows(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Gather rows of x `[T, K]` into padded rows `[P, K]`; zeros where `rows` has T or more."""
    made: jax.Array = jnp.asarray(x).at[rows].get(mode="fill", fill_value=0)
    return made


def count_stops(stops: jax.Array, rows: jax.Array) -> jax.Array:
    """Return how many of `stops` `[E]` each of `rows` `[P]` has reached, int32 `[P]`: with sorted stops, its expert.

    `jnp.searchsorted` fails in a `shard_map` over some axes of a mesh (JAX 0.10.2).
    """
    return jnp.sum(stops[None] <= rows[:, None], 1, dtype=jnp.int32)


def experts_of_strips(stops: jax.Array, strip: int, count: int) -> jax.Array:
    """Return the expert of the first row of each strip of `strip` padded rows, int32 `[count]`; E for no expert."""
    return count_stops(stops, jnp.arange(0, strip * count, strip, dtype=jnp.int32))


def values_of_strips(values: jax.Array, stops: jax.Array, strip: int, shape: tuple[int, ...]) -> jax.Array:
    """Repeat the value of each expert for its strips, along the last axis of `shape`. Strips of no expert get 0."""
    own = jnp.append(values, jnp.zeros((), values.dtype))[experts_of_strips(stops, strip, shape[-1])]
    return jnp.broadcast_to(own, shape)


def philox_of_rows(seeds: jax.Array, stops: jax.Array, rows: int, columns: int) -> tuple[jax.Array, jax.Array]:
    """Return the Philox key and offset of each padded row, uint32 `[rows, 2]`: each expert counts its own elements."""
    expert = experts_of_strips(stops, 1, rows)
    begin = jnp.concatenate([jnp.zeros(1, jnp.int32), stops])[expert]
    first = multiply_uint64((jnp.arange(rows, dtype=jnp.int32) - begin).astype(jnp.uint32), columns)
    return seeds[jnp.minimum(expert, stops.shape[0] - 1)], jnp.stack(first, axis=-1)
