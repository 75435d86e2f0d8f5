"""Tiles of rows that are sorted by expert: their quantization and their products.

Each tile has rows of one expert, and as many rows as the tallest block of the recipe, at least 16, and as the product
that contracts rows needs. So blocks end where the rows of an expert end. Zeros pad the last tile of an expert. Codes
are therefore the same as if each expert's rows were quantized alone. Shapes are static, so there are as many tiles as
any `group_sizes` could need.

Rows are quantized straight into the matrix of all padded rows (`quantize_rows`).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from qshard import gemm_dispatch
from qshard._core.operands import OperandSpec, quantize_rows
from qshard._core.quantize_steps import Plane
from qshard.formats import Format, Usage
from qshard.jax._gemm import grouped_gemm
from qshard.jax._gemm.gemm import apply_scale, product_scale
from qshard.jax._ops.amaxes import max_over
from qshard.jax._ops.padded_rows import experts_of_strips, values_of_strips
from qshard.jax._ops.uint64 import xor_uint64
from qshard.jax._quantized.array import QuantizedArray, plane_values
from qshard.jax._sharding import partitionable_ops
from qshard.layout import block_alignment, is_transposed, multiplies_codes, source
from qshard.recipes import Recipe


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["stops", "ends", "rows", "place", "fits"],
    meta_fields=["tile_rows"],
)
@dataclass(frozen=True)
class Tiles:
    """The assignment of the M rows of x to P padded rows: the results of op `group_rows`, for E experts.

    Attributes:
      tile_rows: rows per tile.
      stops: for each expert, the end of its padded rows, int32 `[E]`.
      ends: for each expert, the end of its rows of x, int32 `[E]`; None if x is not sorted by expert.
      rows: for each padded row, the row of x, int32 `[P]`; M for padding.
      place: for each row of x, its padded row, int32 `[M]`; the last one for rows of no expert. None if x is the padded
        rows.
      fits: whether `group_sizes` are not negative and add up to M or less.
    """

    tile_rows: int
    stops: jax.Array
    ends: jax.Array | None
    rows: jax.Array
    place: jax.Array | None
    fits: jax.Array

    @property
    def experts(self) -> jax.Array:
        """The expert of each tile; E for unused tiles."""
        return experts_of_strips(self.stops, self.tile_rows, self.rows.shape[0] // self.tile_rows)

    def of_strips(self, of_experts: jax.Array, strip: int) -> jax.Array:
        """Repeat the value of each expert for its strips of `strip` padded rows; 0 for no expert."""
        of_tiles = values_of_strips(of_experts, self.stops, self.tile_rows, (self.rows.shape[0] // self.tile_rows,))
        return jnp.repeat(of_tiles, self.tile_rows // strip)


def tiles_of(recipe: Recipe, rows: int, group_sizes: jax.Array) -> Tiles:
    """Assign the M rows of x to `M // tile_rows + E + 1` tiles, enough for any group sizes.

    `tile_rows` follows from the blocks of activations and gradients, and from the product that contracts rows.
    """
    sizes = jnp.asarray(group_sizes, jnp.int32)
    kind = grouped_gemm.takes_codes(recipe.gradient, recipe.activation, sizes, by_k=True)
    blocks = block_alignment(recipe.activation, recipe.gradient)
    tile_rows = math.lcm(gemm_dispatch.UNIT, blocks, gemm_dispatch.contracted_unit(kind))
    count = rows // tile_rows + sizes.shape[0] + 1
    made = partitionable_ops.group_rows(sizes, tiles=count, tokens=rows, tile_rows=tile_rows)
    stops, ends, source_rows, place, fits = made
    return Tiles(tile_rows, stops, ends, source_rows, place, fits[0] != 0)


def quantize_tiles(
    x: jax.Array,
    operand: OperandSpec,
    tiles: Tiles,
    *,
    axes: tuple[str, ...],
    seeds: jax.Array | None,
    scales: jax.Array | None,
    row_amaxes: jax.Array | None = None,
) -> tuple[QuantizedArray, jax.Array | None]:
    """Quantize the rows of x `[M, K]` in tiles, with one set of scales per expert.

    `axes` are the mesh axes of `shard_map` over which the rows of an expert are sharded. `seeds` are uint32 `[E, 2]`;
    None rounds to nearest. `scales` `[E]` are the scales of delayed scaling, and `row_amaxes` `[M]` the amaxes of the
    rows of x, if known. Returns the codes as one matrix of all padded rows, with one scale or global scale for each
    expert if the format has one; and under delayed scaling the amax of each expert, `[E]`.
    """
    planes, amax = quantize_rows(
        partitionable_ops,
        x,
        operand,
        tiles.rows,
        tiles.stops,
        scale=scales,
        seeds=operand.seed_of(seeds, xor_uint64),
        reduce_max=max_over(axes),
        row_amaxes=row_amaxes,
    )
    return QuantizedArray(format=operand.format, dtype=x.dtype, axes=(None, None)).with_planes(planes), amax


def _values(q: QuantizedArray, usage: Usage, codes: bool, tiles: Tiles | None = None) -> jax.Array:
    """The padded rows, or the matrices of all experts, in bfloat16: codes as numbers, which is exact, or values.

    `usage` is the plane to read. A transposed plane is transposed back. `tiles` describe the padded rows.
    """
    stored = usage if usage in q.planes else source(q.format, usage)
    plane, fmt = q.plane(stored), q.format
    if codes:
        values: jax.Array = plane.data.astype(jnp.bfloat16)
    elif tiles is not None:
        values = plane_values(_scales_of_rows(plane, fmt, stored, tiles), fmt, stored, "bfloat16", 2)
    else:
        values = jax.vmap(lambda part: plane_values(part, fmt, stored, "bfloat16", 2))(plane)
    return jnp.swapaxes(values, -1, -2) if is_transposed(fmt, stored) else values


def _scales_of_rows(plane: Plane, fmt: Format, usage: Usage, tiles: Tiles) -> Plane:
    """Repeat the scales of experts for their rows or blocks, as ops that dequantize one matrix take them."""
    if fmt.per_tensor:  # Only the rowwise plane is dequantized.
        return plane._replace(scale_inv=tiles.of_strips(plane.scale_inv, 1))
    if not fmt.tensor_scaled:
        return plane
    assert plane.global_scale_inv is not None
    grid, rows, axis = plane.scale_inv.shape, tiles.rows.shape[0], 1 if is_transposed(fmt, usage) else 0
    of_strips = tiles.of_strips(plane.global_scale_inv, rows // grid[axis])
    return plane._replace(global_scale_inv=jnp.broadcast_to(of_strips, grid) if axis else of_strips)


def _product_dtype(dtype: Any) -> Any:
    """Return the dtype of a product of codes before it is scaled to `dtype`: float16 would overflow."""
    return jnp.float32 if dtype == jnp.float16 else dtype


def row_product(
    q: QuantizedArray, w: QuantizedArray, contracted: Usage, tiles: Tiles, dtype: Any, *, fast: bool
) -> jax.Array:
    """Multiply each row of tiles by the weight of its expert: `[M, N]` in the order of the rows of `tiles`.

    `w` has experts as its first axis; `contracted` is its plane that the product contracts. `fast` as in
    `gemm_dispatch.multiply`. The result is zero in rows after the last group, and NaN everywhere if x has fewer rows
    than `group_sizes` add up to.
    """
    axis = 2 if contracted is Usage.ROWWISE else 1

    def multiply_values(q: QuantizedArray, w: QuantizedArray) -> jax.Array:
        codes = multiplies_codes(q.format, w.format)
        rows, weights = _values(q, Usage.ROWWISE, codes, tiles), _values(w, contracted, codes)
        product = grouped_gemm.multiply_rows(
            rows, weights, axis, tiles.stops, _product_dtype(dtype) if codes else dtype
        )
        if not codes:
            return product.astype(dtype)
        of_experts = q.plane(Usage.ROWWISE).scale_inv * w.plane(next(iter(w.planes))).scale_inv
        of_tiles = jnp.append(of_experts, 1.0)[tiles.experts]  # 1 for rows of no expert, which are zeros.
        scale = product_scale(q.format, w.format, jnp.repeat(of_tiles, tiles.tile_rows)[:, None], product.dtype)
        return apply_scale(product, scale, dtype)

    rows = tiles.stops, tiles.ends, tiles.place
    product = grouped_gemm.multiply_row_codes(q, w, contracted, *rows, dtype, multiply_values, fast=fast)
    return jnp.where(tiles.fits, product, jnp.nan)


def expert_products(a: QuantizedArray, b: QuantizedArray, tiles: Tiles, dtype: Any) -> jax.Array:
    """Compute the gradients of all weights, `[E, N, K]` or for layout "KN" `[E, K, N]`, over the rows of each expert.

    For layout "NK", `a` is dy and `b` is x; for "KN", `a` is x and `b` is dy.
    """

    def multiply_values(a: QuantizedArray, b: QuantizedArray) -> jax.Array:
        codes = multiplies_codes(a.format, b.format)
        left, right = (_values(q, Usage.COLUMNWISE, codes, tiles) for q in (a, b))
        product = grouped_gemm.contract_rows(left, right, tiles.stops, _product_dtype(dtype) if codes else dtype)
        if codes:
            of_experts = (q.plane(next(iter(q.planes))).scale_inv for q in (a, b))
            scale = math.prod(of_experts)[:, None, None]
            product = apply_scale(product, product_scale(a.format, b.format, scale, product.dtype), dtype)
        return product.astype(dtype)

    return grouped_gemm.contract_row_codes(a, b, tiles.stops, tiles.tile_rows, dtype, multiply_values)
