"""The forward and backward passes of `linear`: casts, gathers, GEMMs and residuals, in the order that XLA must keep.

The order hides collectives behind GEMMs; `scheduling.py` shows it. The products of a recipe may have operands of their
own (`Config.of_product`). Two products share an operand if they have one recipe, and the weight if they have one format
for it; the others are made once for each.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from qshard import layout
from qshard._core.quantize_steps import Plane, makes_planes_apart
from qshard.formats import Usage
from qshard.jax import policies
from qshard.jax._delayed_scaling import observe_all
from qshard.jax._gemm.gemm import apply_scale, gemm, row_product, stored_for
from qshard.jax._nn.operands import (
    CallArrays,
    Config,
    gather_plane,
    keep_planes,
    local_codes,
    name_residuals,
    quantize_role,
    whole_k,
)
from qshard.jax._ops.mesh import may_be_sharded
from qshard.jax._ops.scheduling import barrier, cse, name_residual
from qshard.jax._ops.second_derivatives import rules_of_product
from qshard.jax._quantized.array import QuantizedArray
from qshard.jax._quantized.gather import CodedWeight
from qshard.jax._sharding.vmap_rows import vmap_as_rows
from qshard.layout import Shape
from qshard.recipes import Product, Role


class Residuals(NamedTuple):
    """The values saved for backward.

    Attributes:
      x: the planes of x that dw reads, or its values.
      w: the plane of w that dx reads, or the local codes to gather it from; or the same of values.
      scales: the scales of the gathered w, so that backward gathers only codes. 2-D blocks have few scales.
      amaxes: of x and w, for the cotangent of the state under delayed scaling.
    """

    x: Any
    w: Any
    scales: Plane | None
    arrays: CallArrays
    amaxes: tuple[jax.Array | None, jax.Array | None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(config: Config, x: jax.Array, w: CodedWeight, arrays: CallArrays) -> jax.Array:
    """The differentiable product that `linear` calls, once arguments are checked."""
    return _forward(config, x, w, arrays, saves=False)[0]


def _forward(
    config: Config, x: jax.Array, w: CodedWeight, arrays: CallArrays, *, saves: bool = True
) -> tuple[jax.Array, Residuals]:
    none = Usage(0)
    forward, dgrad, wgrad = map(config.of_product, Product)
    x_saved = wgrad.stored_for_dw(Role.ACTIVATION) if saves and config.learns else none
    w_saved = dgrad.stored(config.sharding.contracted_back) if saves else none
    shares_x, shares_w = forward == wgrad, forward == dgrad or config.recipe.has_one_weight
    whole_x = config.shard_spec(x, Role.ACTIVATION).whole(x.shape)
    if not forward.values and whole_x:
        fmt = forward.recipe.activation
        if whole_x[-1] % layout.whole_units(fmt, Usage.ROWWISE)[1]:
            # Check x before w is cast: if both are wrong, the error names x, as in PyTorch.
            layout.plane(fmt, whole_x, Usage.ROWWISE, op=config.op, name="x")
    read = forward.stored(config.sharding.contracted)
    wq, w_amax = local_codes(forward, w, arrays, read | (w_saved if shares_w else none))
    wq = name_residuals(forward, wq, w_saved if shares_w else none, policies.W_CODES)
    whole = name_residuals(forward, gather_plane(forward, wq, read), read, None)
    if not x.shape or len(whole.shape) != 2 or x.shape[-1] != whole.shape[config.sharding.layout.index("K")]:
        axes = ", ".join(config.sharding.layout)
        told = ", and the sharding of w as weight_spec" if config.gathers else ""
        raise ValueError(
            f"linear: w {whole.shape} does not fit x {x.shape}; pass w as [{axes}] and x as [*lead, K]{told}"
        )
    if config.parallel is not None:
        n = whole.shape[config.sharding.layout.index("N")]
        config.parallel.check_columns(config.op, "the gradient of y", n, Role.GRADIENT, config.recipe)
    there = x
    if config.gathers and _reduces_amax(forward, x):
        whole, there = barrier(whole, x)  # Schedules the gather of w before the all-reduce of the amax.
    xq, x_amax = _quantized_x(forward, x, there, arrays, Usage.ROWWISE, x_saved if shares_x else none)
    w_amax = None if w_amax is None else name_residual(w_amax, policies.SCALES)
    saved_w, scales = wq, None  # The local codes: saving the gathered weights of all layers would undo FSDP.
    if w_saved and not shares_w:
        saved_w = name_residuals(dgrad, local_codes(dgrad, w, arrays, w_saved)[0], w_saved, policies.W_CODES)
    if w_saved and config.gathers and not config.reshard_after_forward:
        saved_w = whole if shares_w and w_saved is read else gather_plane(dgrad, saved_w, w_saved)
    elif shares_w and w_saved is read and config.gathers and not dgrad.values:
        scales = whole.plane(read)._replace(data=None)
    y, scale, _ = row_product_of_w(forward, xq, Role.ACTIVATION, whole, x.shape[:-1], x.dtype)
    saved_x = xq if shares_x or not x_saved else _quantized_x(wgrad, x, x, arrays, none, x_saved)[0]
    saved_x = keep_planes(saved_x, x_saved)
    if x_saved and x_saved is not Usage.ROWWISE and _casts_apart(forward, wgrad):
        y, saved_x = barrier(y, saved_x)  # Without it XLA saves x, and computes this plane in backward.
    y = apply_scale(y, scale, x.dtype)
    saved = Residuals(
        saved_x if x_saved else None,
        keep_planes(saved_w, w_saved) if w_saved else None,
        scales,
        arrays._replace(scales=None),
        (x_amax, w_amax),
    )
    return checkpoint_name(y, policies.PRODUCTS), saved


def _quantized_x(
    config: Config, x: jax.Array, there: jax.Array, arrays: CallArrays, read: Usage, saved: Usage
) -> tuple[Any, jax.Array | None]:
    """Quantize x, once for all calls that do it alike, and name its residuals. `there` is x, maybe behind a barrier."""
    made = quantize_role(config, there, arrays, Role.ACTIVATION, read | saved)
    seed = arrays.seed if config.recipe.activation.stochastic else None
    state = None if arrays.state is None else arrays.state.activation.scale
    how = (config.recipe, config.values, saved, config.axes, config.rows, config.out_sharding, config.parallel)
    xq, amax = cse(made, of=(x, seed, state), how=(read, *how))
    xq = name_residuals(config, xq, saved, policies.X_CODES)
    return xq, None if amax is None else name_residual(amax, policies.SCALES)


def _casts_apart(forward: Config, wgrad: Config) -> bool:
    """True if the planes of x for these two products come from casts of their own."""
    return forward != wgrad or (not wgrad.values and makes_planes_apart(wgrad.recipe.activation))


def _product_bwd(config: Config, saved: Residuals, dy: jax.Array) -> tuple[jax.Array, CodedWeight, CallArrays]:
    dgrad, wgrad = config.of_product(Product.DGRAD), config.of_product(Product.WGRAD)
    x, w, columns = saved.x, saved.w, Usage.COLUMNWISE
    dys, dy_amax = _quantized_gradient(config, dgrad, wgrad, dy, saved.arrays)
    if config.gathers and config.reshard_after_forward:
        # Wait for dy: otherwise XLA merges the two gathers of w, and keeps the result from forward to backward.
        w, dys = barrier(w, dys)
        stored = dgrad.stored(config.sharding.contracted_back)
        w = gather_plane(dgrad, w, stored)
        if saved.scales is not None:
            w = w.with_planes({stored: saved.scales._replace(data=w.plane(stored).data)})
    if config.learns and (config.parallel or not wgrad.multiplies_codes_for_dw):
        dys, x = barrier(dys, x)  # Otherwise XLA may dequantize or gather the saved x of all layers too early.
    if config.learns and config.sharding.contracts_whole_k:
        x = whole_k(config, x)
    dx, dx_scale, (dy_column, x) = row_product_of_w(
        dgrad, dys[0], Role.GRADIENT, w, dy.shape[:-1], dy.dtype, (dys[-1], x)
    )
    dw: jax.Array | None = None
    if config.learns:
        pair = (dy_column, x) if config.sharding.layout == "NK" else (x, dy_column)
        dtype = config.grad_dtype or (w.dtype if isinstance(w, QuantizedArray) else config.w_dtype)
        options: dict[str, Any] = {"fast": False, "out_sharding": config.w_type, "by_rows": config.sharding.by_rows}
        made, scale = gemm(pair[0], columns, pair[1], columns, dtype, **options)
        if not config.shares_scales:
            made, scale = apply_scale(made, scale, dtype), None
        made = config.shards.scatter(made)
        if config.gathers:  # Computes dw while w is gathered, and reduce-scatters it while dx is computed.
            made, dx = barrier(made, dx)
        dw = apply_scale(made, scale, config.w_dtype)
    dx = apply_scale(dx, dx_scale, dy.dtype)
    x_amax, w_amax = saved.amaxes
    observed = None
    if saved.arrays.state is not None:
        observed = observe_all(saved.arrays.state, w_amax, x_amax, dy_amax, config.axes)
    return dx, CodedWeight(None, dw, config.shards), CallArrays(None, None, observed)


def _quantized_gradient(
    config: Config, dgrad: Config, wgrad: Config, dy: jax.Array, arrays: CallArrays
) -> tuple[tuple[Any, ...], jax.Array | None]:
    """Quantize dy for the product for dx, then for dw: one operand if both take the same. Also return its amax."""
    for_dx = Usage.ROWWISE
    if not dgrad.values:
        for_dx = stored_for(dgrad.recipe.gradient, dgrad.recipe.weight, for_dx)
    for_dw = wgrad.stored_for_dw(Role.GRADIENT) if config.learns else Usage(0)
    shared = dgrad == wgrad
    dyq, amax = quantize_role(dgrad, dy, arrays, Role.GRADIENT, for_dx | (for_dw if shared else Usage(0)))
    if shared or not config.learns:
        return (dyq,), amax
    return (dyq, quantize_role(wgrad, dy, arrays, Role.GRADIENT, for_dw)[0]), None


product.defvjp(*rules_of_product(None, _forward, _product_bwd))
folding_product = vmap_as_rows(product, *rules_of_product(None, _forward, _product_bwd))


def row_product_of_w(
    config: Config, q: Any, role: Role, w: Any, lead: Shape, dtype: Any, operands: Any = None
) -> tuple[jax.Array, jax.Array | None, Any]:
    """Multiply x or dy, `[*lead, K]`, by the gathered w. Also gather the operands of dw, under tensor parallelism.

    Returns the product, a scale that is still to be applied (or None), and the operands of dw with all rows.
    """
    backward = role is Role.GRADIENT
    options: dict[str, Any] = {
        "fast": not backward,
        "out_sharding": config.x_type if backward else config.out_sharding,
        "by_rows": config.sharding.by_rows,
    }

    def multiply(q: QuantizedArray, lead: Shape) -> tuple[jax.Array, jax.Array | None]:
        of_w = config.sharding.contracted_back if backward else config.sharding.contracted
        if config.values:
            return gemm(q, Usage.ROWWISE, w, of_w, dtype, **options)
        return row_product(q, w, of_w, lead, config.sharding.columns, **options)

    if config.parallel is None:
        return *multiply(q, lead), operands
    return config.parallel.row_products(q, lead, role, multiply, operands, functools.partial(_all_rows, config, lead))


def _all_rows(config: Config, lead: Shape, operands: Any) -> Any:
    """Gather the codes of dy and x to matrices of all rows, if dw reads them. `lead`: the leading axes of dy."""
    if operands is None or not config.learns:
        return operands
    assert config.parallel is not None
    return tuple(
        config.parallel.all_rows(q, config.stored_for_dw(role), lead, role)
        for q, role in zip(operands, (Role.GRADIENT, Role.ACTIVATION), strict=True)
    )


def _reduces_amax(config: Config, x: jax.Array) -> bool:
    """True if the cast of x needs an all-reduce of its amax."""
    fmt = config.recipe.activation
    return not config.values and (fmt.tensor_scaled or fmt.row_scaled) and (bool(config.axes) or may_be_sharded(x))
