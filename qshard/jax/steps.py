"""The ops as `qshard.pipeline` and `qshard.master` call them: this module is their argument `ops`.

Every op of the tables by name. Those below have a form of their own: on views that XLA can cut, with one value where
the pipeline asks for one. XLA runs an op on shards of the axes that all its operands share (`ops.py`). So a scale of a
whole tensor is repeated for every run (`runs.py`) or block of it, and an amax is taken of runs, then of those. Where
nothing can be cut, nothing is repeated. Ops on lists of slices run on what a device has, and need none of this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qshard.jax import list_ops, ops
from qshard.jax.amax import integer_max
from qshard.jax.cuts import vary_alike
from qshard.jax.runs import reshape_as, split_rows
from qshard.jax.words import words_plus, words_times
from qshard.master import Bucket
from qshard.ops import multi_table


def __getattr__(name: str) -> Any:
    return list_ops.bind(name) if name in multi_table() else getattr(ops, name)


def transposed(a: jax.Array) -> jax.Array:
    return jnp.swapaxes(a, -1, -2)


def transposed_squares(data: jax.Array, scale_inv: jax.Array, *, packed: bool) -> tuple[jax.Array, jax.Array]:
    """Two calls: shards may cut the blocks, and then codes and scales have no leading axis in common."""
    data_t = ops.transpose_packed(data) if packed else transpose(data, batch=data.ndim - 2)
    return data_t, transposed(scale_inv)


def amax_tensor(x: jax.Array, *, lead: int) -> jax.Array:
    runs = split_rows(x)
    amax = ops.amax_tensor(runs.array, lead=max(lead, runs.lead))
    return integer_max(amax, lead)


def cast_tensor(x: jax.Array, scale: jax.Array, *, element: str) -> jax.Array:
    runs = split_rows(x)
    data: jax.Array = ops.cast_tensor(runs.array, runs.spread(scale), element=element)
    return reshape_as(data, x)


def cast_transpose(x: jax.Array, scale: jax.Array, *, element: str, batch: int) -> tuple[jax.Array, jax.Array]:
    runs = split_rows(x)
    data, data_t = ops.cast_transpose(runs.array, runs.spread(scale), batch=batch, element=element)
    return reshape_as(data, x), data_t.reshape(_swapped(x))


def cast_amax(x: jax.Array, scale: jax.Array, *, lead: int, **options: Any) -> tuple[jax.Array, jax.Array]:
    runs = split_rows(x)
    data, amax = ops.cast_amax(runs.array, runs.spread(scale), lead=max(lead, runs.lead), **options)
    return reshape_as(data, x), integer_max(amax, lead)


def cast_transpose_amax(
    x: jax.Array, scale: jax.Array, *, batch: int, lead: int, **options: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    runs = split_rows(x)
    data, data_t, amax = ops.cast_transpose_amax(
        runs.array, runs.spread(scale), batch=batch, lead=max(lead, runs.lead), **options
    )
    return reshape_as(data, x), data_t.reshape(_swapped(x)), integer_max(amax, lead)


def transpose(data: jax.Array, *, batch: int) -> Any:
    return ops.transpose(split_rows(data).array, batch=batch).reshape(_swapped(data))


def dequantize(data: jax.Array, scale_inv: jax.Array, *, element: str, dtype: str) -> jax.Array:
    runs = split_rows(data)
    values = ops.dequantize(runs.array, runs.spread(scale_inv), element=element, dtype=dtype)
    return reshape_as(values, data)


def scale_nvfp4(amax: jax.Array, global_amax: jax.Array, **options: Any) -> Any:
    return ops.scale_nvfp4(amax, _spread(global_amax, amax, amax.shape), **options)


def scale_four_over_six(x: jax.Array, amax: jax.Array, global_amax: jax.Array, **options: Any) -> Any:
    return ops.scale_four_over_six(x, amax, _spread(global_amax, x, amax.shape), **options)


def dequantize_nvfp4(data: jax.Array, scale_inv: jax.Array, global_scale_inv: jax.Array, **options: Any) -> Any:
    return ops.dequantize_nvfp4(data, scale_inv, _spread(global_scale_inv, data, scale_inv.shape), **options)


def quantize_nvfp4(x: jax.Array, global_amax: jax.Array, **options: Any) -> Any:
    return _quantize_nvfp4("quantize_nvfp4", x, global_amax, **options)


def quantize_nvfp4_t(x: jax.Array, global_amax: jax.Array, **options: Any) -> Any:
    return _quantize_nvfp4("quantize_nvfp4_t", x, global_amax, **options)


def quantize_nvfp4_both(x: jax.Array, global_amax: jax.Array, **options: Any) -> Any:
    return _quantize_nvfp4("quantize_nvfp4_both", x, global_amax, **options)


def quantize_nvfp4_square_both(x: jax.Array, global_amax: jax.Array, **options: Any) -> Any:
    return _quantize_nvfp4("quantize_nvfp4_square_both", x, global_amax, **options)


def _quantize_nvfp4(
    op: str, x: jax.Array, global_amax: jax.Array, *, block_rows: int, block_cols: int, **options: Any
) -> Any:
    grid = (*x.shape[:-2], x.shape[-2] // block_rows, x.shape[-1] // block_cols)
    return getattr(ops, op)(x, _spread(global_amax, x, grid), block_rows=block_rows, block_cols=block_cols, **options)


def cast_block_stochastic(
    x: jax.Array,
    scale: jax.Array,
    seed: jax.Array,
    first: jax.Array,
    *,
    row_step: int,
    col_step: int,
    block_rows: int,
    block_cols: int,
) -> Any:
    if ops.may_be_cut(x):
        # Each block is told where it begins. Axes before the last two are rows too.
        rows, cols = math.prod(scale.shape[:-1]), scale.shape[-1]
        row = words_times(lax.iota(jnp.uint32, rows)[:, None], block_rows * row_step)
        col = words_times(lax.iota(jnp.uint32, cols), block_cols * col_step)
        first = jnp.stack(words_plus(words_plus(row, col), (first[..., 0], first[..., 1])), axis=-1)
        first = first.reshape(*scale.shape, 2)
        seed = jnp.broadcast_to(seed, first.shape)
    return ops.cast_block_stochastic(
        x,
        scale,
        seed,
        first,
        row_step=row_step,
        col_step=col_step,
        block_rows=block_rows,
        block_cols=block_cols,
    )


def zeros(count: int) -> jax.Array:
    return jnp.zeros(count, jnp.float32)


def joined(arrays: Sequence[jax.Array]) -> jax.Array:
    return jnp.concatenate(vary_alike(*arrays))


def of_bucket(pairs: jax.Array, bucket: Bucket) -> jax.Array:
    return pairs if bucket.indices == tuple(range(pairs.shape[0])) else pairs[np.array(bucket.indices)]


def repeated(values: jax.Array, bucket: Bucket) -> jax.Array:
    parts, at = [], 0
    for count, each in bucket.repeats:
        parts.append(jnp.broadcast_to(values[at : at + count, None], (count, each)).reshape(-1))
        at += count
    return jnp.concatenate(parts)


def _spread(value: jax.Array, x: jax.Array, grid: tuple[int, ...]) -> jax.Array:
    """One value for each block of `x`, from one for all of them or for each element of the grid's first axes."""
    if not ops.may_be_cut(x):
        return value
    return lax.broadcast_in_dim(value, grid, tuple(range(value.ndim)))


def _swapped(x: jax.Array) -> tuple[int, ...]:
    return (*x.shape[:-2], x.shape[-1], x.shape[-2])
