"""`gemm`: the matrix product of two quantized tensors, of their codes or of their dequantized values."""

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

GemmOperand = QuantizedArray | jax.Array
"""An operand of a product: codes, or values in bfloat16."""


def stored_for(fmt: Format, other: Format, contracted: Usage) -> Usage:
    """The plane that a GEMM with `other` reads. A GEMM of values reads the rowwise plane of 2-D blocks for any axis."""
    return contracted if multiplies_codes(fmt, other) else source(fmt, contracted)


def gemm(
    a: GemmOperand,
    a_contracted: Usage,
    b: GemmOperand,
    b_contracted: Usage,
    dtype: Any,
    *,
    fast: bool,
    out_sharding: Any = None,
    by_rows: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Multiply two quantized tensors, or two of values in bfloat16, over their contracted axes with fp32 accumulation.

    Formats with one scale: a dot of codes, and a scale for `apply_scale`, which XLA fuses into the reader of the result
    if nothing stands in between. XLA runs the dot as a cuBLASLt FP8 matmul where the hardware has one, and elsewhere
    converts the codes exactly. Both operands have the contracted axis last ("TN"), Hopper's only FP8 layout.
    Dequantizing first, and relying on XLA to undo that, is the better known form, but fragile: with bfloat16 operands
    jax 0.11 on an H200 did not, and took 1.3 ms instead of 0.8 (8192 x 4096 x 14336, bf16 result).

    Block formats: qshard's own GEMM of codes where the GPU has one (`block_gemm.py`), since XLA has none for Hopper
    that takes their scales. Elsewhere a bfloat16 GEMM of dequantized values. FP8 codes with power-of-two scales are
    exact in bfloat16; others are rounded once more.

    Args:
      a: the left operand.
      a_contracted: the contracted axes of `a`: the last (`ROWWISE`), or all others. These need not be folded into one,
        so a mesh may shard each.
      b: the right operand.
      b_contracted: the contracted axes of `b`.
      dtype: dtype of the product. A bfloat16 product of codes is rounded before and after scaling, because float scales
        do not fuse into such a GEMM, and an fp32 result costs more to write and read: 0.81 ms against 0.77 alone, and
        0.98 against 0.80 before an elementwise operation. Power-of-two scales do fuse, round once, and take 0.64.
      fast: allow tensor cores to accumulate long sums with fewer bits. Hopper's take a tenth less time for FP8.
      out_sharding: the sharding of the result, on Explicit meshes where operands leave it open.
      by_rows: whether an Auto mesh shards only the rows of x, and not w. Then no operand is gathered for the product.

    Returns:
      The product, with the free axes of `a`, then of `b`; and a scale that is still to be applied, or None.
    """
    # A float16 result could overflow before it is scaled.
    narrow = jnp.bfloat16 if jnp.dtype(dtype) == jnp.bfloat16 else jnp.float32
    if not (isinstance(a, QuantizedArray) and isinstance(b, QuantizedArray)):
        assert isinstance(a, jax.Array)
        assert isinstance(b, jax.Array)
        axes = _value_axes(a.ndim, a_contracted), _value_axes(b.ndim, b_contracted)
        product = lax.dot_general(a, b, (axes, ((), ())), preferred_element_type=narrow, out_sharding=out_sharding)
        return product.astype(dtype), None
    a_stored, b_stored = stored_for(a.format, b.format, a_contracted), stored_for(b.format, a.format, b_contracted)
    if b_stored not in b.planes and not b.format.shares_codes:
        b_stored = Usage.ROWWISE  # A frozen weight with blocks along K alone: its values are contracted along N.
    if not multiplies_codes(a.format, b.format):

        def multiply_values(a_plane: Plane, b_plane: Plane) -> jax.Array:
            x, x_axes = _values(a.with_planes({a_stored: a_plane}), a_stored, a_contracted)
            y, y_axes = _values(b.with_planes({b_stored: b_plane}), b_stored, b_contracted)
            if len(x_axes) != len(y_axes):
                x, x_axes = _as_matrix(x, x_axes)
                y, y_axes = _as_matrix(y, y_axes)
            return lax.dot_general(
                x, y, ((x_axes, y_axes), ((), ())), preferred_element_type=narrow, out_sharding=out_sharding
            )

        usages = (a_stored, a_contracted), (b_stored, b_contracted)
        multiply_planes = multiply_values if by_rows else gather_codes(a, b, usages, narrow, multiply_values)
        return block_gemm.product(a, b, usages, narrow, multiply_planes).astype(dtype), None
    a_plane, b_plane = a.plane(a_stored), b.plane(b_stored)
    product = lax.dot_general(
        a_plane.data,
        b_plane.data,
        ((_code_axes(a_plane.data, a_contracted), _code_axes(b_plane.data, b_contracted)), ((), ())),
        precision=lax.Precision.DEFAULT if fast else lax.Precision.HIGHEST,
        preferred_element_type=narrow,
        out_sharding=out_sharding,
    )
    return product, product_scale(a.format, b.format, a_plane.scale_inv * b_plane.scale_inv, narrow)


def product_scale(a: Format, b: Format, scale: jax.Array, dtype: Any) -> jax.Array:
    """Cast the scale of a product to the dtype to scale in: `dtype` if both scales are powers of two, else float32."""
    return scale.astype(dtype if a.power_scales and b.power_scales else jnp.float32)


def apply_scale(product: jax.Array, scale: jax.Array | None, dtype: Any) -> jax.Array:
    """Multiply a product of `gemm`, or a part of it, by its scale, and cast it to `dtype`."""
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
    fast: bool,
    out_sharding: Spec,
    by_rows: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Multiply the rows of `a` by w with `gemm`, and drop the padding rows that a recipe added.

    `a` has the codes of x or dy, `[*lead, K]`, or `[rows, K]` with padding rows, which no mesh shards. `contracted` is
    the plane of w that is contracted; if one plane serves both usages and the GEMM reads the other, it is transposed.
    `columns` is the number of shards of the last axis of w, on an Auto mesh. Other arguments, and the scale, as in
    `gemm`.
    """
    read = stored_for(w.format, a.format, contracted)
    if read not in w.planes and w.format.shares_codes:
        at = partitionable_ops.ShardedOps(columns)
        w = w.with_planes({read: quantize_steps.transpose_plane(at, w.plane(Usage.ROWWISE), w.format)})
    padded = a.shape[:-1] != lead
    if padded and out_sharding is not None:
        last = (*spec_of(out_sharding, None), *[None] * len(lead))[len(lead)]
        spec = PartitionSpec(None, last)
        out_sharding = NamedSharding(out_sharding.mesh, spec) if isinstance(out_sharding, NamedSharding) else spec
    options: dict[str, Any] = {"fast": fast, "out_sharding": out_sharding, "by_rows": by_rows}
    product, scale = gemm(a, Usage.ROWWISE, w, contracted, a.dtype, **options)
    return unfold(product[: math.prod(lead)], (*lead, product.shape[-1])) if padded else product, scale


def _values(q: QuantizedArray, stored: Usage, contracted: Usage) -> tuple[jax.Array, tuple[int, ...]]:
    """Dequantize a plane to bfloat16. Also return its contracted axes."""
    values = plane_values(q.plane(stored), q.format, stored, "bfloat16", len(q.axes))
    if is_transposed(q.format, stored):
        return values, tuple(range(1, values.ndim))
    return values, _value_axes(values.ndim, contracted)


def _value_axes(ndim: int, contracted: Usage) -> tuple[int, ...]:
    """The contracted axes of values `[*lead, K]`."""
    return (ndim - 1,) if contracted is Usage.ROWWISE else tuple(range(ndim - 1))


def _code_axes(data: jax.Array, contracted: Usage) -> tuple[int, ...]:
    """The contracted axes of codes: the last of `[*lead, K]`; all but the first of a transposed plane `[K, *lead]`."""
    return (data.ndim - 1,) if contracted is Usage.ROWWISE else tuple(range(1, data.ndim))


def _as_matrix(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, tuple[int]]:
    """Fold the contracted axes into one."""
    return fold_axes(x, axes[0], axes[-1] + 1), (axes[0],)
