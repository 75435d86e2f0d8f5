"""Rounding of float32 products that compilers do not fuse with sums."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_CANONICAL_NAN, _OTHER_NAN = np.uint32(0x7FC00000), np.uint32(0x7FC00001)


@jax.custom_jvp
def round_product(product: jax.Array) -> jax.Array:
    """Return a float32 product so that no compiler joins it with a sum into one operation that rounds once.

    Whether it would depends on the program around, and so on the sharding. A NaN changes its payload at most.
    """
    bits = lax.bitcast_convert_type(product, jnp.uint32)
    return lax.bitcast_convert_type(jnp.where(bits == _OTHER_NAN, _CANONICAL_NAN, bits), jnp.float32)


round_product.defjvps(lambda tangent, out, product: tangent)
