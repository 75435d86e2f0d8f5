"""The GEMM of two quantized tensors."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from qshard._core import quantize_steps
from qshard._core.quantize_steps import Plane
from qshard.formats import Format, Usage
from qshard.jax._gemm import block_gemm
from qshard.jax._gemm.value_gemm import gather_codes
from qshard.jax._ops.mesh import Spec, spec_of
from qshard.jax._quantized.array import QuantizedArray, plane_values
from qshard.jax._sharding import partitionable_ops
from qshard.jax._sharding.shard_spec import fold_axes, unfold
from qshard.layout import Shape, is_transposed, multiplies_codes, source


def stored_for(fmt: Format, other: Format, contracted: Usage) -> Usage:
    """The plane that a GEMM with `other` reads. One that multiplies values may contract any axis of square blocks."""
    return contracted if multiplies_codes(fmt, other) else source(fmt, contracted)


def gemm(
    a: QuantizedArray,
    a_contracted: Usage,
    b: QuantizedArray,
    b_contracted: Usage,
    dtype: Any,
    *,
    precise: bool,
    out_sharding: Any = None,
    by_rows: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """The product of two tensors over their contracted axes, fp32 sums of it: what is left of `a`, then of `b`.

    Of formats with one scale, a dot of codes, and the scale for `apply_scale`: XLA applies it where the result is read,
    in no pass of its own, if nothing stands between. XLA makes the dot a cuBLASLt FP8 matmul where the hardware has
    that, and elsewhere a product of codes converted exactly. Both operands have the contracted axis last ("TN"),
    Hopper's only FP8 layout. Dequantizing first and leaving it to XLA to undo that is the better known form, and
    fragile: with bfloat16 operands jax 0.11 on an H200 did not, and took 1.3 ms in place of 0.8 (8192 x 4096 x 14336,
    bf16 result).

    Of blocks, qshard's own GEMM of codes where the hardware has one (`block_gemm.py`): XLA has none for Hopper that
    takes their scales. Elsewhere a bfloat16 GEMM of dequantized values. FP8 codes with power-of-two scales are bfloat16
    numbers; others are rounded once more.

    Args:
      a_contracted, b_contracted: which axes of each are contracted: the last (`ROWWISE`), or all others, none of which
        has to be one with another: a mesh may cut each.
      dtype: of the product. A bfloat16 one of codes is rounded before the scale, and once scaled, since scales do not
        join such a GEMM, and an fp32 one costs more to write and read: 0.81 ms against 0.77 alone, and 0.98 against
        0.80 before an elementwise operation. Powers of two do join, round once, and take 0.64.
      precise: accumulate in fp32 throughout. Given FP8, Hopper's tensor cores by themselves keep fewer bits, in a
        tenth less time.
      out_sharding: of the result, on Explicit meshes where operands leave it open.
      by_rows: whether an Auto mesh shards x by rows alone, and no w: then no operand is gathered for the product.
    """
    a_stored, b_stored = stored_for(a.format, b.format, a_contracted), stored_for(b.format, a.format, b_contracted)
    # A float16 result could overflow before the scales.
    narrow = jnp.bfloat16 if jnp.dtype(dtype) == jnp.bfloat16 else jnp.float32
    if not multiplies_codes(a.format, b.format):

        def of_values(a_plane: Plane, b_plane: Plane) -> jax.Array:
            x, x_axes = _values(a.with_planes({a_stored: a_plane}), a_stored, a_contracted)
            y, y_axes = _values(b.with_planes({b_stored: b_plane}), b_stored, b_contracted)
            if len(x_axes) != len(y_axes):
                x, x_axes = _as_matrix(x, x_axes)
                y, y_axes = _as_matrix(y, y_axes)
            return lax.dot_general(
                x, y, ((x_axes, y_axes), ((), ())), preferred_element_type=narrow, out_sharding=out_sharding
            )

        usages = (a_stored, a_contracted), (b_stored, b_contracted)
        of_planes = of_values if by_rows else gather_codes(a, b, usages, narrow, of_values)
        return block_gemm.product(a, b, usages, narrow, of_planes).astype(dtype), None
    a_plane, b_plane = a.plane(a_stored), b.plane(b_stored)
    product = lax.dot_general(
        a_plane.data,
        b_plane.data,
        ((_code_axes(a_plane.data, a_contracted), _code_axes(b_plane.data, b_contracted)), ((), ())),
        precision=lax.Precision.HIGHEST if precise else lax.Precision.DEFAULT,
        preferred_element_type=narrow,
        out_sharding=out_sharding,
    )
    return product, scale_of(a.format, b.format, a_plane.scale_inv * b_plane.scale_inv, narrow)


def scale_of(a: Format, b: Format, scale: jax.Array, dtype: Any) -> jax.Array:
    """The scale of a product of codes in `dtype`, and the dtype of the scaling: powers of two are exact in any."""
    return scale.astype(dtype if a.power_scales and b.power_scales else jnp.float32)


def apply_scale(product: jax.Array, scale: jax.Array | None, dtype: Any) -> jax.Array:
    """The product that `gemm` gave, or a part of it, multiplied by the scale."""
    if scale is not None:
        product = product.astype(scale.dtype) * scale
    return product.astype(dtype)


def row_product(
    a: QuantizedArray,
    w: QuantizedArray,
    contracted: Usage,
    lead: Shape,
    columns: int,
    *,
    precise: bool,
    out_sharding: Spec,
    by_rows: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """`gemm` of the rows `lead` of `a` and of w, without rows that a recipe has added, which no mesh cuts.

    Of a w in one plane that serves both usages, whose last axis an Auto mesh cuts into so many `columns`, a GEMM of
    codes reads the transpose.
    """
    read = stored_for(w.format, a.format, contracted)
    if read not in w.planes and w.format.transposes:
        at = partitionable_ops.ShardedOps(columns)
        w = w.with_planes({read: quantize_steps.transpose_plane(at, w.plane(Usage.ROWWISE), w.format)})
    padded = a.shape[:-1] != lead
    if padded and out_sharding is not None:
        last = (*spec_of(out_sharding, None), *[None] * len(lead))[len(lead)]
        cut = PartitionSpec(None, last)
        out_sharding = NamedSharding(out_sharding.mesh, cut) if isinstance(out_sharding, NamedSharding) else cut
    options: dict[str, Any] = {"precise": precise, "out_sharding": out_sharding, "by_rows": by_rows}
    product, scale = gemm(a, Usage.ROWWISE, w, contracted, a.dtype, **options)
    return unfold(product[: math.prod(lead)], (*lead, product.shape[-1])) if padded else product, scale


def _values(q: QuantizedArray, stored: Usage, contracted: Usage) -> tuple[jax.Array, tuple[int, ...]]:
    values = plane_values(q.plane(stored), q.format, stored, "bfloat16", len(q.axes))
    if is_transposed(q.format, stored):
        return values, tuple(range(1, values.ndim))
    last = values.ndim - 1
    return values, (last,) if contracted is Usage.ROWWISE else tuple(range(last))


def _code_axes(data: jax.Array, contracted: Usage) -> tuple[int, ...]:
    """Those of codes that are contracted: of `[*lead, K]` the last, of the transposed plane `[K, *lead]` all others."""
    return (data.ndim - 1,) if contracted is Usage.ROWWISE else tuple(range(1, data.ndim))


def _as_matrix(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, tuple[int]]:
    return fold_axes(x, axes[0], axes[-1] + 1), (axes[0],)
