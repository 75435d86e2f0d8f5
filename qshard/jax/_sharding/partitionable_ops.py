"""Every op by name, on views that XLA can partition: the `ops` of `_core.quantize_steps` and `_core.flat_shards`.

XLA partitions an op over the leading axes that all operands share, and gathers an operand that is sharded along any
other axis (`bind.py`). So `[..., K]` is viewed as runs `[..., K / run, run]`, a scale of the whole tensor is repeated
for every run or block, and an amax is first taken of each run. Attributes report this to the op (`shared` in `ops.def`,
`transposed` in `ops/block.cc`), for GPU kernels that are specialized for one scale or one seed. Where nothing can be
sharded, nothing is repeated. Multi-tensor ops run on local arrays and need no views.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType

from qshard._core.flat_shards import SliceBatch
from qshard.jax._ops import bind as ops
from qshard.jax._ops.amaxes import max_along
from qshard.jax._ops.mesh import count_shards, may_be_sharded, mesh_of, names_of, reshape, vary_alike
from qshard.jax._ops.padded_rows import gather_rows, philox_of_rows, values_of_strips  # noqa: F401
from qshard.jax._ops.scheduling import barrier
from qshard.jax._ops.uint64 import Uint64, add_uint64, multiply_uint64
from qshard.jax._sharding import multi_tensor
from qshard.jax._sharding.shard_spec import ShardSpec
from qshard.op_table import multi_table, table


def __getattr__(name: str) -> Any:
    if name in multi_table():
        return multi_tensor.bind(name)
    operands = table()[name].inputs if name in table() else ()
    if any(operand.name in ("global_amax", "global_scale_inv") for operand in operands[1:]):
        return functools.partial(_under_global, name)
    return getattr(ops, name)


class ShardedOps:
    """The ops of this module, for arrays with a known number of shards of the last axis."""

    def __init__(self, shards: int) -> None:
        self._shards = shards

    def __getattr__(self, name: str) -> Any:
        op = globals().get(name) or __getattr__(name)
        takes_runs = op in (transposed_squares, amax_hadamard) or getattr(op, "func", None) is _by_runs
        return functools.partial(op, shards=self._shards) if takes_runs else op


def ops_for(spec: ShardSpec) -> Any:
    """Return the ops for arrays of this sharding: this module for local arrays, else `ShardedOps`."""
    return sys.modules[__name__] if spec.local else ShardedOps(spec.shards[1])


def _by_runs(op: str, x: jax.Array, *scale: jax.Array, shards: int = 1, **options: Any) -> Any:
    """Run an elementwise op with one scale for all elements, or an amax op, on runs of rows."""
    runs, lead = split_rows(x, shards), options.get("lead", 0)
    axes = 0 if runs is x else x.ndim  # The number of leading axes that index runs.
    if "lead" in options:
        options["lead"] = max(lead, axes)
    # A scale is one for all runs or, under `vmap`, one for each index of the first axes.
    spread = [_repeat(s, runs.shape[: max(axes, s.ndim)], options) for s in scale]
    made = getattr(ops, op)(runs, *spread, **options)
    arrays = made if isinstance(made, tuple) else (made,)
    results = []
    for out, y in zip(table()[op].outputs, arrays, strict=True):
        if out.name == "amax":
            results.append(max_along(y, lead))
        elif out.name == "data_t":
            results.append(_transpose_as(y, x, options.get("batch", 0)))
        else:
            results.append(reshape_as(y, x))
    return tuple(results) if len(results) > 1 else results[0]


amax_tensor = functools.partial(_by_runs, "amax_tensor")
cast_tensor = functools.partial(_by_runs, "cast_tensor")
cast_transpose = functools.partial(_by_runs, "cast_transpose")
dequantize = functools.partial(_by_runs, "dequantize")
transpose = functools.partial(_by_runs, "transpose")


def amax_hadamard(x: jax.Array, *, block_rows: int, block_cols: int, shards: int = 1) -> tuple[jax.Array, ...]:
    """Return the amaxes of `x` `[*outer, M, K]` and of its columns rotated, from blocks that XLA may shard."""
    run = _run(x, shards)
    if run is None:
        x = x.reshape(-1, block_cols)
        block = {"block_rows": x.shape[0], "block_cols": block_cols}
    else:
        block = {"block_rows": math.gcd(block_rows, 16), "block_cols": run}
    return tuple(max_along(amax) for amax in ops.amax_hadamard(x, **block))


def _under_global(op: str, *operands: jax.Array, **options: Any) -> Any:
    """Run a block op with the operands of the whole tensor repeated for each block.

    The Philox offset of the tensor becomes one offset for each block.
    """
    named = dict(zip((operand.name for operand in table()[op].inputs), operands, strict=True))
    arrays = [a for name, a in named.items() if not name.startswith("global_") and name not in ("seed", "offset")]
    if may_be_sharded(arrays[0]):
        grid = arrays[-1].shape  # The shape of scales or amaxes.
        if len(arrays) == 1 and "block_rows" in options:
            *lead, rows, cols = grid
            grid = (*lead, rows // options["block_rows"], cols // options["block_cols"])
        if "offset" in named:
            named |= _philox_of_blocks(grid, arrays[0], named["seed"], named["offset"], **options)
        named |= {name: _repeat(a, grid, options) for name, a in list(named.items()) if name.startswith("global_")}
    elif "offset" in named:
        named["seed"] = jnp.broadcast_to(named["seed"], named["offset"].shape)
    return getattr(ops, op)(*named.values(), **options)


def _repeat(value: jax.Array, shape: tuple[int, ...], options: dict[str, Any]) -> jax.Array:
    """Broadcast `value` over axes that XLA may shard. Set the option `shared` if one value serves all of `shape`."""
    if shape and value.ndim == 0:
        options["shared"] = True
    return lax.broadcast_in_dim(value, shape, tuple(range(value.ndim)))


_RUN, _LEAD_RUN = 128, 32
"""The longest runs of the elements of a row, and of rows, where the sharding is unknown."""


def split_rows(x: jax.Array, shards: int = 1, longest: int = _RUN) -> jax.Array:
    """View `x` `[..., K]` as runs `[..., K / run, run]` that no shard boundary splits, or return `x` unchanged.

    Where XLA decides on shardings, a run has at most 128 elements, or `longest` if that is more.
    """
    run = _run(x, shards, longest=max(_RUN, longest))
    if run is None:
        return x
    return x.reshape(*x.shape[:-1], x.shape[-1] // run, run) if run else x[..., None]


def split_lead(x: jax.Array) -> tuple[jax.Array, int]:
    """View `x` `[*rows, K]` as matrices `[*lead, M, K]` that shard boundaries split along K only.

    Also return the number of `lead` axes. On Auto meshes M is `gcd(rows, 32)` of the last row axis, or all of that
    axis. Axes of size 1 are left out.
    """
    if not may_be_sharded(x):
        return reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]), (None, None)), 0
    entries = jax.typeof(x).sharding.spec
    kept = [i for i, size in enumerate(x.shape[:-1]) if size != 1] or [0][: x.ndim - 1]
    *outer, inner = [(x.shape[i], entries[i]) for i in kept] or [(1, None)]
    x = reshape(x, [*(n for n, _ in outer), inner[0], x.shape[-1]], [*(e for _, e in outer), inner[1], entries[-1]])
    run = _run(x, 1, axis=-2, longest=_LEAD_RUN) or inner[0]
    count = inner[0] // run if run else 1
    sizes = [*x.shape[:-2], count, run, x.shape[-1]]
    return reshape(x, sizes, [*(e for _, e in outer), inner[1], None, entries[-1]]), len(outer) + 1


def _run(x: jax.Array, shards: int, axis: int = -1, longest: int = _RUN) -> int | None:
    """Return the length of the runs of a row, or along another axis; None if nothing can be sharded.

    In `shard_map`, and on one device, arrays are local: one run is everything. On Explicit meshes the type says how K
    is sharded: a run is a shard's part of a row. Elsewhere XLA decides after tracing. A run then has `gcd(K, longest)`
    elements, so shards of K may have any multiple of that; if the number of `shards` is known, a shard's part of the
    row takes the place of K. Each run costs 4 bytes for its scale. On an H200 that is 14 of the 112 us of quantizing
    8192 x 8192 bfloat16. If runs would be shorter than `longest / 4`, a run is the row, or a shard's part of it,
    because such a K is rarely sharded. A run that is split after all costs a gather and gives the same bits.
    """
    mesh, spec = mesh_of(x), jax.typeof(x).sharding.spec
    kinds = set(mesh.axis_types)
    if x.ndim == 0 or not may_be_sharded(x):
        return None
    row = x.shape[axis] // count_shards(mesh.shape, names_of(spec[axis]))
    row = row // shards if (not kinds or AxisType.Auto in kinds) and row % shards == 0 else row
    run = math.gcd(row, longest)
    return row if run < longest // 4 or (kinds and AxisType.Auto not in kinds) else run


def _transpose_as(y: jax.Array, x: jax.Array, batch: int) -> jax.Array:
    """Reshape `y` to the transpose `[*batch, K, *rows]` of `x` `[*batch, *rows, K]`, sharded like it."""
    order = (*range(batch), x.ndim - 1, *range(batch, x.ndim - 1))
    entries = jax.typeof(x).sharding.spec
    return reshape(y, [x.shape[i] for i in order], [entries[i] for i in order])


def reshape_as(y: jax.Array, x: jax.Array) -> jax.Array:
    """Reshape `y` to the shape of `x`. On Explicit meshes it gets the sharding of `x`, which JAX infers only rarely."""
    return reshape(y, x.shape, jax.typeof(x).sharding.spec)


def swap_last_axes(a: jax.Array) -> jax.Array:
    """Move the last axis to the front: `[*outer, M, K]` to `[K, *outer, M]`."""
    return jnp.moveaxis(a, -1, 0)


def transposed_squares(
    data: jax.Array, scale_inv: jax.Array, *, packed: bool, shards: int = 1
) -> tuple[jax.Array, jax.Array]:
    """Transpose the codes and the scales of 2-D blocks, in a call each.

    Shards may split the blocks, and then codes and scales share no leading axis, which one call would need.
    """
    turn = ops.transpose_packed if packed else functools.partial(transpose, shards=shards)
    data_t = turn(data, outer=data.ndim - 2)
    return data_t, swap_last_axes(scale_inv)


def cast_block_stochastic(x: jax.Array, scale: jax.Array, seed: jax.Array, offset: jax.Array, **options: Any) -> Any:
    """Cast blocks with stochastic rounding, with one Philox offset for each block where XLA may shard them."""
    if may_be_sharded(x) or offset.ndim > 1:
        x, seed, offset = _philox_of_blocks(scale.shape, x, seed, offset, **options).values()
    transposed = options["col_step"] > options["row_step"]
    return ops.cast_block_stochastic(x, scale, seed, offset, transposed=transposed, **options)


def _philox_of_blocks(
    grid: tuple[int, ...],
    x: jax.Array,
    seed: jax.Array,
    offset: jax.Array,
    *,
    row_step: int,
    col_step: int,
    block_rows: int,
    block_cols: int,
    **_: Any,
) -> dict[str, jax.Array]:
    """Return `x`, and the Philox key and offset of each block as uint32 pairs.

    A barrier ties them to `x`, so that XLA computes them when they are needed and does not keep them before.
    """
    seed, x = barrier(seed, x)
    offset = _offset_of_blocks(grid, offset, block_rows * row_step, block_cols * col_step)
    return {"x": x, "seed": jnp.broadcast_to(seed, offset.shape), "offset": offset}


def _offset_of_blocks(grid: tuple[int, ...], offset: jax.Array, row_step: int, col_step: int) -> jax.Array:
    """Return the Philox offset of each block of `[*outer, M, K]`, or of the transpose `[K, *outer, M]`.

    `offset` is the offset of `x`, if its outer axes are contiguous; or `[*outer, 2]`, the offset of each matrix.
    """
    outer = offset.ndim - 1
    transposed = col_step > row_step  # In a transpose, the elements of a column are contiguous in the tensor.
    rows = grid[:1] if transposed else grid[-2:-1] if outer else grid[:-1]
    cols = grid[-1:] if outer or not transposed else grid[1:]

    def along(size: tuple[int, ...], step: int, before: int) -> Uint64:
        index = lax.iota(jnp.uint32, math.prod(size))
        return multiply_uint64(index.reshape(*(1,) * before, *size, *(1,) * (len(grid) - before - len(size))), step)

    row = along(rows, row_step, 0 if transposed or not outer else outer)
    col = along(cols, col_step, len(grid) - len(cols))
    begin = offset.reshape(*(1,) * transposed, *offset.shape[:-1], *(1,) * (len(grid) - outer - transposed), 2)
    made = add_uint64(add_uint64(row, col), (begin[..., 0], begin[..., 1]))
    return jnp.stack([jnp.broadcast_to(word, grid) for word in made], axis=-1)


def zeros(count: int) -> jax.Array:
    """Return the zeros from which multi-tensor ops accumulate amaxes."""
    return jnp.zeros(count, jnp.float32)


def concatenate(arrays: Sequence[jax.Array]) -> jax.Array:
    """Concatenate arrays that vary over different manual axes."""
    return jnp.concatenate(vary_alike(*arrays))


def of_batch(pairs: jax.Array, batch: SliceBatch) -> jax.Array:
    """Return the rows of `pairs` that belong to the weights of a batch."""
    return pairs if batch.indices == tuple(range(pairs.shape[0])) else pairs[np.array(batch.indices)]


def repeat_values(values: jax.Array, batch: SliceBatch) -> jax.Array:
    """Repeat the amax of each tensor, or of each row, for its runs of blocks in a batch."""
    return jnp.repeat(values, np.array(batch.runs), total_repeat_length=sum(batch.runs))
