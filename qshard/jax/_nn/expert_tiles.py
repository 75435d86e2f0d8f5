"""Rows that are sorted by expert, in tiles of which none has rows of two experts: their codes and their products.

A tile has as many rows as the largest block has, so that blocks end where an expert's rows end; rows of zeros fill its
last one. Then codes are those that the rows of an expert have alone. There are as many tiles as any `group_sizes` could
need, since shapes are static.
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
from qshard.jax._gemm.gemm import apply_scale, scale_of
from qshard.jax._ops.collectives import max_of_groups, max_over
from qshard.jax._ops.mesh import vary_alike
from qshard.jax._ops.uint64 import words_times, xor_words
from qshard.jax._quantized.array import QuantizedArray, plane_values
from qshard.jax._sharding import partitionable_ops
from qshard.layout import block_alignment, is_transposed, multiplies_codes, source
from qshard.recipes import Recipe


class Tiles(NamedTuple):
    """Where rows are.

    Attributes:
      unit: rows of a tile.
      experts: of each tile; E of those that are left over.
      first: the first row of each tile, among those of its expert.
      source: for each row of the tiles, the row of x; M for rows of zeros.
      target: for each row of x, the row of the tiles; one that is not there for rows of no expert.
      sizes: how many rows of tiles each expert has.
      fits: whether there are as many rows as groups say.
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
    # What no expert has is found to be of expert E: of it nothing is read or written.
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
    """The tiles of the rows of x, under one set of scales an expert.

    Args:
      axes: in `shard_map`, the mesh axes over which the rows of an expert lie.
      seeds: of each expert, `[E, 2]`.
      scales: of delayed scaling, `[E]`. The amaxes of experts then come with the tiles.
    """
    columns, experts = x.shape[1], tiles.sizes.shape[0]
    own = jnp.minimum(tiles.experts, experts - 1)
    draws, seeds = None, operand.seed_of(seeds, xor_words)
    if seeds is not None:
        draws = seeds[own], jnp.stack(words_times(tiles.first.astype(jnp.uint32), columns), axis=-1)

    def of_experts(amax: jax.Array, expert: jax.Array) -> jax.Array:
        """The amax of each expert, of those of all tiles."""
        return max_over(axes)(max_of_groups(amax, expert, experts))

    @jax.custom_batching.custom_vmap
    def merged(amax: jax.Array, expert: jax.Array) -> jax.Array:
        """For each tile, the amax of its expert: of all tiles at once, in the rule below."""
        return amax

    @merged.def_vmap
    def _(_: int, __: list[bool], amax: jax.Array, expert: jax.Array) -> tuple[jax.Array, bool]:
        return of_experts(amax, expert)[jnp.minimum(expert, experts - 1)], True

    def cast(tile: jax.Array, expert: jax.Array, scale: Any, draws: Any) -> tuple[QuantizedArray, jax.Array | None]:
        def reduce_max(amax: jax.Array) -> jax.Array:
            return amax if amax.ndim else merged(amax, expert)  # One for each row stays.

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
    """Tiles or experts as matrices of bfloat16: of codes as numbers, which is exact, or of values."""
    stored = source(q.format, usage)
    if codes:
        numbers: jax.Array = q.plane(stored).data.astype(jnp.bfloat16)
        return numbers
    values: jax.Array = jax.vmap(lambda part: plane_values(part, q.format, stored, "bfloat16", 2))(q.plane(stored))
    return jnp.swapaxes(values, -1, -2) if is_transposed(q.format, stored) else values


def _ragged_product(a: jax.Array, b: jax.Array, tiles: Tiles, contracted: tuple[int, int], dtype: Any) -> jax.Array:
    """Of the rows of each expert in `a`, with its matrix in `b`; or with its rows there, contracting these."""
    groups = [0] if b.ndim == 3 else []
    dims = lax.RaggedDotDimensionNumbers((((contracted[0],), (contracted[1],)), ((), ())), [0], groups)
    narrow = jnp.bfloat16 if jnp.dtype(dtype) == jnp.bfloat16 else jnp.float32
    plain = functools.partial(lax.ragged_dot_general, ragged_dot_dimension_numbers=dims, preferred_element_type=narrow)
    multiply = jax.custom_batching.custom_vmap(plain)

    @multiply.def_vmap
    def _(size: int, batched: list[bool], *operands: jax.Array) -> tuple[jax.Array, bool]:
        """JAX batches a ragged product along the first axis of every operand, and in no other way."""
        each = zip(operands, batched, strict=True)
        return jax.vmap(plain)(*(x if flag else jnp.broadcast_to(x, (size, *x.shape)) for x, flag in each)), True

    product: jax.Array = multiply(a, b, tiles.sizes)
    return product


def row_product(q: QuantizedArray, w: QuantizedArray, contracted: Usage, tiles: Tiles, dtype: Any) -> jax.Array:
    """Each row with the weight of its expert, in the order of x."""
    codes = multiplies_codes(q.format, w.format)
    rows, weights = _operand(q, Usage.ROWWISE, codes), _operand(w, contracted, codes)
    axis = 2 if contracted is Usage.ROWWISE else 1
    product = _ragged_product(rows.reshape(-1, rows.shape[-1]), weights, tiles, (1, axis), dtype)
    if codes:
        own = jnp.minimum(tiles.experts, w.shape[0] - 1)
        scale = q.plane(Usage.ROWWISE).scale_inv * w.plane(source(w.format, contracted)).scale_inv[own]
        scale = scale_of(q.format, w.format, jnp.repeat(scale, tiles.unit)[:, None], product.dtype)
        product = apply_scale(product, scale, dtype)
    back = product.astype(dtype).at[tiles.target].get(mode="fill", fill_value=0)
    return jnp.where(tiles.fits, back, jnp.nan)


def expert_products(a: QuantizedArray, b: QuantizedArray, tiles: Tiles, dtype: Any) -> jax.Array:
    """The gradients of all weights, of dy and x in the order of their layout: the rows of each expert contracted."""
    codes, columns = multiplies_codes(a.format, b.format), Usage.COLUMNWISE
    left, right = (_operand(q, columns, codes) for q in (a, b))
    left, right = (rows.reshape(-1, rows.shape[-1]) for rows in (left, right))
    product = _ragged_product(left, right, tiles, (0, 0), dtype)
    if codes:
        of_tiles = a.plane(Usage.ROWWISE).scale_inv * b.plane(Usage.ROWWISE).scale_inv
        scale, of_tiles, experts = vary_alike(jnp.zeros(tiles.sizes.shape, jnp.float32), of_tiles, tiles.experts)
        scale = scale.at[experts].set(of_tiles, mode="drop")
        product = apply_scale(product, scale_of(a.format, b.format, scale[:, None, None], product.dtype), dtype)
    return product.astype(dtype)
