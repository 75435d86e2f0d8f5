"""64-bit integers as two uint32, low and high, because JAX has no wider integers by default."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qshard._core.validation import quote, uint32_pair

Uint64 = tuple[jax.Array, jax.Array]
"""The low halves and the high halves of uint64 numbers."""


def as_uint64(number: Any, what: str = "number") -> Any:
    """Return an integer as uint32 `[2]`, low half first: a NumPy array for an int or a NumPy integer, else a JAX array.

    An int outside of [0, 2**64) raises, and `what` names it in the error. A JAX integer is taken modulo 2**64.
    """
    is_numpy = isinstance(number, np.ndarray) and number.ndim == 0 and np.issubdtype(number.dtype, np.integer)
    if isinstance(number, int | np.integer) or is_numpy:  # JAX would cut 64-bit integers of NumPy to 32 bits.
        return np.array(uint32_pair(what, int(number)), np.uint32)
    if not jnp.issubdtype(jnp.result_type(number), jnp.integer):
        raise TypeError(f"{what} ({quote(number)}) is not an integer; pass one in [0, 2**64)")
    number = jnp.asarray(number)
    if number.dtype.itemsize == 8:
        return jnp.stack([(number & 0xFFFFFFFF).astype(jnp.uint32), (number >> 32).astype(jnp.uint32)])
    # Sign extension: the high half of a negative number has all bits set.
    return jnp.stack([number.astype(jnp.uint32), jnp.where(number < 0, jnp.uint32(0xFFFFFFFF), jnp.uint32(0))])


def xor_uint64(words: jax.Array, number: int) -> jax.Array:
    """XOR uint64 numbers, as uint32 pairs, with a number."""
    made: jax.Array = words ^ as_uint64(number).view(words.dtype)
    return made


def add_uint64(a: Uint64, b: Uint64) -> Uint64:
    """Add two uint64 numbers modulo 2**64."""
    low = a[0] + b[0]
    return low, a[1] + b[1] + (low < a[0]).astype(jnp.uint32)


def multiply_uint64(a: jax.Array, number: int) -> Uint64:
    """Multiply uint32 numbers by an integer, modulo 2**64."""
    low, high = (int(word) for word in as_uint64(number))
    a0, a1, b0, b1 = a & np.uint32(0xFFFF), a >> 16, np.uint32(low & 0xFFFF), np.uint32(low >> 16)
    p00, p01, p10, p11 = a0 * b0, a0 * b1, a1 * b0, a1 * b1
    middle = (p00 >> 16) + (p01 & np.uint32(0xFFFF)) + (p10 & np.uint32(0xFFFF))
    return a * np.uint32(low), p11 + (p01 >> 16) + (p10 >> 16) + (middle >> 16) + a * np.uint32(high)
