"""The GEMM of two quantized tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from qshard.formats import Format, Usage
from qshard.jax.array import QuantizedArray, plane_values
from qshard.jax.cuts import matrix_of
from qshard.layout import is_transposed, multiplies_codes, source

__all__ = ["Side", "gemm", "stored_for"]


def stored_for(fmt: Format, other: Format, contracted: Usage) -> Usage:
    """The plane that a GEMM with `other` reads. One that multiplies values may contract any axis of square blocks."""
    return contracted if multiplies_codes(fmt, other) else source(fmt, contracted)


@dataclass(frozen=True)
class Side:
    """One side of a GEMM: a tensor, and which of its axes are contracted: the last (`ROWWISE`), or all others."""

    tensor: QuantizedArray
    contracted: Usage

    def stored(self, other: Format) -> Usage:
        return stored_for(self.tensor.format, other, self.contracted)

    def values(self, other: Format) -> tuple[jax.Array, tuple[int, ...]]:
        """Values as bfloat16, and their axes to contract."""
        q, stored = self.tensor, self.stored(other)
        values = plane_values(q.plane(stored), q.format, stored, "bfloat16", len(q.axes))
        transposed = is_transposed(q.format, stored)
        if transposed or self.contracted is Usage.ROWWISE:
            return values, (values.ndim - 1,)
        return values, tuple(range(values.ndim - 1))


def gemm(a: Side, b: Side, dtype: Any, *, precise: bool, out_sharding: Any = None) -> jax.Array:
    """The product of two tensors over their contracted axes, fp32 sums of it: what is left of `a`, then of `b`.

    Of formats with one scale, a dot of codes, then the scales. XLA makes it a cuBLASLt FP8 matmul where the hardware
    has that, and elsewhere a product of codes converted exactly. Both operands have the contracted axis last ("TN"),
    Hopper's only FP8 layout. Dequantizing first and leaving it to XLA to undo that is the better known form, and
    fragile: with bfloat16 operands jax 0.11 on an H200 did not, and took 1.3 ms in place of 0.8 (8192 x 4096 x 14336,
    bf16 result).

    Of blocks, a bfloat16 GEMM of dequantized values: XLA has no GEMM for Hopper that takes their scales. FP8 codes with
    power-of-two scales are bfloat16 numbers; others are rounded once more.

    Args:
      dtype: of the result. A bfloat16 result of codes is rounded twice, before and after the scales, since the scales
        do not join such a GEMM, and an fp32 one costs more to write and read: 0.81 ms against 0.77 alone, and 0.98
        against 0.80 before an elementwise operation. Powers of two do join, round once, and take 0.64.
      precise: accumulate in fp32 throughout. Given FP8, Hopper's tensor cores by themselves keep fewer bits, in a
        tenth less time.
      out_sharding: of the result, on Explicit meshes where operands leave it open.
    """
    a_format, b_format = a.tensor.format, b.tensor.format
    # A float16 result could overflow before the scales.
    narrow = jnp.bfloat16 if jnp.dtype(dtype) == jnp.bfloat16 else jnp.float32
    if not multiplies_codes(a_format, b_format):
        (x, x_axes), (y, y_axes) = a.values(b_format), b.values(a_format)
        if len(x_axes) != len(y_axes):
            x, x_axes = _as_matrix(x, x_axes)
            y, y_axes = _as_matrix(y, y_axes)
        product = lax.dot_general(
            x, y, ((x_axes, y_axes), ((), ())), preferred_element_type=narrow, out_sharding=out_sharding
        )
        return product.astype(dtype)
    a_plane, b_plane = (each.tensor.plane(each.stored(other)) for each, other in ((a, b_format), (b, a_format)))
    product = lax.dot_general(
        a_plane.data,
        b_plane.data,
        (((a_plane.data.ndim - 1,), (b_plane.data.ndim - 1,)), ((), ())),
        precision=lax.Precision.HIGHEST if precise else lax.Precision.DEFAULT,
        preferred_element_type=narrow,
        out_sharding=out_sharding,
    )
    if not (a_format.scaling.pow2 and b_format.scaling.pow2):
        product = product.astype(jnp.float32)
    scaled: jax.Array = product * (a_plane.scale_inv * b_plane.scale_inv).astype(product.dtype)
    return scaled.astype(dtype)


def _as_matrix(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, tuple[int]]:
    return (x, (axes[0],)) if len(axes) == 1 and x.ndim == 2 else (matrix_of(x), (0,))
