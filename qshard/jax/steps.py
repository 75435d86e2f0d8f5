"""The ops as `qshard.pipeline` calls them: on views that XLA can cut, with one value where the pipeline asks for one.

XLA runs an op on shards of the axes that all its operands share (`ops.py`). So a scale of a whole tensor is repeated
for every run (`_runs.py`) or block of it, and an amax is taken of runs, then of those. Where nothing can be cut,
nothing is repeated.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qshard.jax import ops
from qshard.jax.runs import reshape_as, split_rows

__all__ = ["STEPS", "Words", "as_bits", "as_float", "integer_max", "word_pair", "words_plus", "words_times"]

Words = tuple[jax.Array, jax.Array]
"""Unsigned numbers of 64 bits as low and high words, uint32, as JAX has no others by default."""


class _Steps:
    """Every op by name, those below in a form of their own."""

    def __getattr__(self, name: str) -> Any:
        return getattr(ops, name)

    @staticmethod
    def transposed(a: jax.Array) -> jax.Array:
        return jnp.swapaxes(a, -1, -2)

    def transposed_squares(self, data: jax.Array, scale_inv: jax.Array, *, packed: bool) -> tuple[jax.Array, jax.Array]:
        """Two calls: shards may cut the blocks, and then codes and scales have no leading axis in common."""
        data_t = self.transpose_packed(data) if packed else self.transpose(data, batch=data.ndim - 2)
        return data_t, self.transposed(scale_inv)

    @staticmethod
    def amax_tensor(x: jax.Array, *, lead: int) -> jax.Array:
        runs = split_rows(x)
        amax = ops.amax_tensor(runs.array, lead=max(lead, runs.lead))
        return integer_max(amax, lead)

    @staticmethod
    def cast_tensor(x: jax.Array, scale: jax.Array, *, element: str) -> jax.Array:
        runs = split_rows(x)
        data: jax.Array = ops.cast_tensor(runs.array, runs.spread(scale), element=element)
        return reshape_as(data, x)

    @staticmethod
    def cast_transpose(x: jax.Array, scale: jax.Array, *, element: str, batch: int) -> tuple[jax.Array, jax.Array]:
        runs = split_rows(x)
        data, data_t = ops.cast_transpose(runs.array, runs.spread(scale), batch=batch, element=element)
        return reshape_as(data, x), data_t.reshape(_swapped(x))

    @staticmethod
    def cast_amax(x: jax.Array, scale: jax.Array, *, element: str, lead: int) -> tuple[jax.Array, jax.Array]:
        runs = split_rows(x)
        data, amax = ops.cast_amax(runs.array, runs.spread(scale), element=element, lead=max(lead, runs.lead))
        return reshape_as(data, x), integer_max(amax, lead)

    @staticmethod
    def cast_transpose_amax(
        x: jax.Array, scale: jax.Array, *, element: str, batch: int, lead: int
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        runs = split_rows(x)
        data, data_t, amax = ops.cast_transpose_amax(
            runs.array, runs.spread(scale), element=element, batch=batch, lead=max(lead, runs.lead)
        )
        return reshape_as(data, x), data_t.reshape(_swapped(x)), integer_max(amax, lead)

    @staticmethod
    def transpose(data: jax.Array, *, batch: int) -> Any:
        return ops.transpose(split_rows(data).array, batch=batch).reshape(_swapped(data))

    @staticmethod
    def dequantize(data: jax.Array, scale_inv: jax.Array, *, element: str, dtype: str) -> jax.Array:
        runs = split_rows(data)
        values = ops.dequantize(runs.array, runs.spread(scale_inv), element=element, dtype=dtype)
        return reshape_as(values, data)

    @staticmethod
    def scale_nvfp4(amax: jax.Array, global_amax: jax.Array, *, scale_max: float) -> Any:
        return ops.scale_nvfp4(amax, _spread(global_amax, amax, amax.shape), scale_max=scale_max)

    @staticmethod
    def scale_four_over_six(x: jax.Array, amax: jax.Array, global_amax: jax.Array, **options: Any) -> Any:
        return ops.scale_four_over_six(x, amax, _spread(global_amax, x, amax.shape), **options)

    @staticmethod
    def dequantize_nvfp4(data: jax.Array, scale_inv: jax.Array, global_scale_inv: jax.Array, **options: Any) -> Any:
        return ops.dequantize_nvfp4(data, scale_inv, _spread(global_scale_inv, data, scale_inv.shape), **options)

    def quantize_nvfp4(self, x: jax.Array, global_amax: jax.Array, **options: Any) -> Any:
        return self._quantize_nvfp4("quantize_nvfp4", x, global_amax, **options)

    def quantize_nvfp4_t(self, x: jax.Array, global_amax: jax.Array, **options: Any) -> Any:
        return self._quantize_nvfp4("quantize_nvfp4_t", x, global_amax, **options)

    def quantize_nvfp4_both(self, x: jax.Array, global_amax: jax.Array, **options: Any) -> Any:
        return self._quantize_nvfp4("quantize_nvfp4_both", x, global_amax, **options)

    def quantize_nvfp4_square_both(self, x: jax.Array, global_amax: jax.Array, **options: Any) -> Any:
        return self._quantize_nvfp4("quantize_nvfp4_square_both", x, global_amax, **options)

    @staticmethod
    def _quantize_nvfp4(
        op: str, x: jax.Array, global_amax: jax.Array, *, block_rows: int, block_cols: int, **options: Any
    ) -> Any:
        grid = (*x.shape[:-2], x.shape[-2] // block_rows, x.shape[-1] // block_cols)
        return getattr(ops, op)(
            x, _spread(global_amax, x, grid), block_rows=block_rows, block_cols=block_cols, **options
        )

    @staticmethod
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


STEPS = _Steps()


def integer_max(amax: jax.Array, lead: int) -> jax.Array:
    """The maximum over all but the `lead` first axes, of bits as int32: exact in any order, and NaN wins."""
    return as_float(jnp.max(as_bits(amax), axis=tuple(range(lead, amax.ndim)), initial=0))


def as_bits(amax: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(amax, jnp.int32)


def as_float(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def word_pair(number: int) -> np.ndarray:
    """A number of 64 bits as two words, low first."""
    return np.array([number & 0xFFFFFFFF, number >> 32 & 0xFFFFFFFF], np.uint32)


def words_plus(a: Words, b: Words) -> Words:
    """The sum modulo 2**64."""
    low = a[0] + b[0]
    return low, a[1] + b[1] + (low < a[0]).astype(jnp.uint32)


def words_times(a: jax.Array, number: int) -> Words:
    """The product of uint32 and a number, modulo 2**64."""
    low, high = (int(word) for word in word_pair(number))
    a0, a1, b0, b1 = a & np.uint32(0xFFFF), a >> 16, np.uint32(low & 0xFFFF), np.uint32(low >> 16)
    p00, p01, p10, p11 = a0 * b0, a0 * b1, a1 * b0, a1 * b1
    middle = (p00 >> 16) + (p01 & np.uint32(0xFFFF)) + (p10 & np.uint32(0xFFFF))
    return a * np.uint32(low), p11 + (p01 >> 16) + (p10 >> 16) + (middle >> 16) + a * np.uint32(high)


def _spread(value: jax.Array, x: jax.Array, grid: tuple[int, ...]) -> jax.Array:
    """One value for each block of `x`, from one for all of them or for each element of the grid's first axes."""
    if not ops.may_be_cut(x):
        return value
    return lax.broadcast_in_dim(value, grid, tuple(range(value.ndim)))


def _swapped(x: jax.Array) -> tuple[int, ...]:
    return (*x.shape[:-2], x.shape[-1], x.shape[-2])
