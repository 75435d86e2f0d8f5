"""Maxima of amaxes: taken of their bits as integers, which is exact in any order and lets NaN win."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["as_bits", "as_float", "integer_max", "max_over"]


def integer_max(amax: jax.Array, lead: int) -> jax.Array:
    """The maximum over all but the `lead` first axes."""
    return as_float(jnp.max(as_bits(amax), axis=tuple(range(lead, amax.ndim)), initial=0))


def max_over(axes: tuple[str, ...]) -> Callable[[jax.Array], jax.Array]:
    """The elementwise maximum over manual mesh axes, as a function of fp32 amaxes."""
    return lambda amax: as_float(lax.pmax(as_bits(amax), axes)) if axes else amax


def as_bits(amax: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(amax, jnp.int32)


def as_float(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)
