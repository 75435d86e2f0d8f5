"""Reductions over devices."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax


def max_over(axes: tuple[str, ...]) -> Callable[[jax.Array], jax.Array]:
    """The maximum of fp32 amaxes over manual mesh axes, of their bits as integers: so it is exact, and NaN wins."""
    return lambda amax: as_float(lax.pmax(as_bits(amax), axes)) if axes else amax


def as_bits(amax: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(amax, jnp.int32)


def as_float(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)
