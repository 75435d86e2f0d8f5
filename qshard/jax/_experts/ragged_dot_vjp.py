"""The forward and backward passes of `ragged_dot`: quantized tokens, gathered weights, products and residuals."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from qshard._core.operands import OperandSpec, check_weight_format
from qshard.formats import Usage
from qshard.jax._delayed_scaling import LinearState, observe_all
from qshard.jax._experts.expert_parallel import GroupedRows, quantize_dispatched
from qshard.jax._experts.tiles import expert_products, quantize_tiles, row_product, tiles_of
from qshard.jax._gemm import grouped_gemm
from qshard.jax._nn.activations import gate_up_and_amaxes, gate_up_grad_and_amaxes
from qshard.jax._nn.operands import keep_planes
from qshard.jax._ops.scheduling import barrier
from qshard.jax._ops.second_derivatives import rules_of_product
from qshard.jax._quantized.array import QuantizedArray
from qshard.jax._quantized.gather import CodedWeight, WeightSharding
from qshard.jax._quantized.quantize import quantize_shard
from qshard.jax._quantized.weight_scales import WeightScales
from qshard.layout import source
from qshard.recipes import Recipe, Role


@dataclass(frozen=True, kw_only=True)
class Config:
    """Static options of a call. `axes` shard the rows of an expert, and `sharding` describes one expert's weight.

    With `swiglu` the result is SwiGLU of the product. Both are one function with a gradient, because the kernel that
    computes the gradient of SwiGLU gives the amaxes of its rows, and the product quantizes it.
    """

    recipe: Recipe
    sharding: WeightSharding
    axes: tuple[str, ...]
    learns: bool
    reshard_after_forward: bool
    swiglu: bool = False


class CallArrays(NamedTuple):
    """Arguments without a gradient, except for `state`, which gets a cotangent. Seeds are `[E, 2]`.

    `groups` are the sizes of groups, `[E]`, or padded rows. `row_amaxes` are the amaxes of the rows of x, if known.
    """

    groups: jax.Array | GroupedRows
    seeds: jax.Array | None
    state: LinearState | None
    weight_amax: jax.Array | None
    row_amaxes: jax.Array | None = None


class Residuals(NamedTuple):
    """The values saved for backward. Planes have tiles or experts as their first axis.

    Fields as in `linear_vjp.Residuals`. `gate_up` is the product, if SwiGLU follows.
    """

    x: QuantizedArray
    w: QuantizedArray
    arrays: CallArrays
    amaxes: tuple[jax.Array | None, jax.Array | None]
    gate_up: jax.Array | None


Result = tuple[jax.Array, jax.Array | None]
"""The result, and with SwiGLU the amax of each of its rows."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def ragged_product(config: Config, x: jax.Array, w: CodedWeight, arrays: CallArrays) -> Result:
    return _forward(config, x, w, arrays, learns=False)[0]


def _forward(
    config: Config, x: jax.Array, w: CodedWeight, arrays: CallArrays, *, learns: bool = True
) -> tuple[Result, Residuals]:
    recipe, sharding, rows, none = config.recipe, config.sharding, Usage.ROWWISE, Usage(0)
    groups = _rows_of(recipe, x, arrays)
    x_saved = _stored_rows(recipe, Role.ACTIVATION, x) if learns and config.learns else none
    read = _stored_weight(config, w, Role.ACTIVATION, x)
    w_saved = _stored_weight(config, w, Role.GRADIENT, x) if learns else none
    xq, x_amax = _quantize_rows(config, x, arrays, Role.ACTIVATION, rows | x_saved, groups)
    wq, w_amax = _weight(config, w, arrays, read | w_saved)
    whole = _gather_plane(config, wq, read)
    y = row_product(xq, whole, sharding.contracted, groups.y, x.dtype, fast=True)
    if learns and not config.reshard_after_forward:
        wq = whole if w_saved is read else _gather_plane(config, wq, w_saved)
    y, gate_up, row_amaxes = groups.combine(y, Role.GRADIENT), None, None
    if config.swiglu:
        gate_up = y
        y, row_amaxes = gate_up_and_amaxes(gate_up)
    arrays = arrays._replace(row_amaxes=None)
    saved = Residuals(keep_planes(xq, x_saved), keep_planes(wq, w_saved), arrays, (x_amax, w_amax), gate_up)
    return (y, row_amaxes), saved


def _backward(config: Config, saved: Residuals, grads: Result) -> tuple[jax.Array, CodedWeight, CallArrays]:
    recipe, arrays, wq, dy = config.recipe, saved.arrays, saved.w, grads[0]
    if saved.gate_up is not None:
        dy, row_amaxes = gate_up_grad_and_amaxes(saved.gate_up, dy)
        arrays = arrays._replace(row_amaxes=row_amaxes)
    if config.sharding.gather_axes and config.reshard_after_forward:
        wq, dy = barrier(wq, dy)
        wq = _gather_plane(config, wq, source(recipe.weight, config.sharding.contracted_back))
    groups = _rows_of(recipe, dy, arrays)
    read = Usage.ROWWISE | (_stored_rows(recipe, Role.GRADIENT, dy) if config.learns else Usage(0))
    dyq, dy_amax = _quantize_rows(config, dy, arrays, Role.GRADIENT, read, groups)
    dx = row_product(dyq, wq, config.sharding.contracted_back, groups.x, dy.dtype, fast=False)
    dw = None
    if config.learns:
        pair = (dyq, saved.x) if config.sharding.layout == "NK" else (saved.x, dyq)
        dw = jax.vmap(config.sharding.scatter)(expert_products(*pair, groups.x, wq.dtype))
        if config.sharding.gather_axes:  # As in `linear`: `scheduling.py`.
            dw, dx = barrier(dw, dx)
    x_amax, w_amax = saved.amaxes
    observed = None
    if arrays.state is not None:
        observed = observe_all(arrays.state, w_amax, x_amax, dy_amax, config.axes)
    nothing: Any = CallArrays(None, None, observed, None, None)  # type: ignore[arg-type]
    return groups.combine(dx, Role.ACTIVATION), CodedWeight(None, dw, None), nothing


ragged_product.defvjp(*rules_of_product("ragged_dot", _forward, _backward))


def _rows_of(recipe: Recipe, x: jax.Array, arrays: CallArrays) -> GroupedRows:
    if isinstance(arrays.groups, GroupedRows):
        return arrays.groups
    tiles = tiles_of(recipe, x.shape[0], arrays.groups)
    return GroupedRows(tiles, tiles)


def _quantize_rows(
    config: Config, x: jax.Array, arrays: CallArrays, role: Role, usage: Usage, groups: GroupedRows
) -> tuple[QuantizedArray, jax.Array | None]:
    operand, tiles = OperandSpec.of(config.recipe, role, usage), groups.x if role is Role.ACTIVATION else groups.y
    options: dict[str, Any] = {"axes": config.axes, "seeds": arrays.seeds, "scales": _scales(arrays, role)}
    exchange = groups.exchange_of(role)
    if exchange is None:
        return quantize_tiles(x, operand, tiles, row_amaxes=arrays.row_amaxes, **options)
    return quantize_dispatched(x, operand, tiles, exchange, **options)


def _stored_rows(recipe: Recipe, role: Role, x: jax.Array) -> Usage:
    """The plane of x or dy to quantize for dw: the columnwise one, if a GEMM of codes reads it."""
    by_codes = grouped_gemm.takes_codes(recipe.gradient, recipe.activation, x, by_k=True)
    return Usage.COLUMNWISE if by_codes else source(recipe.format(role), Usage.COLUMNWISE)


def _stored_weight(config: Config, w: CodedWeight, role: Role, x: jax.Array) -> Usage:
    """The plane of w to quantize, gather or save for a product with x or dy: a GEMM of codes contracts its last axis.

    Both planes are quantized together, which saves a transpose. Gathers are always of the rowwise plane: shards of a
    transposed plane would arrive as stripes.
    """
    fmt, sharding = config.recipe.weight, config.sharding
    usage = sharding.contracted if role is Role.ACTIVATION else sharding.contracted_back
    has_plane = w.codes is None or usage in w.codes.planes
    if has_plane and not sharding.gather_axes and grouped_gemm.takes_codes(config.recipe.format(role), fmt, x):
        return usage
    return source(fmt, usage)


def _scales(arrays: CallArrays, role: Role) -> jax.Array | None:
    """The scale of each expert, under delayed scaling."""
    return None if arrays.state is None else getattr(arrays.state, role.value).scale


def _weight(
    config: Config, w: CodedWeight, arrays: CallArrays, usage: Usage
) -> tuple[QuantizedArray, jax.Array | None]:
    """The local codes of all experts, and their amaxes under delayed scaling. Quantizes weights that are arrays."""
    if w.codes is not None:
        return w.codes, arrays.weight_amax
    assert w.sink is not None
    operand = OperandSpec.of(config.recipe, Role.WEIGHT, usage, op="ragged_dot", name="w")

    def cast(own: jax.Array, seed: Any, scale: Any) -> tuple[QuantizedArray, jax.Array | None]:
        made = None if scale is None else WeightScales(scale)
        return quantize_shard(own, operand, config.sharding.spec, made, seed, transposed=config.sharding.layout == "KN")

    scales = _scales(arrays, Role.WEIGHT)
    made: tuple[QuantizedArray, jax.Array | None] = jax.vmap(cast)(w.sink, arrays.seeds, scales)
    return made


def _gather_plane(config: Config, wq: QuantizedArray, usage: Usage) -> QuantizedArray:
    """Gather one plane of all weights from local codes."""
    check_weight_format("ragged_dot", "w", wq.format, config.recipe)
    wq = keep_planes(wq, usage)
    return jax.vmap(config.sharding.gather)(wq) if config.sharding.gather_axes else wq
