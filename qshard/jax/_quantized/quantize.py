"""`quantize`: casts a tensor, or a shard of it, to a quantized format."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from qshard import layout
from qshard._core import quantize_steps
from qshard._core.operands import OperandSpec, quantize_operand
from qshard._core.quantize_steps import Plane
from qshard._core.validation import FormatLike, as_format, as_usage
from qshard.formats import Format, Usage
from qshard.jax._ops.amaxes import max_along, max_over
from qshard.jax._ops.mesh import AxisName, Spec, may_be_sharded, mesh_of
from qshard.jax._ops.uint64 import xor_uint64
from qshard.jax._ops.validation import Seed, as_axes, as_seed, check_array, check_dtype, check_spec, check_spec_fits
from qshard.jax._quantized.array import QuantizedArray, axes_of_shape
from qshard.jax._quantized.weight_scales import WeightScales, as_scales, check_scales
from qshard.jax._sharding import partitionable_ops
from qshard.jax._sharding.partial_blocks import PartialBlocks
from qshard.jax._sharding.shard_spec import (
    ShardSpec,
    fold_axes,
    matrices_of,
    matrix_of,
    philox_of,
    pin,
    scattered_rows_error,
    unfold,
)


def quantize(
    x: jax.typing.ArrayLike,
    fmt: FormatLike,
    *,
    usage: Usage = Usage.ROWWISE,
    axis_name: AxisName = None,
    spec: Spec = None,
    scales: WeightScales | None = None,
    seed: Seed = None,
) -> QuantizedArray:
    """Cast `x` to a quantized format.

    `data = encode(x * scale)`, with one scale for the tensor or for each block. NUMERICS.md has the formulas.

    Args:
      x: float32, bfloat16 or float16, `[*lead, K]`, treated as a matrix `[M, K]`.
      fmt: a format such as `qshard.formats.MXFP8_E4M3`, or its name, "MXFP8_E4M3".
      usage: the planes to compute: codes and scales for a GEMM that contracts K (`ROWWISE`), M (`COLUMNWISE`), or both
        (`BOTH`).
      axis_name: in `shard_map`, the mesh axes that shard the tensor. `x` is then a shard, and amaxes that shards share
        are reduced over these axes. None: `x` is a tensor of its own.
      spec: the sharding of the tensor. None: by rows in `shard_map`; left to XLA on Auto meshes. On Explicit meshes the
        type of `x` gives it.
      scales: the result of `compute_scales` for `x`, or a pair `(scale, scale_inv)`. Nothing is reduced then.
      seed: for stochastic rounding: an integer, a uint64 as uint32 `[2]` (low half first), or a `jax.random` key.

    Returns:
      A QuantizedArray with planes in the shapes of `qshard.layout.plane`. In `shard_map`, a per-tensor scale belongs to
      the whole tensor, and along an axis where shards split blocks, the grid of scales covers the whole tensor. All
      other arrays are local.

    Raises:
      TypeError: `x` is not of a float dtype, or another argument has the wrong type.
      ValueError: `fmt` does not support the shape of the whole tensor, or its sharding (for example, in `shard_map`, an
        axis between the first and the last that splits blocks of rows), or `seed` is missing.

    Every sharding of `x` gives the bits of the unsharded cast. A per-tensor scale costs a max-reduction of 4 bytes;
    blocks that shards split cost one of 4 bytes a block. The cast itself moves no data, with two exceptions:

    - On Auto meshes without `spec`, XLA gathers an axis if shards split its blocks. For per-tensor formats, runs of
      `gcd(K, 128)` elements count as blocks here.
    - If leading axes other than the first are sharded, the codes of a transposed plane are gathered, because `[K, M]`
      cannot have that sharding.

    >>> from qshard.formats import FP8_E4M3, NVFP4
    >>> q = quantize(jnp.array([[1.0, -2.0, 0.3]]), FP8_E4M3, usage=Usage.BOTH)
    >>> q.rowwise.data.shape, q.columnwise.data.shape, float(q.rowwise.scale_inv * 448)
    ((1, 3), (3, 1), 2.0)
    >>> q = quantize(jnp.ones((2, 64)), NVFP4)
    >>> q.rowwise.data.shape, q.rowwise.scale_inv.shape, q.rowwise.global_scale_inv.shape
    ((2, 32), (2, 4), ())

    Sources: arXiv:2209.05433, OCP Microscaling Formats v1.0, arXiv:2509.25149; the others in NUMERICS.md.
    """
    check_array("quantize", "x", x)
    check_spec("quantize", "spec", spec)
    scales, seed = as_scales("quantize", "scales", scales), as_seed("quantize", seed)
    program = _program(as_format(fmt, "quantize"), as_usage(usage, "quantize"), as_axes("quantize", axis_name), spec)
    q: QuantizedArray = program(x, scales, seed)
    return q


@functools.lru_cache(maxsize=1024)
def _program(fmt: Format, usage: Usage, axis_names: tuple[str, ...], spec: Spec) -> Callable[..., QuantizedArray]:
    """Return `quantize` jitted for these options, so that an eager call is one dispatch and checks run once a shape.

    The options are bound here because `jit` would hash and compare static arguments in each call, which takes longer.
    """

    def _quantize(x: jax.Array, scales: WeightScales | None, seed: jax.Array | None) -> QuantizedArray:
        check_spec_fits("quantize", "spec", spec, mesh_of(x, spec), x.ndim)
        return quantize_shard(x, OperandSpec(fmt, usage), ShardSpec.of(x, axis_names, spec), scales, seed)[0]

    return jax.jit(_quantize, inline=True)


def quantize_shard(
    x: jax.Array,
    operand: OperandSpec,
    shard_spec: ShardSpec,
    scales: WeightScales | None = None,
    seed: jax.Array | None = None,
    *,
    apart: bool = False,
    transposed: bool = False,
    columns: int | None = None,
) -> tuple[QuantizedArray, jax.Array | None]:
    """Quantize a tensor, or the shard of it that `shard_spec` describes.

    Args:
      x: float32, bfloat16 or float16, `[*lead, K]`.
      operand: the format, the usage and, in a layer, the role. Its `added_rows` rows of zeros are appended to the
        matrix.
      shard_spec: the sharding of `x`.
      scales: as for `quantize`. Under delayed scaling, `scale` comes from earlier steps, or is 0 if there were none.
      seed: uint64 as uint32 `[2]`, or None. In a layer, the seed of the layer.
      apart: keep leading axes separate, because a mesh may shard any of them. Transposed planes are then `[K, *lead]`,
        and grids of scales have these axes too. Only `gemm` reads this form.
      transposed: `x` is a transpose: use the random bits of the original matrix.
      columns: the number of shards of the last axis on an Auto mesh, if `shard_spec` does not give it.

    Returns:
      The quantized tensor. Under delayed scaling also the amax of `x`, in `shard_map` of all its shards; else None.
    """
    fmt, usage, op, name = operand.format, operand.usage, operand.op, operand.name
    check_dtype(op, name, x)
    philox = philox_of(operand.seed_of(seed, xor_uint64), fmt, shard_spec, x.shape, transposed)
    if operand.added_rows:
        if philox is not None and philox.offset.ndim > 1:
            raise scattered_rows_error(x, fmt, max(fmt.block_shape()), shard_spec, op, name)
        x = jnp.pad(matrix_of(x), ((0, operand.added_rows), (0, 0)))
    places = operand.layouts(shard_spec.whole(x.shape))
    scales = WeightScales(*(scales or ()))
    check_scales(op, "scales" if op == "quantize" else "weight_scales", scales, fmt)
    matrix, matrix_spec = matrices_of(x, places, shard_spec, op, name, philox is not None)
    kept = x if usage is Usage.ROWWISE and x.ndim > 1 and places[usage].keeps_axes else matrix
    at = partitionable_ops.ops_for(shard_spec) if columns is None else partitionable_ops.ShardedOps(columns)
    if operand.margin is not None:
        axes = shard_spec.axes if shard_spec.local else ()
        over_shards = max_over(axes) if axes or may_be_sharded(x) else None
        planes, amax = quantize_operand(at, kept, operand, scale=scales.scale, reduce_max=over_shards)
        return _array_of(x, places, planes, apart), amax
    given = None if scales.scale is None else quantize_steps.Scales(scales.scale, scales.scale_inv)
    broken = [
        each for each, where in places.items() if PartialBlocks.of_plane(where, matrix_spec, matrix.shape) is not None
    ]
    planes = {
        each: _quantize_partial_blocks(matrix, places[each], matrix_spec, scales, philox, op, name) for each in broken
    }
    whole = [each for each in places if each not in broken]
    # XLA cannot partition an op that computes both planes if an edge truncates blocks.
    short = any(size % unit for size in kept.shape[-2:] for unit in fmt.block_shape())
    if len(whole) > 1 and not (short and may_be_sharded(x)):
        whole = [usage]

    def reduce_max(amax: jax.Array) -> jax.Array:
        """Reduce the amax of a tensor, or of its rows, over its shards."""
        if scales.amax is not None:
            return scales.amax
        return max_over((shard_spec.col_axes if fmt.row_scaled else shard_spec.axes) if shard_spec.local else ())(amax)

    for some in whole:
        planes |= quantize_steps.quantize(
            at,
            kept,
            fmt,
            some,
            reduce_max=reduce_max,
            philox=philox,
            given=given,
        )
    return _array_of(x, places, planes, apart), None


def _array_of(
    x: jax.Array, places: dict[Usage, layout.PlaneLayout], planes: dict[Usage, Plane], apart: bool
) -> QuantizedArray:
    """Return planes of the matrix of `x` in the shapes of `layout.plane`; with `apart`, unchanged."""
    lead = x.shape[:-1]
    made = {}
    for each, where in places.items():
        data, scale_inv, global_scale_inv = planes[each]
        if where.transposed and not apart:
            data = fold_axes(data, 1, data.ndim)
            scale_inv = fold_axes(scale_inv, 1, scale_inv.ndim) if scale_inv.ndim else scale_inv
        elif x.ndim != 2 and not where.transposed:
            data = unfold(data, (*lead, *data.shape[-1:]) if x.ndim else ())
            if where.rows_apart:
                scale_inv = unfold(scale_inv, (*lead, scale_inv.shape[-1]))
            elif scale_inv.ndim > 2 and not apart:
                scale_inv = matrix_of(scale_inv)
        if global_scale_inv is not None and global_scale_inv.ndim:  # One for each row.
            global_scale_inv = global_scale_inv.reshape(lead)
        made[each] = Plane(data, scale_inv, global_scale_inv)
    return QuantizedArray(
        format=next(iter(places.values())).format,
        dtype=x.dtype,
        axes=axes_of_shape(x.shape),
        rowwise=made.get(Usage.ROWWISE),
        columnwise=made.get(Usage.COLUMNWISE),
    )


def _quantize_partial_blocks(
    x: jax.Array,
    where: layout.PlaneLayout,
    shard_spec: ShardSpec,
    scales: WeightScales,
    philox: quantize_steps.Philox | None,
    op: str,
    name: str,
) -> Plane:
    """Quantize matrices `[*outer, M, K]` with partial blocks to one plane.

    Every device that has a part of a split block has its scale.
    """
    fmt = where.format
    if (other := layout.source(fmt, where.usage)) is not where.usage:
        rowwise = layout.plane(fmt, where.shape, other)
        made = _quantize_partial_blocks(x, rowwise, shard_spec, scales, philox, op, name)
        return quantize_steps.transpose_plane(partitionable_ops.ops_for(shard_spec), made, fmt)
    partial = PartialBlocks.of_plane(where, shard_spec, x.shape)
    assert partial is not None
    if (refusal := "the rotation mixes all elements of a block" if where.rotated else fmt.slice_refusal) is not None:
        raise ValueError(
            f"{op}: {name} {x.shape} in {' x '.join(map(str, shard_spec.shards))} shards splits blocks of {fmt}, and "
            f"{refusal}; shard it on block boundaries"
        )
    amax = scales.block_amax
    if amax is not None and x.ndim > 2 and partial.rows is None:
        amax = unfold(amax, (*x.shape[:-2], amax.shape[0] // math.prod(x.shape[:-2]), amax.shape[1]))
    if where.transposed:
        philox = None if philox is None else philox.transposed(x.shape[-1])
        amax = None if amax is None else partitionable_ops.swap_last_axes(amax)
        x = partitionable_ops.swap_last_axes(x)
    amax = (
        partial.merge(quantize_steps.block_amax(partitionable_ops, x, partial.size))
        if amax is None
        else partial.own(amax)
    )
    whole = scales.amax
    if whole is None and where.global_scale_shape is not None:
        axes = (partial.grid.col_axes if fmt.row_scaled else partial.grid.axes) if shard_spec.local else ()
        whole = max_over(axes)(max_along(amax, amax.ndim - 1 if fmt.row_scaled else 0))
    scale, scale_inv, global_scale_inv = quantize_steps.scales(partitionable_ops, fmt, amax, whole)
    scale = partial.spread(pin(scale, partial.grid), partial.count(x.shape))
    data = quantize_steps.cast(partitionable_ops, x, fmt, scale, partial.size, philox)
    return Plane(data, pin(scale_inv, partial.grid), global_scale_inv)
