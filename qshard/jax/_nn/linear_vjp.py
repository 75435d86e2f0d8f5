"""The forward and the backward pass of `linear`: what is cast, gathered, multiplied and kept, and in which order."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from qshard import layout
from qshard._core.operands import OperandSpec
from qshard._core.quantize_steps import Plane, makes_planes_apart
from qshard.formats import Usage
from qshard.jax import policies
from qshard.jax._delayed_scaling import LinearState, TensorState, observe_all
from qshard.jax._gemm.gemm import apply_scale, gemm, row_product, stored_for
from qshard.jax._nn.linear_parallel import OfDw, TensorParallelAxis
from qshard.jax._ops.mesh import Spec, may_be_sharded
from qshard.jax._ops.scheduling import barrier, cse, name_residual
from qshard.jax._ops.second_derivatives import rules_of_product
from qshard.jax._quantized.array import QuantizedArray
from qshard.jax._quantized.gather import CodedWeight, Shards, WeightSharding
from qshard.jax._quantized.quantize import WeightScales, quantize_shard
from qshard.jax._sharding.shard_spec import ShardSpec, may_shard_rows, whole_along
from qshard.jax._sharding.vmap_rows import vmap_as_rows
from qshard.layout import Shape, multiplies_codes, source
from qshard.recipes import Recipe, Role, check_weight_format

_NAMES = {Role.WEIGHT: "w", Role.ACTIVATION: "x", Role.GRADIENT: "the gradient of y"}


@dataclass(frozen=True, kw_only=True)
class Config:
    """What is static in a call of `linear`.

    Attributes:
      op: who is called, for errors.
      sharding: of the weight; empty for one that brings its own `Shards`.
      shards: `sharding`, or the weight's own.
      gathers: whether the local codes must be gathered.
      learns: whether it has a gradient.
      w_dtype: of the gradient of w.
      grad_dtype: in which it is made and reduced.
      x_type, w_type: of the gradients, on Explicit meshes.
      axes: in `shard_map`, the mesh axes along which leading axes of x are cut.
      rows: which of them cut which axis; None: all cut the first.
      parallel: what a mesh axis does that cuts rows of x or of y, and w; it is in `axes` too.
    """

    op: str
    recipe: Recipe
    sharding: WeightSharding
    shards: Shards
    gathers: bool
    learns: bool
    w_dtype: Any
    w_type: NamedSharding | None
    x_type: NamedSharding | None = None
    axes: tuple[str, ...] = ()
    grad_dtype: str | None = None
    rows: PartitionSpec | None = None
    reshard_after_forward: bool = True
    out_sharding: Spec = None
    parallel: TensorParallelAxis | None = None

    def cut_of(self, x: jax.Array, role: Role) -> ShardSpec:
        """How x or dy is cut. Blocks are those of a shard: what it multiplies is its own."""
        if self.parallel is not None:
            return self.parallel.cut_of(x, role, self.axes)
        return ShardSpec.of(x, self.axes, self.rows, own_blocks=True)

    @property
    def sums_alike(self) -> bool:
        """Whether devices whose gradients of w are summed surely have the same scales of x and of the gradient of y."""
        own = self.sharding
        return self.shards is own and (not own.spec.local or set(own.gather_axes) <= set(self.axes))

    def stored(self, usage: Usage) -> Usage:
        """The plane of w to quantize, gather and keep for one usage.

        Where both planes hold the same numbers that is the rowwise one, whose shards arrive in order where w is cut by
        rows. Those of a transposed plane would arrive as stripes, to be moved once more; a transpose of the gathered
        codes reads and writes each byte once. It is made in backward for `[N, K]`, and in forward for `[K, N]`.
        """
        return source(self.recipe.weight, usage)


class NonDifferentiable(NamedTuple):
    scales: WeightScales | None
    seed: jax.Array | None
    state: LinearState | None
    weight_amax: jax.Array | None = None  # Of a primary weight, in delayed scaling.


class Residuals(NamedTuple):
    """What backward needs of forward.

    Attributes:
      x, w: planes that its GEMMs read, or what the codes of the whole w are gathered from.
      scales: of the whole w, without codes: small, where squares have them, so they are not gathered again.
      amaxes: of x and w, in delayed scaling, for the cotangent of the state.
    """

    x: QuantizedArray
    w: Any
    scales: Plane | None
    given: NonDifferentiable
    amaxes: tuple[jax.Array | None, jax.Array | None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(config: Config, x: jax.Array, w: CodedWeight, given: NonDifferentiable) -> jax.Array:
    return _forward(config, x, w, given, Usage(0), Usage(0))[0]


def _forward(
    config: Config, x: jax.Array, w: CodedWeight, given: NonDifferentiable, x_kept: Usage, w_kept: Usage
) -> tuple[jax.Array, Residuals]:
    fmt, whole_x = config.recipe.activation, config.cut_of(x, Role.ACTIVATION).whole(x.shape)
    if whole_x and whole_x[-1] % layout.whole_units(fmt, Usage.ROWWISE)[1]:
        # Raised before w is cast: who gives both wrongly hears of x, as in PyTorch.
        layout.plane(fmt, whole_x, Usage.ROWWISE, op=config.op, name="x")
    read = config.stored(config.sharding.contracted)
    wq, w_amax = _codes_of(config, w, given, read | w_kept)
    wq = _name_residuals(wq, w_kept, policies.W_CODES)
    whole = _name_residuals(_whole(config, wq, read), read, None)
    if not x.shape or len(whole.axes) != 2 or x.shape[-1] != whole.shape[config.sharding.layout.index("K")]:
        axes = ", ".join(config.sharding.layout)
        told = ", and the sharding of w as weight_spec" if config.gathers else ""
        raise ValueError(
            f"linear: w {whole.shape} does not fit x {x.shape}; pass w as [{axes}] and x as [*lead, K]{told}"
        )
    if config.parallel is not None:
        n = whole.shape[config.sharding.layout.index("N")]
        config.parallel.check_columns(config.op, "the gradient of y", n, Role.GRADIENT, config.recipe)
    there = x
    if config.gathers and _reduces(config, x):
        whole, there = barrier(whole, x)  # So that the gather of w comes before the all-reduce of the amax.
    made = _quantize_role(config, there, given, Role.ACTIVATION, Usage.ROWWISE | x_kept)
    seed = given.seed if config.recipe.activation.stochastic else None
    state = None if given.state is None else given.state.activation.scale
    how = (config.recipe, x_kept, config.axes, config.rows, config.out_sharding, config.parallel)
    xq, x_amax = cse(made, of=(x, seed, state), how=how)
    xq = _name_residuals(xq, x_kept, policies.X_CODES)
    x_amax, w_amax = (None if amax is None else name_residual(amax, policies.SCALES) for amax in (x_amax, w_amax))
    kept_w, scales = wq, None  # To keep the whole weights of all layers until backward would undo FSDP.
    if w_kept and config.gathers and not config.reshard_after_forward:
        kept_w = whole if w_kept is read else _whole(config, wq, w_kept)
    elif w_kept is read and config.gathers:
        scales = whole.plane(read)._replace(data=None)
    y, scale, _ = _row_product(config, xq, Role.ACTIVATION, whole, x.shape[:-1])
    kept_x = _only(xq, x_kept)
    if x_kept and x_kept is not Usage.ROWWISE and makes_planes_apart(config.recipe.activation):
        y, kept_x = barrier(y, kept_x)  # Else XLA keeps x, and makes the plane for backward there.
    y = apply_scale(y, scale, x.dtype)
    kept = Residuals(kept_x, _only(kept_w, w_kept), scales, given._replace(scales=None), (x_amax, w_amax))
    return checkpoint_name(y, policies.PRODUCTS), kept


def _product_fwd(config: Config, x: jax.Array, w: CodedWeight, given: NonDifferentiable) -> tuple[jax.Array, Residuals]:
    x_kept = stored_for(config.recipe.activation, config.recipe.gradient, Usage.COLUMNWISE)
    return _forward(
        config, x, w, given, x_kept if config.learns else Usage(0), config.stored(config.sharding.contracted_back)
    )


def _product_bwd(config: Config, kept: Residuals, dy: jax.Array) -> tuple[jax.Array, CodedWeight, NonDifferentiable]:
    recipe, xq, wq = config.recipe, kept.x, kept.w
    columns = Usage.COLUMNWISE
    read = stored_for(recipe.gradient, recipe.weight, Usage.ROWWISE)
    if config.learns:
        read |= stored_for(recipe.gradient, recipe.activation, columns)
    dyq, dy_amax = _quantize_role(config, dy, kept.given, Role.GRADIENT, read)
    if config.gathers and config.reshard_after_forward:
        # Not before dy: XLA would see one gather where two are written, and keep its result from forward to backward.
        wq, dyq = barrier(wq, dyq)
        stored = config.stored(config.sharding.contracted_back)
        wq = _whole(config, wq, stored)
        if kept.scales is not None:
            wq = wq.with_planes({stored: kept.scales._replace(data=wq.plane(stored).data)})
    if config.learns and (config.parallel or not multiplies_codes(recipe.gradient, recipe.activation)):
        dyq, xq = barrier(dyq, xq)  # Else XLA may dequantize, or gather, what all layers keep, long before it is due.
    if config.learns and config.sharding.contracts_whole_k:
        xq = _whole_k(config, xq)
    dx, dx_scale, (dyq, xq) = _row_product(config, dyq, Role.GRADIENT, wq, dy.shape[:-1], (dyq, xq))
    dw: jax.Array | None = None
    if config.learns:
        pair = (dyq, xq) if config.sharding.layout == "NK" else (xq, dyq)
        dtype = config.grad_dtype or wq.dtype
        options: dict[str, Any] = {"precise": True, "out_sharding": config.w_type, "by_rows": config.sharding.by_rows}
        made, scale = gemm(pair[0], columns, pair[1], columns, dtype, **options)
        if not config.sums_alike:
            made, scale = apply_scale(made, scale, dtype), None
        made = config.shards.scatter(made)
        if config.gathers:  # So that dw is made here, while w is gathered, and scattered while dx is made.
            made, dx = barrier(made, dx)
        dw = apply_scale(made, scale, config.w_dtype)
    dx = apply_scale(dx, dx_scale, dy.dtype)
    x_amax, w_amax = kept.amaxes
    observed = None
    if kept.given.state is not None:
        observed = observe_all(kept.given.state, w_amax, x_amax, dy_amax, config.axes)
    return dx, CodedWeight(None, dw, config.shards), NonDifferentiable(None, None, observed)


product.defvjp(*rules_of_product(None, _product_fwd, _product_bwd))
folding_product = vmap_as_rows(product, *rules_of_product(None, _product_fwd, _product_bwd))


def _row_product(
    config: Config, q: QuantizedArray, role: Role, w: QuantizedArray, lead: Shape, of_dw: Any = None
) -> tuple[jax.Array, jax.Array | None, Any]:
    """The product of x or dy, whose codes are `q`, and the whole w; and the operands of dw, of all rows."""
    backward = role is Role.GRADIENT
    options: dict[str, Any] = {
        "precise": backward,
        "out_sharding": config.x_type if backward else config.out_sharding,
        "by_rows": config.sharding.by_rows,
    }

    def multiply(q: QuantizedArray, lead: Shape) -> tuple[jax.Array, jax.Array | None]:
        of_w = config.sharding.contracted_back if backward else config.sharding.contracted
        return row_product(q, w, of_w, lead, config.sharding.columns, **options)

    if config.parallel is None:
        return *multiply(q, lead), of_dw
    gather = functools.partial(_all_rows, config, lead) if of_dw is not None and config.learns else None
    return config.parallel.row_products(q, lead, role, multiply, OfDw(of_dw, gather))


def _all_rows(config: Config, lead: Shape, operands: Any) -> Any:
    """Codes of dy and x, of this leading shape where a device has all rows, as matrices of all rows: what dw reads."""
    gradient, activation = config.recipe.gradient, config.recipe.activation
    stored = (
        stored_for(gradient, activation, Usage.COLUMNWISE),
        stored_for(activation, gradient, Usage.COLUMNWISE),
    )
    assert config.parallel is not None
    return tuple(
        config.parallel.all_rows(q, usage, lead, role)
        for q, usage, role in zip(operands, stored, (Role.GRADIENT, Role.ACTIVATION), strict=True)
    )


def _whole_k(config: Config, q: QuantizedArray) -> QuantizedArray:
    """The codes of x, whole along K: XLA would gather the values that they stand for."""
    planes = {}
    for usage, plane in q.planes.items():
        axis = 0 if layout.is_transposed(q.format, usage) else -1
        data, scale_inv = (whole_along(a, axis, config.sharding.spec.mesh) if a.ndim else a for a in plane[:2])
        planes[usage] = plane._replace(data=data, scale_inv=scale_inv)
    return q.with_planes(planes)


def _reduces(config: Config, x: jax.Array) -> bool:
    """Whether devices that have shards of x reduce an amax for it."""
    fmt = config.recipe.activation
    return (fmt.tensor_scaled or fmt.row_scaled) and (bool(config.axes) or may_be_sharded(x))


def _name_residuals(codes: Any, kept: Usage, name: str | None) -> Any:
    """Scales, and with a name codes, as policies know them. What is no tensor yet stays as it is."""
    if not isinstance(codes, QuantizedArray):
        return codes
    planes = {}
    for usage, plane in codes.planes.items():
        scales = [None if s is None else name_residual(s, policies.SCALES) for s in plane[1:]]
        data = plane.data if name is None else name_residual(plane.data, name if usage in kept else policies.FORWARD)
        planes[usage] = Plane(data, *scales)
    return codes.with_planes(planes)


def _only(codes: Any, usage: Usage) -> Any:
    """The planes of a tensor that are in `usage`. What is no tensor yet stays as it is."""
    if not isinstance(codes, QuantizedArray):
        return codes
    return codes.with_planes({each: plane for each, plane in codes.planes.items() if each in usage})


def _quantize_role(
    config: Config, x: jax.Array, given: NonDifferentiable, role: Role, usage: Usage
) -> tuple[QuantizedArray, jax.Array | None]:
    """The codes of x, w or dy, and, of delayed scaling, the amax of it.

    Those of a matrix with more rows, where the recipe adds some and no mesh may cut them.
    """
    weight, name = role is Role.WEIGHT, _NAMES[role]
    scales = given.scales if weight else None
    if given.state is not None:
        state: TensorState = getattr(given.state, role.value)
        scales = WeightScales(state.scale)
    cut = config.sharding.spec if weight else config.cut_of(x, role)
    operand = OperandSpec.of(config.recipe, role, usage, math.prod(x.shape[:-1]), op=config.op, name=name)
    if operand.added_rows and may_shard_rows(x, config.out_sharding):
        operand = operand._replace(added_rows=0)
    columns = None if weight or cut.local else config.sharding.count("K" if role is Role.ACTIVATION else "N")
    turned = weight and config.sharding.layout == "KN"
    return quantize_shard(x, operand, cut, scales, given.seed, apart=not weight, turned=turned, columns=columns)


def _codes_of(config: Config, w: CodedWeight, given: NonDifferentiable, usage: Usage) -> tuple[Any, jax.Array | None]:
    if w.codes is not None or w.sink is None:
        return w.codes, given.weight_amax
    return _quantize_role(config, w.sink, given, Role.WEIGHT, usage)


def whole_weight(config: Config, w: CodedWeight, given: NonDifferentiable) -> QuantizedArray:
    """The plane that the forward pass gathers."""
    usage = config.stored(config.sharding.contracted)
    return _whole(config, _codes_of(config, w, given, usage)[0], usage)


def _whole(config: Config, codes: Any, usage: Usage) -> QuantizedArray:
    """One plane of the whole w, from the codes that one device has."""
    whole: QuantizedArray = config.shards.gather(_only(codes, usage)) if config.gathers else codes
    check_weight_format(config.op, "w", whole.format, config.recipe)
    return whole
