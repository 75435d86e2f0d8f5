"""Tiles of rows that are sorted by expert: their quantization and their products.

Each tile has rows of one expert, and as many rows as the tallest block of the recipe, so blocks end where the rows of
an expert end. Zeros pad the last tile of an expert. Codes are therefore the same as if each expert's rows were
quantized alone. Shapes are static, so there are as many tiles as any `group_sizes` could need.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from qshard._core.operands import OperandSpec, quantize_operand
from qshard._core.quantize_steps import Draws
from qshard.formats import Usage
from qshard.jax._gemm.gemm import apply_scale, product_scale
from qshard.jax._ops.collectives import max_of_groups, max_over
from qshard.jax._ops.mesh import vary_alike
from qshard.jax._ops.uint64 import words_times, xor_words
from qshard.jax._quantized.array import QuantizedArray, plane_values
from qshard.jax._sharding import partitionable_ops
from qshard.layout import block_alignment, is_transposed, multiplies_codes, source
from qshard.recipes import Recipe


class Tiles(NamedTuple):
    """The assignment of rows to tiles. M is the number of rows of x, E the number of experts.

    Attributes:
      unit: rows per tile.
      experts: the expert of each tile; E for unused tiles.
      first: the index of each tile's first row among the rows of its expert.
      source: for each row of the tiles, the row of x; M for padding rows.
      target: for each row of x, the row of the tiles; out of range for rows after the last group.
      sizes: for each expert, its number of rows in tiles, with padding.
      fits: whether x has as many rows as `group_sizes` add up to.
    """

    unit: int
    experts: jax.Array
    first: jax.Array
    source: jax.Array
    target: jax.Array
    sizes: jax.Array
    fits: jax.Array


def tiles_of(recipe: Recipe, rows: int, group_sizes: jax.Array) -> Tiles:
    unit = block_alignment(recipe.activation, recipe.gradient)
    sizes, experts = jnp.asarray(group_sizes, jnp.int32), group_sizes.shape[0]
    padded = -(-sizes // unit) * unit
    ends, stops = jnp.cumsum(sizes), jnp.cumsum(padded)
    count = max(1, (rows + experts * (unit - 1)) // unit)
    find = functools.partial(jnp.searchsorted, side="right", method="compare_all")
    # Rows and tiles without an expert get expert E. Nothing is read or written for them.
    shift = jnp.append(stops - padded - (ends - sizes), 0)
    row = jnp.arange(rows, dtype=jnp.int32)
    of_row = find(ends, row)
    target = jnp.where(of_row < experts, row + shift[of_row], count * unit)
    of_tile = find(stops, jnp.arange(0, count * unit, unit, dtype=jnp.int32)).astype(jnp.int32)
    place = jnp.arange(count * unit, dtype=jnp.int32)
    of_place = jnp.repeat(of_tile, unit)
    there = place - shift[of_place]
    there = jnp.where((of_place < experts) & (there < jnp.append(ends, 0)[of_place]), there, rows)
    first = place[::unit] - jnp.append(stops - padded, 0)[of_tile]
    return Tiles(unit, of_tile, first, there, target, padded, ends[-1] <= rows)


def quantize_tiles(
    x: jax.Array,
    operand: OperandSpec,
    tiles: Tiles,
    *,
    axes: tuple[str, ...],
    seeds: jax.Array | None,
    scales: jax.Array | None,
) -> tuple[QuantizedArray, jax.Array | None]:
    """Quantize the rows of x `[M, K]` in tiles, with one set of scales per expert.

    `axes` are the mesh axes of `shard_map` over which the rows of an expert are sharded. `seeds` are uint32 `[E, 2]`;
    None rounds to nearest. `scales` `[E]` are the scales of delayed scaling. Returns the codes, with tiles as the first
    axis, and under delayed scaling the amax of each expert, `[E]`.
    """
    columns, experts = x.shape[1], tiles.sizes.shape[0]
    own = jnp.minimum(tiles.experts, experts - 1)
    draws, seeds = None, operand.seed_of(seeds, xor_words)
    if seeds is not None:
        draws = seeds[own], jnp.stack(words_times(tiles.first.astype(jnp.uint32), columns), axis=-1)

    def of_experts(amax: jax.Array, expert: jax.Array) -> jax.Array:
        """Reduce the amaxes of tiles to the amax of each expert."""
        return max_over(axes)(max_of_groups(amax, expert, experts))

    @jax.custom_batching.custom_vmap
    def merged(amax: jax.Array, expert: jax.Array) -> jax.Array:
        """For each tile, the amax of its expert. The `vmap` rule below sees the amaxes of all tiles."""
        return amax

    @merged.def_vmap
    def _(_: int, __: list[bool], amax: jax.Array, expert: jax.Array) -> tuple[jax.Array, bool]:
        return of_experts(amax, expert)[jnp.minimum(expert, experts - 1)], True

    def cast(tile: jax.Array, expert: jax.Array, scale: Any, draws: Any) -> tuple[QuantizedArray, jax.Array | None]:
        def reduce_max(amax: jax.Array) -> jax.Array:
            return amax if amax.ndim else merged(amax, expert)  # Amaxes per row are not merged.

        drawn = None if draws is None else Draws(draws[0], draws[1], columns)
        given: dict[str, Any] = {"scale": scale, "draws": drawn, "reduce_max": reduce_max}
        planes, amax = quantize_operand(partitionable_ops, tile, operand, **given)
        q = QuantizedArray(format=operand.format, dtype=x.dtype, axes=(None, None)).with_planes(planes)
        return q, amax

    rows = jnp.asarray(x).at[tiles.source].get(mode="fill", fill_value=0).reshape(-1, tiles.unit, columns)
    scale = None if scales is None else scales[own]
    q, amax = jax.vmap(cast)(rows, tiles.experts, scale, draws)
    return q, None if amax is None else of_experts(amax, tiles.experts)


def _operand(q: QuantizedArray, usage: Usage, codes: bool) -> jax.Array:
    """Tiles or experts as bfloat16 matrices: the codes as numbers, which is exact, or the dequantized values."""
    stored = source(q.format, usage)
    if codes:
        numbers: jax.Array = q.plane(stored).data.astype(jnp.bfloat16)
        return numbers
    values: jax.Array = jax.vmap(lambda part: plane_values(part, q.format, stored, "bfloat16", 2))(q.plane(stored))
    return jnp.swapaxes(values, -1, -2) if is_transposed(q.format, stored) else values


def _ragged_product(a: jax.Array, b: jax.Array, tiles: Tiles, contracted: tuple[int, int], dtype: Any) -> jax.Array:
    """Multiply the rows of each expert in `a` by its matrix or its rows in `b`, contracting the given axes."""
    groups = [0] if b.ndim == 3 else []
    dims = lax.RaggedDotDimensionNumbers((((contracted[0],), (contracted[1],)), ((), ())), [0], groups)
    narrow = jnp.bfloat16 if jnp.dtype(dtype) == jnp.bfloat16 else jnp.float32
    plain = functools.partial(lax.ragged_dot_general, ragged_dot_dimension_numbers=dims, preferred_element_type=narrow)
    multiply = jax.custom_batching.custom_vmap(plain)

    @multiply.def_vmap
    def _(size: int, batched: list[bool], *operands: jax.Array) -> tuple[jax.Array, bool]:
        """Broadcast all operands: JAX can batch a ragged product only along the first axis of every operand."""
        each = zip(operands, batched, strict=True)
        return jax.vmap(plain)(*(x if flag else jnp.broadcast_to(x, (size, *x.shape)) for x, flag in each)), True

    product: jax.Array = multiply(a, b, tiles.sizes)
    return product


def row_product(q: QuantizedArray, w: QuantizedArray, contracted: Usage, tiles: Tiles, dtype: Any) -> jax.Array:
    """Multiply each row of tiles by the weight of its expert: `[M, N]` in the order of x.

    `w` has experts as its first axis; `contracted` is its plane that the product contracts. The result is zero in rows
    after the last group, and NaN everywhere if x has fewer rows than `group_sizes` add up to.
    """
    codes = multiplies_codes(q.format, w.format)
    rows, weights = _operand(q, Usage.ROWWISE, codes), _operand(w, contracted, codes)
    axis = 2 if contracted is Usage.ROWWISE else 1
    product = _ragged_product(rows.reshape(-1, rows.shape[-1]), weights, tiles, (1, axis), dtype)
    if codes:
        own = jnp.minimum(tiles.experts, w.shape[0] - 1)
        scale = q.plane(Usage.ROWWISE).scale_inv * w.plane(source(w.format, contracted)).scale_inv[own]
        scale = product_scale(q.format, w.format, jnp.repeat(scale, tiles.unit)[:, None], product.dtype)
        product = apply_scale(product, scale, dtype)
    back = product.astype(dtype).at[tiles.target].get(mode="fill", fill_value=0)
    return jnp.where(tiles.fits, back, jnp.nan)


def expert_products(a: QuantizedArray, b: QuantizedArray, tiles: Tiles, dtype: Any) -> jax.Array:
    """Compute the gradients of all weights, `[E, N, K]` or for layout "KN" `[E, K, N]`, over the rows of each expert.

    For layout "NK", `a` is dy and `b` is x; for "KN", `a` is x and `b` is dy.
    """
    codes, columns = multiplies_codes(a.format, b.format), Usage.COLUMNWISE
    left, right = (_operand(q, columns, codes) for q in (a, b))
    left, right = (rows.reshape(-1, rows.shape[-1]) for rows in (left, right))
    product = _ragged_product(left, right, tiles, (0, 0), dtype)
    if codes:
        of_tiles = a.plane(Usage.ROWWISE).scale_inv * b.plane(Usage.ROWWISE).scale_inv
        scale, of_tiles, experts = vary_alike(jnp.zeros(tiles.sizes.shape, jnp.float32), of_tiles, tiles.experts)
        scale = scale.at[experts].set(of_tiles, mode="drop")
        product = apply_scale(product, product_scale(a.format, b.format, scale[:, None, None], product.dtype), dtype)
    return product.astype(dtype)
