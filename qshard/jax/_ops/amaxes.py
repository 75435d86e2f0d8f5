"""Maxima of amaxes, within an array and over devices.

Maxima are taken over the bits of fp32 amaxes as integers: exact in any order, and NaN wins.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax


def max_over(axes: tuple[str, ...]) -> Callable[[jax.Array], jax.Array]:
    """Return a function that max-reduces amaxes over manual mesh axes."""
    return lambda amax: as_float(lax.pmax(as_bits(amax), axes)) if axes else amax


def max_along(amax: jax.Array, lead: int = 0) -> jax.Array:
    """Return the maximum along all array axes except the first `lead`."""
    if amax.ndim == lead:  # XLA would launch a kernel for a reduction over no axes.
        return amax
    return as_float(jnp.max(as_bits(amax), axis=tuple(range(lead, amax.ndim)), initial=0))


def as_bits(amax: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(amax, jnp.int32)


def as_float(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)
