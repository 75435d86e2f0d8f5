"""`linear`: three quantized GEMMs, with a weight that FSDP may have cut."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import jax
from jax import lax
from jax.sharding import NamedSharding

from qshard.formats import Usage
from qshard.jax import ops
from qshard.jax._array import Plane, QuantizedArray
from qshard.jax._gather import Spec, gather, scatter_gradient
from qshard.jax._gemm import gemm
from qshard.jax._quantize import AxisName, Scales, axes_of, check_float, quantize
from qshard.jax._runs import split_rows
from qshard.recipes import Recipe, Role

__all__ = ["linear"]


@dataclass(frozen=True)
class _Config:
    """The static arguments of `linear`."""

    recipe: Recipe
    weight_spec: Spec
    gather_axis: str | None
    reshard_after_forward: bool
    axes: tuple[str, ...]
    out_sharding: Spec


@functools.partial(jax.tree_util.register_dataclass, data_fields=["x", "w"], meta_fields=["x_type", "w_type"])
@dataclass(frozen=True)
class _Kept:
    """What backward needs of forward: the columnwise plane of x; that of w or the shard's codes; how both were cut."""

    x: QuantizedArray
    w: QuantizedArray
    x_type: NamedSharding
    w_type: NamedSharding


def linear(
    x: jax.Array,
    w: jax.Array,
    recipe: Recipe,
    *,
    weight_spec: Spec = None,
    gather_axis: str | None = None,
    reshard_after_forward: bool = True,
    weight_scales: Scales | None = None,
    axis_name: AxisName = None,
    out_sharding: Spec = None,
) -> jax.Array:
    """`y = x @ w.T` in the formats of a recipe, differentiable.

    With Q the cast by role: `y = Q(x) @ Q(w).T`, `dx = Q(dy) @ Q(w)`, `dw = Q(dy).T @ Q(x)`. Each tensor is cast once;
    products are accumulated in fp32.

    Args:
      x: float32, bfloat16 or float16, `[*lead, K]`.
      w: of such a dtype, `[N, K]`; fp32 master weights may go in as they are.
      recipe: the format of each role.
      weight_spec: how `w` is cut, and its gradient is to be. Types of Explicit meshes say it.
      gather_axis: the mesh axis along which FSDP has cut `w`: shards are quantized, then their codes gathered.
      reshard_after_forward: gather the codes of `w` again in the backward pass, and keep only the shard's until then.
        False keeps the gathered ones: under `jax.checkpoint` that costs nothing and saves a gather, as recomputing
        gathers them anyway.
      weight_scales: `(scale, scale_inv)` of `w`, from `compute_scales`; without it, this call reduces the amax of `w`.
      axis_name: in `shard_map`, mesh axes along which `x` is cut: it then gets one scale. Without it, each device has a
        scale of its own, which costs no communication and makes the result depend on how `x` is cut.
      out_sharding: of the result, on Explicit meshes where `x` and `w` leave it open: K is cut.

    Returns:
      `[*lead, N]`, of the dtype of `x`.

    Raises:
      TypeError: an operand is not of a float dtype, or `recipe` is no recipe.
      ValueError: shapes do not fit, or `gather_axis` is not in the mesh or `weight_spec`.
      NotImplementedError: a format of the recipe has blocks.

    Works under `jit` on Auto and Explicit meshes, and in `shard_map`, where `w` is the shard. With `gather_axis`, codes
    of the weight are gathered in the forward and again in the backward pass, one byte an element. The gradient of `w`
    has its dtype, and is reduce-scattered to `weight_spec`.

    >>> import jax.numpy as jnp
    >>> from qshard.recipes import CurrentScaling
    >>> linear(jnp.full((2, 16), 7.0), jnp.full((3, 16), 0.875), CurrentScaling())
    Array([[98., 98., 98.],
           [98., 98., 98.]], dtype=float32)

    Sources: arXiv:2209.05433 (formats by role); PyTorch FSDP2 (`reshard_after_forward`).
    """
    config = _Config(recipe, weight_spec, gather_axis, reshard_after_forward, axes_of(axis_name), out_sharding)
    y: jax.Array = _checked_linear(config, x, w, weight_scales)
    return y


# Jitted for eager callers, gradients included: one dispatch, and all checks done once for a shape.
@functools.partial(jax.jit, static_argnums=0, inline=True)
def _checked_linear(config: _Config, x: jax.Array, w: jax.Array, scales: Scales | None) -> jax.Array:
    if not isinstance(config.recipe, Recipe):
        raise TypeError(f"linear: recipe ({config.recipe!r}) is not a qshard.recipes.Recipe; take one from there")
    check_float("linear", "x", x)
    check_float("linear", "w", w)
    if w.ndim != 2 or x.ndim < 1 or x.shape[-1] != w.shape[1]:
        raise ValueError(f"linear: w {w.shape} does not fit x {x.shape}; give w as [N, K] and x as [*lead, K]")
    # In shard_map, an operand that varies over fewer axes is cast to vary out here, where JAX sums its gradient.
    x, w = _vary_alike(x, w)
    return _linear(config, x, w, scales)


def _vary_alike(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    own = [frozenset(jax.typeof(a).manual_axis_type.varying) for a in arrays]
    missing = [tuple(sorted(frozenset().union(*own) - axes)) for axes in own]
    return tuple(lax.pcast(a, m, to="varying") if m else a for a, m in zip(arrays, missing, strict=True))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(config: _Config, x: jax.Array, w: jax.Array, scales: Scales | None) -> jax.Array:
    xq, wq = _operands(config, x, w, scales, Usage.ROWWISE)
    return _product(config, xq, _whole(config, wq))


def _linear_fwd(config: _Config, x: jax.Array, w: jax.Array, scales: Scales | None) -> tuple[jax.Array, _Kept]:
    xq, wq = _operands(config, x, w, scales, Usage.BOTH)
    whole = _whole(config, wq)
    if not config.gather_axis:
        kept_w = dataclasses.replace(wq, rowwise=None)
    else:  # To keep the whole weights of all layers until backward would undo FSDP.
        kept_w = wq if config.reshard_after_forward else whole
    kept = _Kept(dataclasses.replace(xq, rowwise=None), kept_w, jax.typeof(x).sharding, jax.typeof(w).sharding)
    return _product(config, xq, whole), kept


def _linear_bwd(config: _Config, kept: _Kept, dy: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    xq, wq = kept.x, kept.w
    if config.gather_axis and config.reshard_after_forward:
        # Without the barrier XLA sees one gather where two are written, and keeps its result from forward to backward.
        shard = wq.plane(Usage.ROWWISE)
        data, dy = lax.optimization_barrier((shard.data, dy))
        wq = _whole(config, dataclasses.replace(wq, rowwise=dataclasses.replace(shard, data=data)))
    w_t = _transposed(wq.plane(Usage.ROWWISE)) if config.gather_axis else wq.plane(Usage.COLUMNWISE)
    dyq = quantize(dy, config.recipe.format(Role.GRADIENT), usage=Usage.BOTH, axis_name=config.axes)
    explicit = bool(kept.w_type.mesh.explicit_axes)
    dx = gemm(
        dyq.plane(Usage.ROWWISE),
        dyq.format,
        w_t,
        wq.format,
        xq.dtype,
        precise=True,
        out_sharding=kept.x_type if explicit else None,
    )
    dw = gemm(
        dyq.plane(Usage.COLUMNWISE),
        dyq.format,
        xq.plane(Usage.COLUMNWISE),
        xq.format,
        wq.dtype,
        precise=True,
        out_sharding=kept.w_type if explicit else None,
    )
    return dx, dw if explicit else scatter_gradient(dw, config.gather_axis, config.weight_spec), None


_linear.defvjp(_linear_fwd, _linear_bwd)


def _operands(
    config: _Config, x: jax.Array, w: jax.Array, scales: Scales | None, usage: Usage
) -> tuple[QuantizedArray, QuantizedArray]:
    """x and the shard of w, quantized for `usage`; of a shard that is gathered, only what is gathered."""
    xq = quantize(x, config.recipe.format(Role.ACTIVATION), usage=usage, axis_name=config.axes)
    manual = config.gather_axis in jax.typeof(w).sharding.mesh.manual_axes
    wq = quantize(
        w,
        config.recipe.format(Role.WEIGHT),
        usage=Usage.ROWWISE if config.gather_axis else usage,
        axis_name=config.gather_axis if manual else None,
        scales=scales,
    )
    return xq, wq


def _whole(config: _Config, wq: QuantizedArray) -> QuantizedArray:
    return gather(wq, config.gather_axis, spec=config.weight_spec) if config.gather_axis else wq


def _product(config: _Config, xq: QuantizedArray, wq: QuantizedArray) -> jax.Array:
    x, w = xq.plane(Usage.ROWWISE), wq.plane(Usage.ROWWISE)
    return gemm(x, xq.format, w, wq.format, xq.dtype, precise=False, out_sharding=config.out_sharding)


def _transposed(plane: Plane) -> Plane:
    """The columnwise plane of a format whose scales do not depend on the direction, from its rowwise plane.

    A weight is gathered as rows, which arrive in order; its transposed shards would arrive as stripes, to be moved
    once more. This reads and writes each byte once instead, on every device.
    """
    data_t = ops.transpose(split_rows(plane.data).array, batch=0)
    return dataclasses.replace(plane, data=data_t.reshape(plane.data.shape[::-1]))
