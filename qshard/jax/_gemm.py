"""The GEMM of two quantized planes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from qshard.formats import Format
from qshard.jax._array import Plane

__all__ = ["gemm"]


def gemm(
    a: Plane, a_format: Format, b: Plane, b_format: Format, dtype: Any, *, precise: bool, out_sharding: Any = None
) -> jax.Array:
    """`a @ b.T` of per-tensor planes: contracts the last axes of `a` `[*lead, K]` and `b` `[N, K]`.

    One dot of codes, then the scales. XLA makes it a cuBLASLt FP8 matmul where the hardware has that, and elsewhere a
    product of codes converted exactly. Both operands have the contracted axis last ("TN"), Hopper's only FP8 layout.

    Dequantizing first and leaving it to XLA to undo that is the better known form, and fragile: with bfloat16 operands
    jax 0.11 on an H200 did not, and took 1.3 ms in place of 0.8 (8192 x 4096 x 14336, bf16 result).

    Args:
      dtype: of the result. A bfloat16 result is rounded twice, before and after the scales, since the scales do not
        join such a GEMM, and an fp32 one costs more to write and read: 0.81 ms against 0.77 alone, and 0.98 against
        0.80 before an elementwise operation. Scales that are powers of two do join, round once, and take 0.64 ms.
      precise: accumulate in fp32 throughout. Hopper's tensor cores by themselves keep fewer bits, in a tenth less time.
      out_sharding: of the result, on Explicit meshes where operands leave it open.
    """
    exact = a_format.pow2 and b_format.pow2
    narrow = jnp.dtype(dtype) == jnp.bfloat16  # A float16 result could overflow before the scales.
    y = lax.dot_general(
        a.data,
        b.data,
        (((a.data.ndim - 1,), (b.data.ndim - 1,)), ((), ())),
        precision=lax.Precision.HIGHEST if precise else lax.Precision.DEFAULT,
        preferred_element_type=jnp.bfloat16 if narrow else jnp.float32,
        out_sharding=out_sharding,
    )
    if narrow and not exact:
        y = y.astype(jnp.float32)
    return (y * (a.scale_inv * b.scale_inv).astype(y.dtype)).astype(dtype)
