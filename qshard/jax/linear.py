"""`linear`: three quantized GEMMs, with a weight that FSDP may have cut."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from qshard import pipeline
from qshard.formats import Usage
from qshard.jax.array import Plane, QuantizedArray
from qshard.jax.cuts import Spec, cuts_rows, matrix_of, shaped, spec_of, vary_alike
from qshard.jax.delayed import LinearState, TensorState, observed, scale_inv_of
from qshard.jax.gather import gather, scatter_gradient
from qshard.jax.gemm import Factor, gemm, multiplies_codes, stored_for
from qshard.jax.quantize import AxisName, Scales, Seed, axes_of, check_float, quantize_delayed, quantize_own, seed_of
from qshard.jax.steps import STEPS, word_pair
from qshard.layout import Shape
from qshard.recipes import ROLE_SEEDS, DelayedScaling, Recipe, Role

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


class _Given(NamedTuple):
    """What a call may be given beside its operands."""

    scales: Scales | None
    seed: jax.Array | None
    state: LinearState | None


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["x", "w", "given", "amaxes"], meta_fields=["x_type", "w_type"]
)
@dataclass(frozen=True)
class _Kept:
    """What backward needs of forward: planes of x and w that its GEMMs read, or the shard of w; how both were cut.

    And of delayed scaling the amaxes of x and w, for the cotangent of the state.
    """

    x: QuantizedArray
    w: QuantizedArray
    given: _Given
    amaxes: tuple[jax.Array | None, jax.Array | None]
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
    seed: Seed = None,
    state: LinearState | None = None,
) -> jax.Array:
    """`y = x @ w.T` in the formats of a recipe, differentiable.

    With Q the cast by role: `y = Q(x) @ Q(w).T`, `dx = Q(dy) @ Q(w)`, `dw = Q(dy).T @ Q(x)`, where blocks run along
    the axis that each contracts, and a random Hadamard transform of both `dy` and `x` leaves `dw` what it is. Products
    are accumulated in fp32. Codes of formats with one scale are multiplied as they are; those of blocks as bfloat16.

    Args:
      x: float32, bfloat16 or float16, `[*lead, K]`.
      w: of such a dtype, `[N, K]`; fp32 master weights may go in as they are.
      recipe: the format of each role.
      weight_spec: how `w` is cut, and its gradient is to be. Types of Explicit meshes say it.
      gather_axis: the mesh axis along which FSDP has cut `w`: shards are quantized, then their codes gathered.
      reshard_after_forward: gather the codes of `w` again in the backward pass, and keep only the shard's until then.
        False keeps the gathered ones: under `jax.checkpoint` that costs nothing and saves a gather, as recomputing
        gathers them anyway.
      weight_scales: of `w`, from `compute_scales`; without it, this call reduces the amaxes of `w`.
      axis_name: in `shard_map`, mesh axes along which the first axis of `x` is cut: one scale then serves all of it,
        and shards draw the random numbers of the whole. Without it, each device has a scale of its own, which costs no
        communication and makes the result depend on how `x` is cut. Blocks end where a shard ends, either way.
      out_sharding: of the result, on Explicit meshes where `x` and `w` leave it open: K is cut.
      seed: of stochastic rounding, which recipes may ask for: an integer, two words (uint32 `[2]`, low first) or a
        `jax.random` key. A new one for each call and step, such as `jax.random.fold_in(key, layer)`: calls with one
        seed draw the same numbers.
      state: of delayed scaling, from `init_delayed` and `update_delayed`. The gradient with respect to it is the amaxes
        of this call, reduced over all shards.

    Returns:
      `[*lead, N]`, of the dtype of `x`.

    Raises:
      TypeError: an operand is not of a float dtype, or `recipe` is no recipe.
      ValueError: shapes do not fit each other or the formats (of MXFP8 and NVFP4, all that is contracted must be whole
        blocks: K, and for gradients N; and the product of `lead` where a mesh may cut it, outside of `shard_map`: else
        rows of zeros make up for it); the recipe needs a seed or a state; or `gather_axis` is not in the mesh or
        `weight_spec`.

    Works under `jit` on Auto and Explicit meshes, and in `shard_map`, where `w` is the shard. With `gather_axis`, codes
    of the weight are gathered in the forward and again in the backward pass, a byte or half of one an element, with the
    scales that shards do not have in common. The gradient of `w` has its dtype, and is reduce-scattered to
    `weight_spec`.

    >>> import jax.numpy as jnp
    >>> from qshard.recipes import CurrentScaling
    >>> linear(jnp.full((2, 16), 7.0), jnp.full((3, 16), 0.875), CurrentScaling())
    Array([[98., 98., 98.],
           [98., 98., 98.]], dtype=float32)

    Sources: arXiv:2209.05433 (formats by role); arXiv:2509.25149 (NVFP4); PyTorch FSDP2 (`reshard_after_forward`).
    """
    config = _Config(recipe, weight_spec, gather_axis, reshard_after_forward, axes_of(axis_name), out_sharding)
    y: jax.Array = _checked_linear(config, x, w, _Given(weight_scales, seed_of(seed), state))
    return y


# Jitted for eager callers, gradients included: one dispatch, and all checks done once for a shape.
@functools.partial(jax.jit, static_argnums=0, inline=True)
def _checked_linear(config: _Config, x: jax.Array, w: jax.Array, given: _Given) -> jax.Array:
    if not isinstance(config.recipe, Recipe):
        raise TypeError(f"linear: recipe ({config.recipe!r}) is not a qshard.recipes.Recipe; take one from there")
    _check_recipe(config.recipe, given)
    check_float("linear", "x", x)
    check_float("linear", "w", w)
    if w.ndim != 2 or x.ndim < 1 or x.shape[-1] != w.shape[1]:
        raise ValueError(f"linear: w {w.shape} does not fit x {x.shape}; give w as [N, K] and x as [*lead, K]")
    # In shard_map, an operand that varies over fewer axes is cast to vary out here, where JAX sums its gradient.
    x, w = vary_alike(x, w)
    return _linear(config, x, w, given)


def _check_recipe(recipe: Recipe, given: _Given) -> None:
    """Raises for what no shape can mend."""
    if given.seed is None and recipe.stochastic:
        raise ValueError(
            f"linear: seed (None) is not what {type(recipe).__name__} needs, as it rounds stochastically; give each "
            "call and step a seed of its own, such as jax.random.fold_in(key, layer)"
        )
    if isinstance(recipe, DelayedScaling) != (given.state is not None) or (given.state and given.scales is not None):
        raise ValueError(
            f"linear: state ({'one' if given.state else None}) is not what {type(recipe).__name__} takes; give "
            "DelayedScaling a state from init_delayed and no weight_scales, and other recipes none"
        )
    for tensor in (given.state.weight, given.state.activation, given.state.gradient) if given.state else ():
        shapes = {"scale": tensor.scale.shape, "amax_history": tensor.amax_history.shape}
        if shapes != recipe.state_shapes:
            raise ValueError(f"linear: state ({shapes}) is not of shapes {recipe.state_shapes}; give that of one layer")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(config: _Config, x: jax.Array, w: jax.Array, given: _Given) -> jax.Array:
    xq, _ = _quantized(config, x, given, Role.ACTIVATION, Usage.ROWWISE)
    wq, _ = _quantized(config, w, given, Role.WEIGHT, Usage.ROWWISE)
    return _product(config, xq, _whole(config, wq, Usage.ROWWISE), x.shape[:-1])


def _linear_fwd(config: _Config, x: jax.Array, w: jax.Array, given: _Given) -> tuple[jax.Array, _Kept]:
    x_kept, w_kept = (_kept_plane(config.recipe, role) for role in (Role.ACTIVATION, Role.WEIGHT))
    xq, x_amax = _quantized(config, x, given, Role.ACTIVATION, Usage.ROWWISE | x_kept)
    wq, w_amax = _quantized(config, w, given, Role.WEIGHT, Usage.ROWWISE | w_kept)
    whole = _whole(config, wq, Usage.ROWWISE)
    kept_w = wq  # To keep the whole weights of all layers until backward would undo FSDP.
    if config.gather_axis and not config.reshard_after_forward:
        kept_w = whole if w_kept is Usage.ROWWISE else _whole(config, wq, w_kept)
    given = given._replace(scales=None)
    types = jax.typeof(x).sharding, jax.typeof(w).sharding
    y = _product(config, xq, whole, x.shape[:-1])
    return y, _Kept(_only(xq, x_kept), _only(kept_w, w_kept), given, (x_amax, w_amax), *types)


def _linear_bwd(config: _Config, kept: _Kept, dy: jax.Array) -> tuple[jax.Array, jax.Array, _Given]:
    xq, wq = kept.x, kept.w
    if config.gather_axis and config.reshard_after_forward:
        # Without the barrier XLA sees one gather where two are written, and keeps its result from forward to backward.
        wq, dy = _not_before(wq, dy)
        wq = _whole(config, wq, _kept_plane(config.recipe, Role.WEIGHT))
    if multiplies_codes(wq.format, config.recipe.gradient) and wq.columnwise is None:
        parts = pipeline.transposed(STEPS, wq.plane(Usage.ROWWISE).parts, wq.format)
        wq = dataclasses.replace(wq, columnwise=Plane(*parts))
    for_dx, for_dw = (
        stored_for(config.recipe.gradient, q.format, each) for q, each in zip((wq, xq), Usage, strict=True)
    )
    dyq, dy_amax = _quantized(config, dy, kept.given, Role.GRADIENT, for_dx | for_dw)
    explicit = bool(kept.w_type.mesh.explicit_axes)
    x_type, w_type = (kept.x_type, kept.w_type) if explicit else (None, None)
    rows, columns = Usage.ROWWISE, Usage.COLUMNWISE
    dx = _of_rows(Factor(dyq, rows), Factor(wq, columns), dy.shape[:-1], xq.dtype, precise=True, out_sharding=x_type)
    dw = gemm(Factor(dyq, columns), Factor(xq, columns), wq.dtype, precise=True, out_sharding=w_type)
    if not explicit:
        dw = scatter_gradient(dw, config.gather_axis, config.weight_spec)
    return dx, dw, _Given(None, None, _observed(config, kept, dy_amax))


_linear.defvjp(_linear_fwd, _linear_bwd)


def _not_before(wq: QuantizedArray, dy: jax.Array) -> tuple[QuantizedArray, jax.Array]:
    """Both as they are, but what is gathered of `wq` exists only once `dy` does."""
    leaves, structure = jax.tree.flatten(wq)
    # A barrier makes all of its operands vary alike, and scales that shards have in common do not vary.
    varying = [jax.typeof(leaf).manual_axis_type.varying for leaf in leaves]
    late = [i for i, axes in enumerate(varying) if axes == varying[0]]
    *shards, dy = lax.optimization_barrier((*(leaves[i] for i in late), dy))
    for i, shard in zip(late, shards, strict=True):
        leaves[i] = shard
    return jax.tree.unflatten(structure, leaves), dy


def _kept_plane(recipe: Recipe, role: Role) -> Usage:
    """The plane that backward reads. Of a weight that is gathered by rows, the transpose is made after the gather.

    A weight is gathered as rows, which arrive in order; its transposed shards would arrive as stripes, to be moved
    once more. A transpose reads and writes each byte once instead, on every device.
    """
    fmt = recipe.format(role)
    if role is Role.WEIGHT and fmt.square:
        return Usage.ROWWISE
    return stored_for(fmt, recipe.gradient, Usage.COLUMNWISE)


def _only(q: QuantizedArray, usage: Usage) -> QuantizedArray:
    if usage is Usage.ROWWISE:
        return dataclasses.replace(q, columnwise=None)
    return dataclasses.replace(q, rowwise=None)


def _quantized(
    config: _Config, x: jax.Array, given: _Given, role: Role, usage: Usage
) -> tuple[QuantizedArray, jax.Array | None]:
    """x, dy or the shard of w, and, of delayed scaling, the amax as each device knows it.

    A matrix in place of x or dy, with more rows, where the recipe adds some and no mesh may cut them.
    """
    fmt = config.recipe.format(role)
    if given.state is not None:
        of_role: TensorState = getattr(given.state, role.value)
        return quantize_delayed(x, fmt, usage, of_role.scale, scale_inv_of(of_role))
    seed = given.seed
    if seed is not None and ROLE_SEEDS[role]:
        seed = seed ^ word_pair(ROLE_SEEDS[role]).view(seed.dtype)
    if role is not Role.WEIGHT:
        rows = math.prod(x.shape[:-1])
        added = config.recipe.added_rows(role, usage, rows)
        if added and not cuts_rows(x, config.out_sharding):
            x = jnp.pad(matrix_of(x), ((0, added), (0, 0)))
        # Blocks are those of a shard: what it multiplies is its own.
        return quantize_own(x, fmt, usage, None, seed, config.axes, None, own_rows=rows), None
    axis, spec = config.gather_axis, config.weight_spec
    manual = axis in jax.typeof(x).sharding.mesh.manual_axes
    if axis and not manual and spec is None:
        spec = PartitionSpec(axis)  # Where the mesh is not Manual, and nothing says how w is cut, it is by rows.
    return quantize_own(x, fmt, usage, given.scales, seed, (axis,) if axis and manual else (), spec), None


def _observed(config: _Config, kept: _Kept, dy_amax: jax.Array | None) -> LinearState | None:
    """The cotangent of the state: amaxes, reduced over the shards of each tensor."""
    state, (x_amax, w_amax) = kept.given.state, kept.amaxes
    if state is None or x_amax is None or w_amax is None or dy_amax is None:
        return None
    gathered = () if config.gather_axis is None else (config.gather_axis,)
    return LinearState(
        weight=observed(state.weight, w_amax, gathered),
        activation=observed(state.activation, x_amax, config.axes),
        gradient=observed(state.gradient, dy_amax, config.axes),
    )


def _whole(config: _Config, wq: QuantizedArray, usage: Usage) -> QuantizedArray:
    """One plane of w, gathered."""
    return gather(_only(wq, usage), config.gather_axis, spec=config.weight_spec) if config.gather_axis else wq


def _product(config: _Config, xq: QuantizedArray, wq: QuantizedArray, lead: Shape) -> jax.Array:
    x, w = (Factor(q, Usage.ROWWISE) for q in (xq, wq))
    return _of_rows(x, w, lead, xq.dtype, precise=False, out_sharding=config.out_sharding)


def _of_rows(a: Factor, b: Factor, lead: Shape, dtype: Any, *, precise: bool, out_sharding: Spec) -> jax.Array:
    """The product of the rows `lead` of `a`, without those that `_quantized` has added, which no mesh cuts."""
    if a.tensor.shape[:-1] == lead:
        return gemm(a, b, dtype, precise=precise, out_sharding=out_sharding)
    if out_sharding is not None:
        last = (*spec_of(out_sharding, None), *[None] * len(lead))[len(lead)]
        cut = PartitionSpec(None, last)
        out_sharding = NamedSharding(out_sharding.mesh, cut) if isinstance(out_sharding, NamedSharding) else cut
    product = gemm(a, b, dtype, precise=precise, out_sharding=out_sharding)
    return shaped(product[: math.prod(lead)], (*lead, product.shape[-1]))
