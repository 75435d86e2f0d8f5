"""`cast_master`: casts flat slices of masters to quantized weights, with one max-reduction for all of them.

The steps are in `_core.flat_shards`. They run on local arrays, inside `shard_map`. The start of a device's slice is an
operand, because one program runs on all devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qshard import layout
from qshard._core import flat_shards
from qshard._core.flat_shards import MasterPlan, piece_bytes
from qshard._core.validation import FormatLike, as_format, quote
from qshard.formats import Usage
from qshard.jax._ops.amaxes import max_over
from qshard.jax._ops.mesh import AxisName, vary_alike
from qshard.jax._ops.uint64 import as_uint64
from qshard.jax._ops.validation import Seed, as_axes, as_seed, check_array
from qshard.jax._quantized.array import QuantizedArray
from qshard.jax._sharding import partitionable_ops
from qshard.layout import Shape

Start = int | jax.Array


def cast_master(
    weights: Sequence[QuantizedArray] | None,
    masters: Sequence[jax.Array],
    starts: Sequence[Start] | jax.Array,
    axis_name: AxisName = None,
    *,
    plan: MasterPlan,
    seeds: Sequence[Seed] | None = None,
) -> list[Any]:
    """Cast slices of master weights to codes, with the scales of the whole weights.

    Gathered slices have the bits of `quantize(master)` of the whole master, or of the master first rounded to a dtype,
    if `plan` says so.

    Args:
      weights: whole weights. The codes of the slices are replaced in them. None: return the codes of each slice alone.
      masters: for each weight, the slice of this device: flat, in the dtype of the plan, possibly empty.
      starts: for each slice, the index of its first element in the weight: an int, a traced integer, or, for weights of
        2**31 elements or more, uint32 `[n, 2]` for all slices, low halves first. Elements past the end of a weight are
        padding, so slices of one length serve all devices.
      axis_name: inside `shard_map`, the mesh axes that shard the weights. None: one slice is the whole weight, or
        slices share neither a block nor a scale (`_core.flat_shards.plan_shards`).
      plan: `_core.flat_shards.plan_master` of a `FlatSlice` of each weight; static. `starts` replaces the starts in it.
      seeds: for stochastic rounding, a seed for each weight, as for `quantize`. Pass new ones each step.

    Returns:
      With `weights`, the updated weights: `QuantizedArray`s with the plane that the plan computes. With None, a `Plane`
      for each weight: `data` is uint8 `[piece_bytes(format, length)]`, the codes from the byte of the first element on.
      If a byte is shared with another device, the other half is 0. The scales belong to the whole weight.

    Raises:
      TypeError: an argument has the wrong type, or a master is not of the dtype of the plan.
      ValueError: lists differ in length, seeds are missing, a start is negative, or a weight does not match the plan.

    Inside `shard_map`, codes vary over `axis_name`, and scales do not. The communication is one int32 all-reduce, for
    any number of weights. Each step is one custom call for each format.

    >>> from qshard.formats import FP8_E4M3
    >>> from qshard._core.flat_shards import FlatSlice, plan_master
    >>> plan = plan_master([FlatSlice((2, 2), FP8_E4M3)])
    >>> (piece,) = cast_master(None, [jnp.array([2.0, 3.0, 4.0])], [1], plan=plan)
    >>> piece.data, piece.scale_inv
    (Array([118, 122, 126], dtype=uint8), Array(0.00892857, dtype=float32))

    Sources: TransformerEngine `quantize_master_weights`.
    """
    if not isinstance(plan, MasterPlan):
        raise TypeError(f"cast_master: plan ({quote(plan)}) is not a MasterPlan; pass the result of plan_master")
    n = len(plan.slices)
    if len(masters) != n or (weights is not None and len(weights) != n):
        raise ValueError(
            f"cast_master: got {len(masters)} masters for {n} weights; pass one per weight, empty where this device "
            "has no slice"
        )
    if seeds is not None and (not isinstance(seeds, Sequence | jax.Array | np.ndarray) or len(seeds) != n):
        raise ValueError(f"cast_master: seeds ({quote(seeds)}) is not a list of {n} seeds; pass one per weight")
    for i, m in enumerate(masters):
        check_array("cast_master", f"masters[{i}]", m)
    flat = [jnp.reshape(m, -1) for m in masters]
    for i, (m, planned) in enumerate(zip(flat, plan.slices, strict=True)):
        if str(m.dtype) != planned.dtype:
            raise TypeError(
                f"cast_master: masters[{i}] ({m.dtype}) is not {planned.dtype}, the dtype of the plan; cast it"
            )
        if weights is None:
            continue
        if not isinstance(weights[i], QuantizedArray):
            raise TypeError(f"cast_master: weights[{i}] ({quote(weights[i])}) is not a QuantizedArray; quantize it")
        if (weights[i].format, weights[i].shape) != (planned.fmt, planned.shape):
            raise ValueError(
                f"cast_master: weights[{i}] ({weights[i].format} {weights[i].shape}) does not match the plan, "
                f"{planned.fmt} {planned.shape}; plan with its format and shape"
            )
    if weights is None:
        data = [jnp.zeros(piece_bytes(s.fmt, m.size), jnp.uint8) for s, m in zip(plan.slices, flat, strict=True)]
    else:
        data = [w.plane(s.usage).data.view(jnp.uint8) for w, s in zip(weights, plan.slices, strict=True)]
    made = flat_shards.cast_master(
        partitionable_ops,
        data,
        flat,
        _uint64_pairs(starts, n),
        max_over(as_axes("cast_master", axis_name)),
        plan=plan,
        pieces=weights is None,
        seeds=None if seeds is None else jnp.stack([as_seed("cast_master", seed) for seed in seeds]),
    )
    if weights is None:
        return made
    return [  # The other plane is dropped, because its codes are stale.
        weight.with_planes({s.usage: plane._replace(data=plane.data.view(weight.format.data_dtype))})
        for weight, s, plane in zip(weights, plan.slices, made, strict=True)
    ]


def join_pieces(
    pieces: jax.Array, starts: Sequence[Start] | jax.Array, fmt: FormatLike, shape: Shape, usage: Usage = Usage.ROWWISE
) -> jax.Array:
    """Join the codes of the slices of a weight, after an all-gather. A byte that two slices share is the OR of both.

    Args:
      pieces: uint8 `[slices, bytes]`: `jax.lax.all_gather` of the `data` that `cast_master` returned for slices of one
        length.
      starts: for each slice, the index of its first element, as for `cast_master`.
      fmt: the format of the weight, or its name.
      shape: the shape of the whole weight.
      usage: the plane that the codes belong to.

    Returns:
      The `data` of the plane, in the shape of `layout.plane`.

    Raises:
      ValueError: `pieces` is not uint8 `[slices, bytes]`, or `starts` does not have an entry for each slice.

    The computation is local: every device joins all slices itself.

    >>> from qshard.formats import FP8_E4M3
    >>> pieces = jnp.array([[0x38, 0x40], [0x48, 0x50]], jnp.uint8)  # 1, 2 and 4, 8 in E4M3
    >>> join_pieces(pieces, [0, 2], FP8_E4M3, (2, 2))
    Array([[1, 2],
           [4, 8]], dtype=float8_e4m3fn)
    """
    fmt = as_format(fmt, "join_pieces")
    if jnp.ndim(pieces) != 2 or str(pieces.dtype) != "uint8":
        raise ValueError(
            f"join_pieces: pieces ({quote(pieces)}) is not uint8 [slices, bytes]; stack the data of all slices"
        )
    count, room = pieces.shape
    data_shape = layout.plane(fmt, shape, usage, op="join_pieces").data_shape
    size = math.prod(data_shape)
    words = _uint64_pairs(starts, count)
    per_byte = fmt.element.codes_per_byte
    # A weight has fewer than 2**32 bytes. A piece past its end goes to the buffer behind it.
    first = words[:, 0] if not fmt.element.packed else words[:, 0] >> 1 | words[:, 1] << 31
    past = (words[:, 1] >= per_byte) | (first > size)
    first = jnp.where(past, np.uint32(size), first)
    whole, pieces, first = vary_alike(jnp.zeros(size + room, jnp.uint8), pieces, first)

    def join(i: Any, joined: jax.Array) -> jax.Array:
        there = lax.dynamic_slice(joined, (first[i],), (room,))
        return lax.dynamic_update_slice(joined, there | pieces[i], (first[i],))

    codes: jax.Array = lax.fori_loop(0, count, join, whole)[:size].reshape(data_shape)
    return codes.view(fmt.data_dtype)


def _uint64_pairs(numbers: Sequence[Start] | jax.Array, n: int) -> jax.Array:
    if isinstance(numbers, jax.Array | np.ndarray) and numbers.ndim == 2:
        words = jnp.asarray(numbers).astype(jnp.uint32)
    else:
        if isinstance(numbers, int):
            raise TypeError(
                f"cast_master: starts ({numbers}) is not a list of integers; pass one for each of {n} weights"
            )
        pairs = [jnp.asarray(as_uint64(number, "cast_master: starts")) for number in numbers]
        words = jnp.stack(vary_alike(*pairs)) if pairs else jnp.zeros((0, 2), jnp.uint32)
    if words.shape != (n, 2):
        raise ValueError(
            f"cast_master: starts {words.shape} is not one integer for each of {n} weights; pass shape (n,)"
        )
    return words
