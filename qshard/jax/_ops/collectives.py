"""Reductions of amaxes and of partial sums, within an array and over devices.

A maximum is one of the bits of fp32 amaxes as integers: exact in any order, and NaN wins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from qshard.jax._ops.mesh import vary_alike


def max_over(axes: tuple[str, ...]) -> Callable[[jax.Array], jax.Array]:
    """The maximum of amaxes over manual mesh axes, as a function."""
    return lambda amax: as_float(lax.pmax(as_bits(amax), axes)) if axes else amax


def max_along(amax: jax.Array, lead: int = 0) -> jax.Array:
    """The maximum along all array axes but the `lead` first."""
    if amax.ndim == lead:  # XLA would launch a kernel for it.
        return amax
    return as_float(jnp.max(as_bits(amax), axis=tuple(range(lead, amax.ndim)), initial=0))


def max_of_groups(amax: jax.Array, group: jax.Array, count: int) -> jax.Array:
    """The maximum of the amaxes of each of `count` groups; those of other groups are left out."""
    maxima, bits, group = vary_alike(jnp.zeros(count, jnp.int32), as_bits(amax), group)
    return as_float(maxima.at[group].max(bits, mode="drop"))


def sum_over(x: jax.Array, scattered: Iterable[tuple[int, Any]], summed: tuple[str, ...] = ()) -> jax.Array:
    """The sum over manual mesh axes.

    Args:
      scattered: array axes and mesh axes: each device keeps its part along that array axis.
      summed: mesh axes whose devices all get the sum.
    """
    for axis, names in scattered:
        x = lax.psum_scatter(x, names, scatter_dimension=axis, tiled=True)
    return lax.psum(x, summed) if summed else x


def as_bits(amax: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(amax, jnp.int32)


def as_float(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)
