"""`quantize`, and the scales of all weights of a model from one reduction."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from qshard import layout
from qshard.formats import Format, Usage
from qshard.jax import ops
from qshard.jax._array import Plane, QuantizedArray
from qshard.jax._runs import reshape_as, split_rows
from qshard.ops import table
from qshard.recipes import Recipe, Role

__all__ = ["AxisName", "Scales", "axes_of", "check_float", "compute_scales", "quantize"]

AxisName = str | Sequence[str] | None
Scales = tuple[jax.Array, jax.Array]


def quantize(
    x: jax.typing.ArrayLike,
    fmt: Format,
    *,
    usage: Usage = Usage.ROWWISE,
    axis_name: AxisName = None,
    scales: Scales | None = None,
) -> QuantizedArray:
    """Casts `x` to a format.

    Per-tensor FP8: `data = encode(x * scale)` with `scale = element.max / max |x|` and `scale_inv = 1 / scale`.

    Args:
      x: float32, bfloat16 or float16, `[*lead, K]`; seen as a matrix `[M, K]`.
      fmt: for example `qshard.formats.FP8_E4M3`.
      usage: which planes to make. Both come from one read of `x`.
      axis_name: in `shard_map`, the mesh axes over which `x` is cut: the amax is reduced over them. Elsewhere all of
        `x` is known, and XLA reduces.
      scales: fp32 `(scale, scale_inv)`, `[]` each, from `compute_scales`: then `x` is read once.

    Returns:
      A QuantizedArray. Rowwise data is `[*lead, K]`; columnwise data of a per-tensor format is its transpose `[K, M]`.

    Raises:
      TypeError: `x` is not of a float dtype, or another argument not of its type.
      ValueError: `fmt` cannot hold the shape of `x`.
      NotImplementedError: `fmt` has blocks.

    However `x` is sharded, the codes are those of the unsharded cast. The amax is an all-reduce of 4 bytes; the cast
    moves nothing, with two exceptions: on Auto meshes, shards of K that are not whole runs of `gcd(K, 128)` elements
    are gathered first; and for a columnwise plane, so are leading axes that are cut, other than the first.

    >>> from qshard.formats import FP8_E4M3
    >>> q = quantize(jnp.array([[1.0, -2.0, 0.3]]), FP8_E4M3, usage=Usage.BOTH)
    >>> q.rowwise.data.shape, q.columnwise.data.shape, float(q.rowwise.scale_inv * 448)
    ((1, 3), (3, 1), 2.0)

    Sources: arXiv:2209.05433.
    """
    q: QuantizedArray = _quantize(x, scales, fmt=fmt, usage=usage, axis_names=axes_of(axis_name))
    return q


# Jitted for eager callers: one dispatch, and all checks done once for a shape.
@functools.partial(jax.jit, static_argnames=("fmt", "usage", "axis_names"), inline=True)
def _quantize(
    x: jax.Array, scales: Scales | None, fmt: Format, usage: Usage, axis_names: tuple[str, ...]
) -> QuantizedArray:
    if not isinstance(fmt, Format):
        raise TypeError(f"quantize: fmt ({fmt!r}) is not a qshard.formats.Format; take one from there")
    if not isinstance(usage, Usage) or not usage:
        raise TypeError(f"quantize: usage ({usage!r}) is not Usage.ROWWISE, COLUMNWISE or BOTH; ask for one of them")
    check_float("quantize", "x", x)
    for each in usage:
        layout.plane(fmt, x.shape, each)
    if fmt.block is not None:
        raise NotImplementedError(f"quantize: fmt ({fmt}) has blocks, which qshard.jax does not do yet; use FP8_E4M3")
    if scales is None:
        scales = _scales(_amax_bits(x), fmt, axis_names)
    rowwise, columnwise = _tensor_planes(x, scales, fmt, usage)
    axes = tuple(None if i in (0, x.ndim - 1) else size for i, size in enumerate(x.shape))
    return QuantizedArray(format=fmt, dtype=x.dtype, axes=axes, rowwise=rowwise, columnwise=columnwise)


def _tensor_planes(x: jax.Array, scales: Scales, fmt: Format, usage: Usage) -> tuple[Plane | None, Plane | None]:
    """The planes of a format with one scale for the tensor. The columnwise one is not made without the other."""
    scale, scale_inv = scales
    element = fmt.element.name
    if Usage.COLUMNWISE not in usage:
        runs = split_rows(x)
        data = ops.cast_tensor(runs.array, runs.spread(scale), element=element)
        return Plane(reshape_as(data, x), scale_inv), None
    matrix = x.reshape(layout.matrix_shape(x.shape))
    runs = split_rows(matrix)
    data, data_t = ops.cast_transpose(runs.array, runs.spread(scale), batch=0, element=element)
    rowwise = Plane(reshape_as(data, x), scale_inv) if Usage.ROWWISE in usage else None
    return rowwise, Plane(data_t.reshape(matrix.shape[::-1]), scale_inv)


def _amax_bits(x: jax.Array) -> jax.Array:
    """max |x| as the int32 view of its bits: an integer maximum is exact in any order, and NaN, the largest, wins."""
    runs = split_rows(x)
    amax = ops.amax_tensor(runs.array, lead=runs.lead)
    return jnp.max(lax.bitcast_convert_type(amax, jnp.int32), initial=0)


def _scales(amax_bits: jax.Array, fmt: Format, axis_names: tuple[str, ...]) -> Scales:
    if axis_names:
        amax_bits = lax.pmax(amax_bits, axis_names)
    amax = lax.bitcast_convert_type(amax_bits, jnp.float32)
    scale, scale_inv = ops.scale_from_amax(amax, element=fmt.element.name, eps=float(fmt.eps), pow2=fmt.pow2)
    return scale, scale_inv


def compute_scales(weights: Any, recipe: Recipe, *, axis_name: AxisName = None) -> Any:
    """The scales of all weights of a model from one max-reduction, for `linear` or `quantize`.

    Args:
      weights: a pytree of float32, bfloat16 or float16 arrays. For layers stacked along a first axis: under `vmap`.
      recipe: has the format of `Role.WEIGHT`.
      axis_name: in `shard_map`, the mesh axes over which the weights are cut.

    Returns:
      The pytree, with fp32 `(scale, scale_inv)`, `[]` each, in place of every array.

    Raises:
      TypeError: a weight is not of a float dtype.
      NotImplementedError: the format of weights has blocks.

    Sharded weights stay where they are. Their amaxes are reduced together, in one all-reduce of 4 bytes a weight.

    >>> from qshard.recipes import CurrentScaling
    >>> scales = compute_scales({"a": jnp.full((2, 2), 224.0), "b": jnp.full(3, 7.0)}, CurrentScaling())
    >>> jax.tree.map(float, scales)
    {'a': (2.0, 0.5), 'b': (64.0, 0.015625)}
    """
    fmt = recipe.format(Role.WEIGHT)
    if fmt.block is not None:
        raise NotImplementedError(f"compute_scales: format ({fmt}) has blocks, which qshard.jax does not do yet")
    leaves, structure = jax.tree.flatten(weights)
    pairs = _stacked_scales(leaves, fmt=fmt, axis_names=axes_of(axis_name)) if leaves else []
    return jax.tree.unflatten(structure, pairs)


@functools.partial(jax.jit, static_argnames=("fmt", "axis_names"), inline=True)
def _stacked_scales(weights: list[jax.Array], fmt: Format, axis_names: tuple[str, ...]) -> list[Scales]:
    for weight in weights:
        check_float("compute_scales", "weight", weight)
    scale, scale_inv = _scales(jnp.stack([_amax_bits(w) for w in weights]), fmt, axis_names)
    return [(scale[i], scale_inv[i]) for i in range(len(weights))]


def axes_of(axis_name: AxisName) -> tuple[str, ...]:
    """Mesh axes as a static argument."""
    return () if axis_name is None else (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)


def check_float(op: str, name: str, x: Any) -> None:
    """Raises the TypeError of the ops that read high precision, in the words of a public function's caller."""
    spec = table()["amax_tensor"]
    operand = dataclasses.replace(spec.inputs[0], name=name)
    dataclasses.replace(spec, name=op, inputs=(operand,)).check_dtypes([str(jnp.result_type(x))])
