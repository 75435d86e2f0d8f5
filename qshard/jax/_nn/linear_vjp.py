"""The forward and backward passes of `linear`: casts, gathers, GEMMs and residuals, in the order that XLA must keep.

The order hides collectives behind GEMMs; `scheduling.py` shows it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from qshard import layout
from qshard._core.operands import OperandSpec, check_state, check_weight_format
from qshard._core.quantize_steps import Plane, makes_planes_apart
from qshard._core.validation import seed_missing
from qshard.formats import Usage
from qshard.jax import policies
from qshard.jax._delayed_scaling import LinearState, TensorState, observe_all
from qshard.jax._gemm.gemm import apply_scale, gemm, row_product, stored_for
from qshard.jax._nn.linear_parallel import TensorParallelAxis
from qshard.jax._ops.mesh import Spec, explicit_sharding, may_be_sharded, mesh_of
from qshard.jax._ops.scheduling import barrier, cse, name_residual
from qshard.jax._ops.second_derivatives import rules_of_product
from qshard.jax._ops.validation import check_dtype, check_spec_fits
from qshard.jax._quantized.array import QuantizedArray
from qshard.jax._quantized.gather import CodedWeight, Shards, WeightLayout, WeightSharding, spec_of_codes
from qshard.jax._quantized.quantize import WeightScales, quantize_shard
from qshard.jax._sharding.shard_spec import ShardSpec, may_shard_rows, whole_along
from qshard.jax._sharding.vmap_rows import vmap_as_rows
from qshard.layout import Shape, multiplies_codes, source
from qshard.recipes import Recipe, Role

_NAMES = {Role.WEIGHT: "w", Role.ACTIVATION: "x", Role.GRADIENT: "the gradient of y"}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Static options of a call of `linear`.

    Attributes:
      sharding: the sharding of the weight; empty for a weight with its own `Shards`.
      shards: how to gather the weight and scatter its gradient: `sharding`, or the weight's own `Shards`.
      gathers: whether local codes must be gathered.
      learns: whether the weight has a gradient, of dtype `w_dtype`.
      w_type, x_type: shardings of the gradients, on Explicit meshes.
      axes: in `shard_map`, the mesh axes that shard leading axes of x.
      grad_dtype: dtype to compute and reduce the gradient of w in; None: the dtype of w.
      rows: which of `axes` shards which axis; None: all shard the first.
      parallel: the mesh axis of tensor parallelism, which is in `axes` too.
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

    @classmethod
    def of(
        cls,
        op: str,
        w: Any,
        given: NonDifferentiable,
        recipe: Recipe,
        weight_spec: Spec,
        gather_axes: tuple[str, ...],
        layout: WeightLayout,
        **options: Any,
    ) -> tuple[Config, CodedWeight]:
        """Find how the weight is sharded, and build the static options of the call.

        An array becomes a `CodedWeight` without codes, which is its own gradient sink.
        """
        _check_given(op, recipe, given)
        names: dict[str, Any] = {"op": op, "name": "gather_axis", "spec_name": "weight_spec"}
        w_type, gathers, spec = None, bool(gather_axes), ShardSpec()
        if isinstance(w, CodedWeight) and w.shards is not None:
            sharding = WeightSharding(layout=layout)
            weight, gathers = w, not isinstance(w.codes, QuantizedArray)
        elif isinstance(w, CodedWeight | QuantizedArray):
            codes, sink = (w.codes, w.sink) if isinstance(w, CodedWeight) else (w, None)
            if gathers:
                spec = spec_of_codes(codes, gather_axes, weight_spec, **names)
            elif sink is not None:
                spec = ShardSpec.along(sink, (), weight_spec, **names)
            sharding = WeightSharding(spec, gather_axes, layout)
            weight = CodedWeight(codes, sink, sharding)
            w_type = None if sink is None else explicit_sharding(sink)
        else:
            if jnp.ndim(w) != 2:
                raise ValueError(f"{op}: w {jnp.shape(w)} does not have two axes; pass w as [N, K]")
            check_dtype(op, "w", w)
            check_spec_fits(op, "weight_spec", weight_spec, mesh_of(w, weight_spec), w.ndim)
            sharding = WeightSharding(ShardSpec.along(w, gather_axes, weight_spec, **names), gather_axes, layout)
            weight, w_type = CodedWeight(None, w, sharding), explicit_sharding(w)
        config = cls(
            op=op,
            recipe=recipe,
            sharding=sharding,
            shards=weight.shards,
            gathers=gathers,
            learns=weight.sink is not None,
            w_dtype=None if weight.sink is None else weight.sink.dtype,
            w_type=w_type,
            **options,
        )
        return config, weight

    def shard_spec(self, x: jax.Array, role: Role) -> ShardSpec:
        """The sharding of x or dy. Blocks end at shard boundaries: a device multiplies only its own shard."""
        if self.parallel is not None:
            return self.parallel.shard_spec(x, role, self.axes)
        return ShardSpec.of(x, self.axes, self.rows, own_blocks=True)

    @property
    def shares_scales(self) -> bool:
        """True if devices that sum gradients of w surely share the scales of x and dy, so that sums can be scaled."""
        own = self.sharding
        return self.shards is own and (not own.spec.local or set(own.gather_axes) <= set(self.axes))

    def stored(self, usage: Usage) -> Usage:
        """The plane of w to quantize, gather and save for a GEMM that needs plane `usage`.

        If both planes hold the same numbers, this is the rowwise one. A weight sharded by rows is gathered in order
        then; shards of a transposed plane would arrive as stripes and need another pass to reorder. Transposing the
        gathered codes instead reads and writes each byte once: in backward for `[N, K]`, in forward for `[K, N]`.
        """
        return source(self.recipe.weight, usage)


class NonDifferentiable(NamedTuple):
    """Arguments of `linear` without a gradient, except for `state`, which gets a cotangent.

    `scales` are the scales of the weight, if the caller computed them, and `weight_amax` the amax of a primary weight,
    under delayed scaling.
    """

    scales: WeightScales | None
    seed: jax.Array | None
    state: LinearState | None
    weight_amax: jax.Array | None = None


def _check_given(op: str, recipe: Recipe, given: NonDifferentiable) -> None:
    """Check that seed, scales and state are those that the recipe needs. No operand is read."""
    if given.seed is None and recipe.stochastic:
        raise ValueError(f"{seed_missing(op, type(recipe).__name__)}, such as jax.random.fold_in(key, layer)")
    advice = "the state of this layer from init_delayed, without weight_scales"
    fits = given.state is None or given.scales is None
    check_state(op, "state", "given" if given.state else None, recipe, advice, fits=fits)
    for tensor in (given.state.weight, given.state.activation, given.state.gradient) if given.state else ():
        shapes = {"scale": tensor.scale.shape, "amax_history": tensor.amax_history.shape}
        if shapes != recipe.state_shapes:
            raise ValueError(
                f"{op}: state ({shapes}) does not have the shapes {recipe.state_shapes}; pass the state of one layer"
            )


class Residuals(NamedTuple):
    """The values saved for backward.

    Attributes:
      x: the planes of x that dw reads.
      w: the plane of w that dx reads, or the local codes to gather it from.
      scales: the scales of the gathered w, so that backward gathers only codes. 2-D blocks have few scales.
      amaxes: of x and w, for the cotangent of the state under delayed scaling.
    """

    x: QuantizedArray
    w: Any
    scales: Plane | None
    given: NonDifferentiable
    amaxes: tuple[jax.Array | None, jax.Array | None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(config: Config, x: jax.Array, w: CodedWeight, given: NonDifferentiable) -> jax.Array:
    """The differentiable product that `linear` calls, once arguments are checked."""
    return _forward(config, x, w, given, Usage(0), Usage(0))[0]


def _forward(
    config: Config, x: jax.Array, w: CodedWeight, given: NonDifferentiable, x_saved: Usage, w_saved: Usage
) -> tuple[jax.Array, Residuals]:
    fmt, whole_x = config.recipe.activation, config.shard_spec(x, Role.ACTIVATION).whole(x.shape)
    if whole_x and whole_x[-1] % layout.whole_units(fmt, Usage.ROWWISE)[1]:
        # Check x before w is cast: if both are wrong, the error names x, as in PyTorch.
        layout.plane(fmt, whole_x, Usage.ROWWISE, op=config.op, name="x")
    read = config.stored(config.sharding.contracted)
    wq, w_amax = local_codes(config, w, given, read | w_saved)
    wq = _name_residuals(wq, w_saved, policies.W_CODES)
    whole = _name_residuals(gather_plane(config, wq, read), read, None)
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
    if config.gathers and _reduces_amax(config, x):
        whole, there = barrier(whole, x)  # Schedules the gather of w before the all-reduce of the amax.
    made = quantize_role(config, there, given, Role.ACTIVATION, Usage.ROWWISE | x_saved)
    seed = given.seed if config.recipe.activation.stochastic else None
    state = None if given.state is None else given.state.activation.scale
    how = (config.recipe, x_saved, config.axes, config.rows, config.out_sharding, config.parallel)
    xq, x_amax = cse(made, of=(x, seed, state), how=how)
    xq = _name_residuals(xq, x_saved, policies.X_CODES)
    x_amax, w_amax = (None if amax is None else name_residual(amax, policies.SCALES) for amax in (x_amax, w_amax))
    saved_w, scales = wq, None  # The local codes: saving the gathered weights of all layers would undo FSDP.
    if w_saved and config.gathers and not config.reshard_after_forward:
        saved_w = whole if w_saved is read else gather_plane(config, wq, w_saved)
    elif w_saved is read and config.gathers:
        scales = whole.plane(read)._replace(data=None)
    y, scale, _ = row_product_of_w(config, xq, Role.ACTIVATION, whole, x.shape[:-1])
    saved_x = keep_planes(xq, x_saved)
    if x_saved and x_saved is not Usage.ROWWISE and makes_planes_apart(config.recipe.activation):
        y, saved_x = barrier(y, saved_x)  # Without it XLA saves x, and computes this plane in backward.
    y = apply_scale(y, scale, x.dtype)
    saved = Residuals(saved_x, keep_planes(saved_w, w_saved), scales, given._replace(scales=None), (x_amax, w_amax))
    return checkpoint_name(y, policies.PRODUCTS), saved


def _product_fwd(config: Config, x: jax.Array, w: CodedWeight, given: NonDifferentiable) -> tuple[jax.Array, Residuals]:
    x_saved = stored_for(config.recipe.activation, config.recipe.gradient, Usage.COLUMNWISE)
    return _forward(
        config, x, w, given, x_saved if config.learns else Usage(0), config.stored(config.sharding.contracted_back)
    )


def _product_bwd(config: Config, saved: Residuals, dy: jax.Array) -> tuple[jax.Array, CodedWeight, NonDifferentiable]:
    recipe, xq, wq = config.recipe, saved.x, saved.w
    columns = Usage.COLUMNWISE
    read = stored_for(recipe.gradient, recipe.weight, Usage.ROWWISE)
    if config.learns:
        read |= stored_for(recipe.gradient, recipe.activation, columns)
    dyq, dy_amax = quantize_role(config, dy, saved.given, Role.GRADIENT, read)
    if config.gathers and config.reshard_after_forward:
        # Wait for dy: otherwise XLA merges the two gathers of w, and keeps the result from forward to backward.
        wq, dyq = barrier(wq, dyq)
        stored = config.stored(config.sharding.contracted_back)
        wq = gather_plane(config, wq, stored)
        if saved.scales is not None:
            wq = wq.with_planes({stored: saved.scales._replace(data=wq.plane(stored).data)})
    if config.learns and (config.parallel or not multiplies_codes(recipe.gradient, recipe.activation)):
        dyq, xq = barrier(dyq, xq)  # Otherwise XLA may dequantize or gather the saved x of all layers too early.
    if config.learns and config.sharding.contracts_whole_k:
        xq = whole_k(config, xq)
    dx, dx_scale, (dyq, xq) = row_product_of_w(config, dyq, Role.GRADIENT, wq, dy.shape[:-1], (dyq, xq))
    dw: jax.Array | None = None
    if config.learns:
        pair = (dyq, xq) if config.sharding.layout == "NK" else (xq, dyq)
        dtype = config.grad_dtype or wq.dtype
        options: dict[str, Any] = {"precise": True, "out_sharding": config.w_type, "by_rows": config.sharding.by_rows}
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
    if saved.given.state is not None:
        observed = observe_all(saved.given.state, w_amax, x_amax, dy_amax, config.axes)
    return dx, CodedWeight(None, dw, config.shards), NonDifferentiable(None, None, observed)


product.defvjp(*rules_of_product(None, _product_fwd, _product_bwd))
folding_product = vmap_as_rows(product, *rules_of_product(None, _product_fwd, _product_bwd))


def row_product_of_w(
    config: Config, q: QuantizedArray, role: Role, w: QuantizedArray, lead: Shape, operands: Any = None
) -> tuple[jax.Array, jax.Array | None, Any]:
    """Multiply x or dy, `[*lead, K]`, by the gathered w. Also gather the operands of dw, under tensor parallelism.

    Returns the product, a scale that is still to be applied (or None), and the operands of dw with all rows.
    """
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
        return *multiply(q, lead), operands
    return config.parallel.row_products(q, lead, role, multiply, operands, functools.partial(_all_rows, config, lead))


def _all_rows(config: Config, lead: Shape, operands: Any) -> Any:
    """Gather the codes of dy and x to matrices of all rows, if dw reads them. `lead`: the leading axes of dy."""
    if operands is None or not config.learns:
        return operands
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


def whole_k(config: Config, q: QuantizedArray) -> QuantizedArray:
    """Reshard the codes of x to whole rows of K. XLA would gather the dequantized values."""
    planes = {}
    for usage, plane in q.planes.items():
        axis = 0 if layout.is_transposed(q.format, usage) else -1
        data, scale_inv = (whole_along(a, axis, config.sharding.spec.mesh) if a.ndim else a for a in plane[:2])
        planes[usage] = plane._replace(data=data, scale_inv=scale_inv)
    return q.with_planes(planes)


def _reduces_amax(config: Config, x: jax.Array) -> bool:
    """True if the cast of x needs an all-reduce of its amax."""
    fmt = config.recipe.activation
    return (fmt.tensor_scaled or fmt.row_scaled) and (bool(config.axes) or may_be_sharded(x))


def _name_residuals(codes: Any, saved: Usage, name: str | None) -> Any:
    """Name scales, and codes if `name` is given, for checkpoint policies. Codes in the form of custom `Shards` pass."""
    if not isinstance(codes, QuantizedArray):
        return codes
    planes = {}
    for usage, plane in codes.planes.items():
        scales = [None if s is None else name_residual(s, policies.SCALES) for s in plane[1:]]
        data = plane.data if name is None else name_residual(plane.data, name if usage in saved else policies.FORWARD)
        planes[usage] = Plane(data, *scales)
    return codes.with_planes(planes)


def keep_planes(codes: Any, usage: Usage) -> Any:
    """Drop the planes that are not in `usage`. Codes in the form of custom `Shards` pass."""
    if not isinstance(codes, QuantizedArray):
        return codes
    return codes.with_planes({each: plane for each, plane in codes.planes.items() if each in usage})


def quantize_role(
    config: Config, x: jax.Array, given: NonDifferentiable, role: Role, usage: Usage
) -> tuple[QuantizedArray, jax.Array | None]:
    """Quantize x, w or dy. Also return its amax under delayed scaling.

    The matrix is zero-padded to whole blocks of rows if the recipe needs that and no mesh may shard them.
    """
    weight, name = role is Role.WEIGHT, _NAMES[role]
    scales = given.scales if weight else None
    if given.state is not None:
        state: TensorState = getattr(given.state, role.value)
        scales = WeightScales(state.scale)
    cut = config.sharding.spec if weight else config.shard_spec(x, role)
    operand = OperandSpec.of(config.recipe, role, usage, math.prod(x.shape[:-1]), op=config.op, name=name)
    if operand.added_rows and may_shard_rows(x, config.out_sharding):
        operand = operand._replace(added_rows=0)
    columns = None if weight or cut.local else config.sharding.count("K" if role is Role.ACTIVATION else "N")
    turned = weight and config.sharding.layout == "KN"
    return quantize_shard(x, operand, cut, scales, given.seed, apart=not weight, turned=turned, columns=columns)


def local_codes(config: Config, w: CodedWeight, given: NonDifferentiable, usage: Usage) -> tuple[Any, jax.Array | None]:
    """Return the local codes of the weight, quantized if it is an array, and its amax under delayed scaling."""
    if w.codes is not None or w.sink is None:
        return w.codes, given.weight_amax
    return quantize_role(config, w.sink, given, Role.WEIGHT, usage)


def whole_weight(config: Config, w: CodedWeight, given: NonDifferentiable) -> QuantizedArray:
    """Quantize and gather the plane of w that forward reads."""
    usage = config.stored(config.sharding.contracted)
    return gather_plane(config, local_codes(config, w, given, usage)[0], usage)


def gather_plane(config: Config, codes: Any, usage: Usage) -> QuantizedArray:
    """Gather one plane of w from local codes."""
    whole: QuantizedArray = config.shards.gather(keep_planes(codes, usage)) if config.gathers else codes
    is_frozen = not (config.gathers or config.learns) and config.sharding.layout == "NK"
    check_weight_format(config.op, "w", whole.format, config.recipe, frozen=is_frozen)
    return whole
