"""Which matrices the blocks of a tensor `[*lead, K]` are those of, and where their random numbers begin in the whole.

The matrix of a tensor is `[M, K]`, with all leading axes as one. Axes that devices cut, as batch and sequence are,
cannot become one where they are: XLA would gather all but the first. So they stay apart, and ops take `[*outer, M, K]`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qshard import layout
from qshard._core import quantize_steps
from qshard.formats import Format, Usage
from qshard.jax._ops import bind as ops
from qshard.jax._ops.uint64 import words_of, words_plus, words_times
from qshard.jax._sharding.shard_spec import Cut, matrix_of, vary_alike


def matrices_of(
    x: jax.Array, places: dict[Usage, layout.PlaneLayout], cut: Cut, op: str, name: str, draws: bool = False
) -> tuple[jax.Array, Cut]:
    """What blocks of `x` are those of, and how it is cut: a matrix `[M, K]`; or, where a mesh may cut axes that would
    become one, `[*outer, M, K]`. That has the same blocks if M is a whole number of them; if not, it has their pieces.

    Raises:
      ValueError: shards of `shard_map` cut blocks so that their rows do not follow one another.
    """
    scattered = bool(cut.inner_axes)
    if x.ndim < 3 or not (scattered or ops.may_be_cut(x)):
        return matrix_of(x), cut.matrix
    sides = {where.block[1 if where.transposed else 0] for where in places.values() if where.block}
    if all(x.shape[-2] % side == 0 for side in sides) or (scattered and not cut.local):
        return x, cut
    if scattered and (draws or not cut.own_blocks):
        raise scattered_rows(x, next(iter(places.values())).format, max(sides), cut, op, name)
    return matrix_of(x), cut.matrix


def scattered_rows(x: jax.Array, fmt: Format, unit: int, cut: Cut, op: str, name: str) -> ValueError:
    """For a shard of `shard_map` whose blocks, or random numbers, would need more rows than it has."""
    return ValueError(
        f"{op}: {name} {x.shape}, of a whole cut by {cut.spec}, has rows that do not follow one another there, and an "
        f"axis of {x.shape[-2]} that is no whole number of the {unit} rows of a block of {fmt}; cut it at blocks"
    )


def draws_of(
    seed: jax.Array | None, fmt: Format, cut: Cut, shape: layout.Shape, turned: bool = False
) -> quantize_steps.Draws | None:
    """The random numbers of a tensor, in `shard_map` of a shard of this shape; None if it takes none.

    `turned`: those of the matrix whose transpose it is.
    """
    if seed is None or not fmt.stochastic:
        return None
    rows, columns = layout.matrix_shape(shape)
    if turned:
        of_transpose = draws_of(seed, fmt, cut.transposed if cut.entries else cut, (columns, rows))
        return of_transpose and of_transpose.transposed(rows)
    if not cut.local:
        return quantize_steps.Draws(seed, jnp.asarray(words_of(0)), columns)
    row_step = columns * cut.shards[1]
    if cut.inner_axes:
        row = _first_rows(cut, shape)
        col = cut.start(shape[-2:])[1]
    else:
        row, col = cut.start((rows, columns))
    row, col = jnp.asarray(row, jnp.uint32), jnp.asarray(col, jnp.uint32)
    first = words_plus(words_times(row, row_step), (col, jnp.zeros_like(col)))
    return quantize_steps.Draws(seed, jnp.stack(vary_alike(*first), axis=-1), row_step)


def _first_rows(cut: Cut, shape: layout.Shape) -> Any:
    """Of each matrix of a shard `[*outer, M, K]`, which row of the whole its first one is."""
    outer = len(shape) - 2
    row: Any = jnp.uint32(0)
    for axis, (size, names) in enumerate(zip(shape[:-1], cut.entries, strict=False)):
        begin = jnp.asarray(lax.axis_index(names) * size if names else 0, jnp.uint32)
        if axis < outer:
            begin = begin + lax.iota(jnp.uint32, size).reshape(size, *(1,) * (outer - axis - 1))
        row = row * np.uint32(size * cut.count(names)) + begin
    return row
