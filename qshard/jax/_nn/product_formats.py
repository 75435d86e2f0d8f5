"""The passes of `linear` with a recipe that has formats of single products: `NVFP4(wgrad="bf16")`.

A product multiplies codes in the formats of its own recipe, or values rounded to bfloat16 ("bf16"). An operand of two
products is quantized once if they have one recipe, and else once for each. A gather sends what its product reads: codes
of one plane, or bfloat16 values.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from qshard.formats import Usage
from qshard.jax import policies
from qshard.jax._gemm.gemm import apply_scale, gemm, stored_for
from qshard.jax._nn.linear_vjp import (
    Config,
    NonDifferentiable,
    gather_plane,
    keep_planes,
    local_codes,
    quantize_role,
    row_product_of_w,
    whole_k,
)
from qshard.jax._ops.scheduling import barrier, name_residual
from qshard.jax._ops.second_derivatives import rules_of_product
from qshard.jax._quantized.array import QuantizedArray
from qshard.jax._quantized.gather import CodedWeight, WeightSharding
from qshard.jax._sharding.shard_spec import reshard
from qshard.jax._sharding.vmap_rows import vmap_as_rows
from qshard.recipes import NO_PRODUCTS, Product, Role


class ProductResiduals(NamedTuple):
    """The values saved for backward: x as wgrad reads it; w for dgrad, gathered or to gather; and the seed."""

    x: Any
    w: Any
    given: NonDifferentiable


def check_supported(config: Config, w: CodedWeight, given: NonDifferentiable) -> None:
    """Raise if a call uses what recipes with formats of single products do not support."""
    op, recipe = config.op, config.recipe
    if config.parallel is not None:
        raise NotImplementedError(f"{op}: gather_rows and scatter_rows need one format a role: {recipe} {NO_PRODUCTS}")
    if recipe.has_one_weight:
        return
    if given.scales is not None:
        raise ValueError(
            f"{op}: weight_scales is for one weight format, but forward and dgrad of {recipe} have two; leave it out"
        )
    if w.codes is not None or w.sink is None:
        raise ValueError(
            f"{op}: w is codes, but forward and dgrad of {recipe} need its values, for other formats; pass a "
            "weight in high precision, or a recipe that changes wgrad alone"
        )


def _of(config: Config, product: Product) -> Config | None:
    """The config of a product that multiplies codes, with its own recipe; None for a product of bfloat16."""
    own = config.recipe.of(product)
    return None if own is None else dataclasses.replace(config, recipe=own)


def _forward(
    config: Config, x: jax.Array, w: CodedWeight, given: NonDifferentiable, *, differentiated: bool
) -> tuple[jax.Array, ProductResiduals]:
    forward, wgrad = _of(config, Product.FORWARD), _of(config, Product.WGRAD)
    learns = differentiated and config.learns
    usage, w_saved = Usage.ROWWISE, Usage(0)
    at_once = forward is not None and wgrad is not None and forward.recipe is wgrad.recipe
    if learns and wgrad is not None:
        recipe = wgrad.recipe
        x_saved = stored_for(recipe.activation, recipe.gradient, Usage.COLUMNWISE)
        usage |= x_saved if at_once else Usage(0)
    codes: Any = w.sink
    if forward is None:
        assert w.sink is not None
        y = _dot(config, x, _gather_values(config, w.sink), Product.FORWARD, x.dtype)
    else:
        read = forward.stored(config.sharding.contracted)
        if differentiated and config.recipe.has_one_weight:
            w_saved = forward.stored(config.sharding.contracted_back)
        codes, _ = local_codes(forward, w, given, read | w_saved)
        whole = gather_plane(forward, codes, read)
        xq, _ = quantize_role(forward, x, given, Role.ACTIVATION, usage)
        y, scale, _ = row_product_of_w(forward, xq, Role.ACTIVATION, whole, x.shape[:-1])
        y = apply_scale(y, scale, x.dtype)
    saved_x: Any = None
    if learns and wgrad is None:
        saved_x = name_residual(x.astype(jnp.bfloat16), policies.X_CODES)
    elif learns and wgrad is not None:
        made = xq if at_once else quantize_role(wgrad, x, given, Role.ACTIVATION, x_saved)[0]
        saved_x = _name_codes(keep_planes(made, x_saved), policies.X_CODES)
    saved_w: Any = None
    if differentiated and w_saved:
        keeps = config.gathers and not config.reshard_after_forward
        saved_w = _name_codes(keep_planes(codes, w_saved), policies.W_CODES)
        saved_w = gather_plane(config, saved_w, w_saved) if keeps else saved_w
    elif differentiated:
        saved_w = w.sink if config.gathers and config.reshard_after_forward else _weight_of_dgrad(config, w.sink, given)
    return checkpoint_name(y, policies.PRODUCTS), ProductResiduals(saved_x, saved_w, given._replace(scales=None))


def _weight_of_dgrad(config: Config, values: Any, given: NonDifferentiable) -> Any:
    """Return the weight as dgrad reads it, gathered, from the values of the local shard."""
    dgrad = _of(config, Product.DGRAD)
    if dgrad is None:
        return _gather_values(config, values)
    usage = dgrad.stored(config.sharding.contracted_back)
    codes, _ = quantize_role(dgrad, values, given, Role.WEIGHT, usage)
    return gather_plane(dgrad, codes, usage)


def _product_fwd(
    config: Config, x: jax.Array, w: CodedWeight, given: NonDifferentiable
) -> tuple[jax.Array, ProductResiduals]:
    return _forward(config, x, w, given, differentiated=True)


def _product_bwd(
    config: Config, saved: ProductResiduals, dy: jax.Array
) -> tuple[jax.Array, CodedWeight, NonDifferentiable]:
    dgrad, wgrad = _of(config, Product.DGRAD), _of(config, Product.WGRAD)
    columns, given, x, w = Usage.COLUMNWISE, saved.given, saved.x, saved.w
    by_row, by_column = Usage(0), Usage(0)
    if dgrad is not None:
        by_row = stored_for(dgrad.recipe.gradient, dgrad.recipe.weight, Usage.ROWWISE)
    if wgrad is not None and config.learns:
        by_column = stored_for(wgrad.recipe.gradient, wgrad.recipe.activation, columns)
    dy_row: Any = dy
    dy_column: Any = dy
    if dgrad is not None and wgrad is not None and dgrad.recipe is wgrad.recipe:
        dy_row = dy_column = quantize_role(dgrad, dy, given, Role.GRADIENT, by_row | by_column)[0]
    else:
        if dgrad is not None:
            dy_row = quantize_role(dgrad, dy, given, Role.GRADIENT, by_row)[0]
        if wgrad is not None and config.learns:
            dy_column = quantize_role(wgrad, dy, given, Role.GRADIENT, by_column)[0]
    if config.gathers and config.reshard_after_forward:
        # Wait for dy: otherwise XLA merges the two gathers of w, and keeps the result from forward to backward.
        w, (dy_row, dy_column) = barrier(w, (dy_row, dy_column))
        if config.recipe.has_one_weight:
            w = gather_plane(config, w, config.stored(config.sharding.contracted_back))
        else:
            w = _weight_of_dgrad(config, w, given)
    if dgrad is None:
        dx = _dot(config, dy_row, w, Product.DGRAD, dy.dtype)
    else:
        dx, scale, _ = row_product_of_w(dgrad, dy_row, Role.GRADIENT, w, dy.shape[:-1])
        dx = apply_scale(dx, scale, dy.dtype)
    dw: jax.Array | None = None
    if config.learns:
        dtype = config.grad_dtype or config.w_dtype
        if wgrad is None:
            made = _dot(config, dy_column, x, Product.WGRAD, dtype)
        else:
            x = whole_k(wgrad, x) if config.sharding.contracts_whole_k else x
            pair = (dy_column, x) if config.sharding.layout == "NK" else (x, dy_column)
            options: dict[str, Any] = {
                "precise": True,
                "out_sharding": config.w_type,
                "by_rows": config.sharding.by_rows,
            }
            made = apply_scale(*gemm(pair[0], columns, pair[1], columns, dtype, **options), dtype)
        made = config.shards.scatter(made)
        if config.gathers:
            made, dx = barrier(made, dx)
        dw = made.astype(config.w_dtype)
    return dx, CodedWeight(None, dw, config.shards), NonDifferentiable(None, None, None)


def _dot(config: Config, a: jax.Array, b: jax.Array, product: Product, dtype: Any) -> jax.Array:
    """Multiply two operands, rounded to bfloat16, with sums in float32: y, dx, or dw in the layout of the weight."""
    sharding: Any = config.w_type
    is_nk, lead = config.sharding.layout == "NK", tuple(range(a.ndim - 1))
    a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    if product is Product.WGRAD:
        a, b = (a, b) if is_nk else (b, a)
        axes: Any = (lead, lead)
    else:
        forward = product is Product.FORWARD
        axes = ((a.ndim - 1,), (int(forward is is_nk),))
        sharding = config.out_sharding if forward else config.x_type
    narrow = jnp.bfloat16 if jnp.dtype(dtype) == jnp.bfloat16 else jnp.float32
    made = lax.dot_general(a, b, (axes, ((), ())), preferred_element_type=narrow, out_sharding=sharding)
    return made.astype(dtype)


def _gather_values(config: Config, w: jax.Array) -> jax.Array:
    """Gather a weight as bfloat16 values."""
    values, sharding = w.astype(jnp.bfloat16), config.shards
    if not config.gathers:
        return values
    assert isinstance(sharding, WeightSharding)
    return reshard(values, sharding.spec, sharding.spec.without(sharding.gather_axes))


def _name_codes(codes: Any, name: str) -> Any:
    """Name codes and scales for policies of `jax.checkpoint`. Codes in the form of custom `Shards` pass."""
    if not isinstance(codes, QuantizedArray):
        return codes
    planes = {
        usage: plane._replace(
            data=name_residual(plane.data, name),
            scale_inv=name_residual(plane.scale_inv, policies.SCALES),
        )
        for usage, plane in codes.planes.items()
    }
    return codes.with_planes(planes)


def _product(config: Config, x: jax.Array, w: CodedWeight, given: NonDifferentiable) -> jax.Array:
    return _forward(config, x, w, given, differentiated=False)[0]


product_by_format = jax.custom_vjp(_product, nondiff_argnums=(0,))
"""The differentiable product that `linear` calls for such a recipe, once arguments are checked."""
product_by_format.defvjp(*rules_of_product(None, _product_fwd, _product_bwd))
folding_product_by_format = vmap_as_rows(product_by_format, *rules_of_product(None, _product_fwd, _product_bwd))
