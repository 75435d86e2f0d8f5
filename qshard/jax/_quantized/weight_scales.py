"""`WeightScales`, and `compute_scales`: the scales of all weights of a model from one max-reduction."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from qshard import layout
from qshard._core import quantize_steps
from qshard._core.validation import quote
from qshard.formats import Format, Usage
from qshard.jax._ops.amaxes import max_over
from qshard.jax._ops.mesh import AxisName, Spec, mesh_of, vary_alike
from qshard.jax._ops.validation import as_axes, check_array, check_dtype, check_spec, check_spec_fits
from qshard.jax._quantized.array import QuantizedArray
from qshard.jax._sharding import partitionable_ops
from qshard.jax._sharding.partial_blocks import PartialBlocks
from qshard.jax._sharding.shard_spec import ShardSpec, matrices_of, matrix_of
from qshard.recipes import RecipeLike, Role, as_recipe


class WeightScales(NamedTuple):
    """Values that all shards of a tensor share, from `compute_scales`. A field that the format does not need is None.

    All are float32. `WeightScales(scale, 1 / scale)` casts a per-tensor format under a scale of your own; infinite
    elements saturate under it.

    Attributes:
      scale: `[]`, the encode scale of a per-tensor format: `x * scale`.
      scale_inv: `[]`, the decode scale, which is stored.
      amax: `[]`, the amax of the tensor, for block formats with a global scale.
      block_amax: `[blocks along rows, blocks along columns]`, the amaxes of all blocks of the tensor, where shards
        split blocks.
    """

    scale: jax.Array | None = None
    scale_inv: jax.Array | None = None
    amax: jax.Array | None = None
    block_amax: jax.Array | None = None


def compute_scales(weights: Any, recipe: RecipeLike, *, axis_name: AxisName = None, spec: Spec = None) -> Any:
    """Compute the scales of all weights of a model from one max-reduction, for `linear` or `quantize`.

    Args:
      weights: a pytree of float32, bfloat16 or float16 arrays. For layers stacked along a first axis, call under
        `vmap`.
      recipe: a recipe or its name. Its format for `Role.WEIGHT` is used.
      axis_name: in `shard_map`, the mesh axes that shard the weights.
      spec: the sharding of all of them, as for `quantize`.

    Returns:
      The pytree, with `WeightScales` in place of every array.

    Raises:
      TypeError: a weight is not of a float dtype.
      ValueError: the format has a scale for each row of a weight, which shards do not share.

    Sharded weights are not moved. Their amaxes are reduced together: in `shard_map` in one all-reduce of 4 bytes each;
    elsewhere XLA combines the reductions that it can.

    >>> from qshard.recipes import NVFP4, CurrentScaling
    >>> scales = compute_scales({"a": jnp.full((2, 2), 224.0), "b": jnp.full(3, 7.0)}, CurrentScaling())
    >>> float(scales["a"].scale), float(scales["b"].scale_inv)
    (2.0, 0.015625)
    >>> float(compute_scales([jnp.full((16, 16), 1.0)], NVFP4())[0].amax)
    1.0

    Sources: TorchTitan's `precompute_float8_dynamic_scale_for_fsdp` (the idea).
    """
    fmt = as_recipe(recipe, "compute_scales").format(Role.WEIGHT)
    check_spec("compute_scales", "spec", spec)
    leaves, structure = jax.tree.flatten(weights, is_leaf=lambda node: isinstance(node, QuantizedArray))
    for leaf in leaves:
        check_array("compute_scales", "weights", leaf)
    axes = as_axes("compute_scales", axis_name)
    made = _stacked_scales(leaves, fmt=fmt, axis_names=axes, spec=spec) if leaves else []
    return jax.tree.unflatten(structure, made)


@functools.partial(jax.jit, static_argnames=("fmt", "axis_names", "spec"), inline=True)
def _stacked_scales(
    weights: list[jax.Array], fmt: Format, axis_names: tuple[str, ...], spec: Spec
) -> list[WeightScales]:
    for weight in weights:
        check_dtype("compute_scales", "weights", weight)
        check_spec_fits("compute_scales", "spec", spec, mesh_of(weight, spec), weight.ndim)
    shard_specs = [ShardSpec.of(weight, axis_names, spec) for weight in weights]
    # Local amaxes. One reduction over shards follows for all weights.
    own = [_own_amaxes(weight, fmt, shard_spec) for weight, shard_spec in zip(weights, shard_specs, strict=True)]
    leaves, structure = jax.tree.flatten(own)
    if not leaves:
        return own
    axes = tuple(dict.fromkeys(axis for shard_spec in shard_specs if shard_spec.local for axis in shard_spec.axes))
    flat, unravel = ravel_pytree(jax.tree.unflatten(structure, vary_alike(*leaves)))
    amaxes = max_over(axes)(flat)
    if fmt.per_tensor:  # One op computes the scales of all weights. Block scales are computed with the codes.
        scale, scale_inv = quantize_steps.scales(partitionable_ops, fmt, amaxes)[:2]
        return [WeightScales(scale[i], scale_inv[i]) for i in range(len(weights))]
    scales: list[WeightScales] = unravel(amaxes)
    return scales


def _own_amaxes(x: jax.Array, fmt: Format, shard_spec: ShardSpec) -> WeightScales:
    where = layout.plane(fmt, shard_spec.whole(x.shape), Usage.ROWWISE, op="compute_scales", name="weights")
    if where.global_scale_shape:
        raise ValueError(
            f"compute_scales: recipe ({fmt}) has one scale per row, so shards share none; leave compute_scales out"
        )
    amax, block_amax = quantize_steps.global_amax(partitionable_ops.ops_for(shard_spec), x, fmt), None
    matrix, shard_spec = matrices_of(x, {Usage.ROWWISE: where}, shard_spec, "compute_scales", "weights")
    if (partial := PartialBlocks.of_plane(where, shard_spec, matrix.shape)) is not None:
        partial = partial.of_whole if shard_spec.local else partial
        block_amax = matrix_of(
            partial.merge(quantize_steps.block_amax(partitionable_ops, matrix, partial.size), reduce=False)
        )
    return WeightScales(amax=amax, block_amax=block_amax)


def as_scales(op: str, name: str, scales: Any) -> WeightScales | None:
    """Return the scales of one tensor that a caller passed, as `WeightScales`."""
    if scales is None or isinstance(scales, WeightScales):
        return scales
    if isinstance(scales, tuple) and len(scales) == 2:
        return WeightScales(*scales)
    raise TypeError(
        f"{op}: {name} ({quote(scales)}) is not a WeightScales or a pair (scale, scale_inv); pass the result of "
        "compute_scales for this tensor"
    )


def check_scales(op: str, name: str, scales: WeightScales, fmt: Format) -> None:
    """Raise ValueError unless all scales that were passed are float32 scalars, of a kind that the format has."""
    given = {field: part for field, part in scales._asdict().items() if part is not None}
    if not fmt.per_tensor and "scale" in given:
        raise ValueError(f"{op}: {name} is per tensor, but {fmt} has one scale per block; leave it out")
    for field, part in given.items():
        shape, dtype = jnp.shape(part), str(jnp.result_type(part))
        if dtype != "float32" or (field != "block_amax" and shape != ()):
            raise ValueError(
                f"{op}: {name}.{field} ({dtype} {shape}) is not a float32 scalar; pass the scales of one tensor"
            )
