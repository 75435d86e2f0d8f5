"""The forward and the backward pass of `linear`: what is cast, gathered, multiplied and kept, and in which order."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast, get_args

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from qshard import layout
from qshard._core.quantize_steps import Plane, makes_planes_apart
from qshard._core.validation import shown
from qshard.formats import Usage
from qshard.jax import policies
from qshard.jax._delayed_scaling import LinearState, TensorState, observe_all
from qshard.jax._gemm.gemm import gemm, row_product, scaled, stored_for
from qshard.jax._nn.linear_parallel import OfDw, Parallel
from qshard.jax._ops import bind as ops
from qshard.jax._ops.scheduling import once, together
from qshard.jax._ops.second_derivatives import rules_of_product
from qshard.jax._ops.uint64 import words_of
from qshard.jax._quantized.array import QuantizedArray
from qshard.jax._quantized.gather import CodedWeight, CutWeight, Shards
from qshard.jax._quantized.quantize import WeightScales, quantized
from qshard.jax._sharding.shard_spec import Cut, Spec, cuts_rows, whole_along
from qshard.jax._sharding.vmap_rows import folding
from qshard.layout import Shape, multiplies_codes, source
from qshard.recipes import ROLE_SEEDS, DelayedScaling, Recipe, Role, check_weight_format

WeightLayout = Literal["NK", "KN"]
"""How a weight lies in memory. "NK": `[N, K]`, as in PyTorch and equinox; "KN": `[K, N]`, as in flax."""


def as_layout(op: str, layout: Any) -> WeightLayout:
    """The layout that a caller named."""
    if layout not in get_args(WeightLayout):
        raise ValueError(
            f"{op}: weight_layout ({shown(layout)}) is not how w lies; pass 'NK' for [N, K] or 'KN' for [K, N]"
        )
    return cast(WeightLayout, layout)


@dataclass(frozen=True, kw_only=True)
class LayoutConfig:
    """The layout of a weight, its gradient and its codes, and the planes that products contract."""

    layout: WeightLayout = "NK"

    @property
    def contracted(self) -> Usage:
        """The plane of w, as it lies, that forward contracts K of."""
        return Usage.ROWWISE if self.layout == "NK" else Usage.COLUMNWISE

    @property
    def contracted_back(self) -> Usage:
        """The plane of w, as it lies, that backward contracts N of."""
        return Usage.COLUMNWISE if self.layout == "NK" else Usage.ROWWISE


@dataclass(frozen=True, kw_only=True)
class Config(LayoutConfig):
    """What is static in a call of `linear`.

    Attributes:
      op: who is called, for errors.
      cut: how the weight is cut, if it is not codes yet.
      gathers: whether what one device has of its codes must be gathered.
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
    shards: Shards
    cut: Cut
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
    parallel: Parallel | None = None

    def cut_of(self, x: jax.Array, role: Role) -> Cut:
        """How x or dy is cut. Blocks are those of a shard: what it multiplies is its own."""
        if self.parallel is not None:
            return self.parallel.cut_of(x, role, self.axes)
        return Cut.of(x, self.axes, self.rows, own_blocks=True)

    @property
    def columns(self) -> int:
        """Into how many shards the last axis of w stays cut."""
        return self.parts("K" if self.layout == "NK" else "N")

    def parts(self, axis: Literal["N", "K"]) -> int:
        """Into how many shards an axis of w stays cut when it is gathered, and so of x and y: as far as one is told."""
        cut, shards, at = self.cut, self.shards, self.layout.index(axis)
        if cut.local or len(cut.entries) <= at or not isinstance(shards, CutWeight):
            return 1
        return cut.count(tuple(name for name in cut.entries[at] if name not in shards.axes))

    @property
    def sums_alike(self) -> bool:
        """Whether devices whose gradients of w are summed surely have the same scales of x and of the gradient of y."""
        shards = self.shards
        return isinstance(shards, CutWeight) and (not shards.cut.local or set(shards.axes) <= set(self.axes))

    @property
    def contracts_whole_k(self) -> bool:
        """Whether the gradient of w is known to be whole along K, on an Auto mesh: so x is gathered if its K is cut."""
        at = self.layout.index("K")
        if self.cut.local or len(self.cut.entries) <= at or not isinstance(self.shards, CutWeight):
            return False
        return not self.cut.entries[at] and set(self.cut.mesh.axis_types) == {AxisType.Auto}

    @property
    def by_rows(self) -> bool:
        """Whether every axis of the mesh is one that w is gathered along, as in FSDP alone, which shards x by rows."""
        shards = self.shards
        if not isinstance(shards, CutWeight) or not shards.axes:
            return False
        return all(name in shards.axes for name, size in shards.cut.mesh.shape.items() if size > 1)

    def stored(self, usage: Usage) -> Usage:
        """The plane of w to quantize, gather and keep for one usage.

        Where both planes hold the same numbers that is the rowwise one, whose shards arrive in order where w is cut by
        rows. Those of a transposed plane would arrive as stripes, to be moved once more; a transpose of the gathered
        codes reads and writes each byte once. It is made in backward for `[N, K]`, and in forward for `[K, N]`.
        """
        return source(self.recipe.weight, usage)


class Given(NamedTuple):
    scales: WeightScales | None
    seed: jax.Array | None
    state: LinearState | None
    weight_amax: jax.Array | None = None  # Of a primary weight, in delayed scaling.


class Kept(NamedTuple):
    """What backward needs of forward.

    Attributes:
      x, w: planes that its GEMMs read, or what the codes of the whole w are gathered from.
      scales: of the whole w, without codes: small, where squares have them, so they are not gathered again.
      amaxes: of x and w, in delayed scaling, for the cotangent of the state.
    """

    x: QuantizedArray
    w: Any
    scales: Plane | None
    given: Given
    amaxes: tuple[jax.Array | None, jax.Array | None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(config: Config, x: jax.Array, w: CodedWeight, given: Given) -> jax.Array:
    return _forward(config, x, w, given, Usage(0), Usage(0))[0]


def _forward(
    config: Config, x: jax.Array, w: CodedWeight, given: Given, x_kept: Usage, w_kept: Usage
) -> tuple[jax.Array, Kept]:
    fmt, whole_x = config.recipe.activation, config.cut_of(x, Role.ACTIVATION).whole(x.shape)
    if whole_x and whole_x[-1] % layout.whole_units(fmt, Usage.ROWWISE)[1]:
        # Raised before w is cast: who gives both wrongly hears of x, as in PyTorch.
        layout.plane(fmt, whole_x, Usage.ROWWISE, op=config.op, name="x")
    read = config.stored(config.contracted)
    wq, w_amax = _codes_of(config, w, given, read | w_kept)
    wq = _named(wq, w_kept, policies.W_CODES)
    whole = _named(_whole(config, wq, read), read, None)
    if not x.shape or len(whole.axes) != 2 or x.shape[-1] != whole.shape[config.layout.index("K")]:
        axes = ", ".join(config.layout)
        told = ", and say in weight_spec how w is cut" if config.gathers else ""
        raise ValueError(
            f"linear: w {whole.shape} does not fit x {x.shape}; give w as [{axes}] and x as [*lead, K]{told}"
        )
    if config.parallel is not None:
        n = whole.shape[config.layout.index("N")]
        config.parallel.check_columns(config.op, "the gradient of y", n, Role.GRADIENT, config.recipe)
    there = x
    if config.gathers and _reduces(config, x):
        whole, there = together(whole, x)  # So that the gather of w comes before the all-reduce of the amax.
    made = _quantized(config, there, given, Role.ACTIVATION, Usage.ROWWISE | x_kept)
    seed = given.seed if config.recipe.activation.stochastic else None
    state = None if given.state is None else given.state.activation.scale
    how = (config.recipe, x_kept, config.axes, config.rows, config.out_sharding, config.parallel)
    xq, x_amax = once(made, of=(x, seed, state), how=how)
    xq = _named(xq, x_kept, policies.X_CODES)
    x_amax, w_amax = (None if amax is None else policies.named(amax, policies.SCALES) for amax in (x_amax, w_amax))
    kept_w, scales = wq, None  # To keep the whole weights of all layers until backward would undo FSDP.
    if w_kept and config.gathers and not config.reshard_after_forward:
        kept_w = whole if w_kept is read else _whole(config, wq, w_kept)
    elif w_kept is read and config.gathers:
        scales = whole.plane(read)._replace(data=None)
    y, scale, _ = _row_product(config, xq, Role.ACTIVATION, whole, x.shape[:-1], OfDw())
    kept_x = _only(xq, x_kept)
    if x_kept and x_kept is not Usage.ROWWISE and makes_planes_apart(config.recipe.activation):
        y, kept_x = together(y, kept_x)  # Else XLA keeps x, and makes the plane for backward there.
    y = scaled(y, scale, x.dtype)
    kept = Kept(kept_x, _only(kept_w, w_kept), scales, given._replace(scales=None), (x_amax, w_amax))
    return checkpoint_name(y, policies.PRODUCTS), kept


def _product_fwd(config: Config, x: jax.Array, w: CodedWeight, given: Given) -> tuple[jax.Array, Kept]:
    x_kept = stored_for(config.recipe.activation, config.recipe.gradient, Usage.COLUMNWISE)
    return _forward(config, x, w, given, x_kept if config.learns else Usage(0), config.stored(config.contracted_back))


def _product_bwd(config: Config, kept: Kept, dy: jax.Array) -> tuple[jax.Array, CodedWeight, Given]:
    recipe, xq, wq = config.recipe, kept.x, kept.w
    columns = Usage.COLUMNWISE
    read = stored_for(recipe.gradient, recipe.weight, Usage.ROWWISE)
    if config.learns:
        read |= stored_for(recipe.gradient, recipe.activation, columns)
    dyq, dy_amax = _quantized(config, dy, kept.given, Role.GRADIENT, read)
    if config.gathers and config.reshard_after_forward:
        # Not before dy: XLA would see one gather where two are written, and keep its result from forward to backward.
        wq, dyq = together(wq, dyq)
        stored = config.stored(config.contracted_back)
        wq = _whole(config, wq, stored)
        if kept.scales is not None:
            wq = wq.with_planes({stored: kept.scales._replace(data=wq.plane(stored).data)})
    if config.learns and (config.parallel or not multiplies_codes(recipe.gradient, recipe.activation)):
        dyq, xq = together(dyq, xq)  # Else XLA may dequantize, or gather, what all layers keep, long before it is due.
    if config.learns and config.contracts_whole_k:
        xq = _whole_k(config, xq)
    of_dw = OfDw((dyq, xq))
    if config.learns and config.parallel is not None:
        of_dw = OfDw((dyq, xq), functools.partial(_all_rows, config, dy.shape[:-1]))
    dx, dx_scale, (dyq, xq) = _row_product(config, dyq, Role.GRADIENT, wq, dy.shape[:-1], of_dw)
    dw: jax.Array | None = None
    if config.learns:
        pair = (dyq, xq) if config.layout == "NK" else (xq, dyq)
        dtype = config.grad_dtype or wq.dtype
        options: dict[str, Any] = {"precise": True, "out_sharding": config.w_type, "by_rows": config.by_rows}
        made, scale = gemm(pair[0], columns, pair[1], columns, dtype, **options)
        if not config.sums_alike:
            made, scale = scaled(made, scale, dtype), None
        made = config.shards.scatter(made)
        if config.gathers:  # So that dw is made here, while w is gathered, and scattered while dx is made.
            made, dx = together(made, dx)
        dw = scaled(made, scale, config.w_dtype)
    dx = scaled(dx, dx_scale, dy.dtype)
    x_amax, w_amax = kept.amaxes
    observed = observe_all(kept.given.state, w_amax, x_amax, dy_amax, config.axes)
    return dx, CodedWeight(None, dw, config.shards), Given(None, None, observed)


product.defvjp(*rules_of_product(None, _product_fwd, _product_bwd))
folding_product = folding(product, *rules_of_product(None, _product_fwd, _product_bwd))


def _row_product(
    config: Config, q: QuantizedArray, role: Role, w: QuantizedArray, lead: Shape, of_dw: OfDw
) -> tuple[jax.Array, jax.Array | None, Any]:
    """The product of x or dy, whose codes are `q`, and the whole w; and the operands of dw, of all rows."""
    backward = role is Role.GRADIENT
    options: dict[str, Any] = {
        "precise": backward,
        "out_sharding": config.x_type if backward else config.out_sharding,
        "by_rows": config.by_rows,
    }

    def multiply(q: QuantizedArray, lead: Shape) -> tuple[jax.Array, jax.Array | None]:
        of_w = config.contracted_back if backward else config.contracted
        return row_product(q, w, of_w, lead, config.columns, **options)

    if config.parallel is None:
        return *multiply(q, lead), of_dw.operands
    return config.parallel.row_products(q, lead, role, multiply, of_dw)


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
        data, scale_inv = (whole_along(a, axis, config.cut.mesh) if a.ndim else a for a in plane[:2])
        planes[usage] = plane._replace(data=data, scale_inv=scale_inv)
    return q.with_planes(planes)


def _reduces(config: Config, x: jax.Array) -> bool:
    """Whether devices that have shards of x reduce an amax for it."""
    fmt = config.recipe.activation
    return (fmt.block is None or fmt.scaling.global_scale is not None) and (bool(config.axes) or ops.may_be_cut(x))


def _named(codes: Any, kept: Usage, name: str | None) -> Any:
    """Scales, and with a name codes, as policies know them. What is no tensor yet stays as it is."""
    if not isinstance(codes, QuantizedArray):
        return codes
    planes = {}
    for usage, plane in codes.planes.items():
        scales = [None if s is None else policies.named(s, policies.SCALES) for s in plane[1:]]
        data = plane.data if name is None else policies.named(plane.data, name if usage in kept else policies.FORWARD)
        planes[usage] = Plane(data, *scales)
    return codes.with_planes(planes)


def _only(codes: Any, usage: Usage) -> Any:
    """The planes of a tensor that are in `usage`. What is no tensor yet stays as it is."""
    if not isinstance(codes, QuantizedArray):
        return codes
    return codes.with_planes({each: plane for each, plane in codes.planes.items() if each in usage})


def _quantized(
    config: Config, x: jax.Array, given: Given, role: Role, usage: Usage
) -> tuple[QuantizedArray, jax.Array | None]:
    """The codes of x, w or dy, and, of delayed scaling, the amax of it.

    Those of a matrix with more rows, where the recipe adds some and no mesh may cut them.
    """
    fmt, seed, weight = config.recipe.format(role), given.seed, role is Role.WEIGHT
    scales, margin = given.scales if weight else None, None
    if given.state is not None:
        state: TensorState = getattr(given.state, role.value)
        scales, margin = WeightScales(state.scale), cast(DelayedScaling, config.recipe).margin
    cut = config.cut if weight else config.cut_of(x, role)
    if seed is not None and fmt.stochastic:
        seed = seed ^ words_of(ROLE_SEEDS[role]).view(seed.dtype)
    added = config.recipe.added_rows(role, usage, math.prod(x.shape[:-1]))
    if added and cuts_rows(x, config.out_sharding):
        added = 0
    name = {Role.WEIGHT: "w", Role.ACTIVATION: "x", Role.GRADIENT: "the gradient of y"}[role]
    turned = weight and config.layout == "KN"
    options: dict[str, Any] = {"margin": margin, "added_rows": added, "apart": not weight, "turned": turned}
    if not (weight or cut.local):
        options["columns"] = config.parts("K" if role is Role.ACTIVATION else "N")
    return quantized(x, fmt, usage, cut, scales, seed, op=config.op, name=name, **options)


def _codes_of(config: Config, w: CodedWeight, given: Given, usage: Usage) -> tuple[Any, jax.Array | None]:
    if w.codes is not None or w.sink is None:
        return w.codes, given.weight_amax
    return _quantized(config, w.sink, given, Role.WEIGHT, usage)


def whole_weight(config: Config, w: CodedWeight, given: Given) -> QuantizedArray:
    """The plane that the forward pass gathers."""
    usage = config.stored(config.contracted)
    return _whole(config, _codes_of(config, w, given, usage)[0], usage)


def _whole(config: Config, codes: Any, usage: Usage) -> QuantizedArray:
    """One plane of the whole w, from the codes that one device has."""
    whole: QuantizedArray = config.shards.gather(_only(codes, usage)) if config.gathers else codes
    check_weight_format(config.op, "w", whole.format, config.recipe)
    return whole
