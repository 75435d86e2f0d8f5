"""Operands of `linear`: the options of a call, the sharding of its weight, and x, w and dy in the format of a product.

Operands are codes, or values in bfloat16 for a product that quantizes nothing: `NVFP4(wgrad="bf16")`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from qshard import layout
from qshard._core.operands import OperandSpec, check_state, check_takes_codes, check_weight_format
from qshard._core.quantize_steps import Plane
from qshard._core.validation import WeightLayout, seed_missing
from qshard.formats import Format, Usage
from qshard.jax import policies
from qshard.jax._delayed_scaling import LinearState, TensorState
from qshard.jax._gemm.gemm import GemmOperand, stored_for
from qshard.jax._nn.linear_parallel import TensorParallelAxis
from qshard.jax._ops.mesh import Spec, explicit_sharding, mesh_of
from qshard.jax._ops.scheduling import name_residual
from qshard.jax._ops.validation import check_dtype, check_spec_fits
from qshard.jax._quantized.array import QuantizedArray
from qshard.jax._quantized.gather import CodedWeight, Shards, WeightSharding, spec_of_codes
from qshard.jax._quantized.quantize import quantize_shard
from qshard.jax._quantized.weight_scales import WeightScales
from qshard.jax._sharding.shard_spec import ShardSpec, may_shard_rows, whole_along
from qshard.layout import multiplies_codes, source
from qshard.recipes import NO_PRODUCTS, Product, Recipe, Role

_NAMES = {Role.WEIGHT: "w", Role.ACTIVATION: "x", Role.GRADIENT: "the gradient of y"}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Static options of a call of `linear`, or of one of its products.

    Attributes:
      recipe: the recipe of the layer, or of a product (`of_product`).
      values: whether operands of the product are values in bfloat16. `recipe` is then not used.
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
    values: bool = False

    @classmethod
    def of(
        cls,
        op: str,
        w: Any,
        arrays: CallArrays,
        recipe: Recipe,
        weight_spec: Spec,
        gather_axes: tuple[str, ...],
        layout: WeightLayout,
        grad_format: Format | None = None,
        **options: Any,
    ) -> tuple[Config, CodedWeight]:
        """Find how the weight is sharded, and build the static options of the call.

        An array becomes a `CodedWeight` without codes, which is its own gradient sink. `grad_format` is the format of
        its gradient on the wire, for weights that are gathered in `shard_map`.
        """
        _check_arrays(op, recipe, arrays)
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
            sharding = WeightSharding(spec, gather_axes, layout, grad_format)
            weight = CodedWeight(codes, sink, sharding)
            w_type = None if sink is None else explicit_sharding(sink)
        else:
            if jnp.ndim(w) != 2:
                raise ValueError(f"{op}: w {jnp.shape(w)} does not have two axes; pass w as [N, K]")
            check_dtype(op, "w", w)
            check_spec_fits(op, "weight_spec", weight_spec, mesh_of(w, weight_spec), w.ndim)
            spec = ShardSpec.along(w, gather_axes, weight_spec, **names)
            sharding = WeightSharding(spec, gather_axes, layout, grad_format)
            weight, w_type = CodedWeight(None, w, sharding), explicit_sharding(w)
        if grad_format is not None and not (gathers and sharding.scatters_locally):
            raise ValueError(
                f"{op}: grad_dtype ({grad_format}) needs a shard of w in shard_map, whose gradient this call scatters; "
                "pass gather_axis there, or a float dtype"
            )
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
        if recipe.by_product:
            _check_products(config, weight, arrays)
        return config, weight

    def of_product(self, product: Product) -> Config:
        """The options of one product: with the recipe of its operands, or `values`."""
        own = self.recipe.of(product)
        if own is self.recipe:
            return self
        return replace(self, values=True) if own is None else replace(self, recipe=own)

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
        return usage if self.values else source(self.recipe.weight, usage)

    def stored_for_dw(self, role: Role) -> Usage:
        """The plane of x or dy that the product for dw reads."""
        if self.values:
            return Usage.COLUMNWISE
        pair = (self.recipe.activation, self.recipe.gradient)
        return stored_for(*(pair if role is Role.ACTIVATION else pair[::-1]), Usage.COLUMNWISE)

    @property
    def multiplies_codes_for_dw(self) -> bool:
        return not self.values and multiplies_codes(self.recipe.gradient, self.recipe.activation)


class CallArrays(NamedTuple):
    """Arguments of `linear` without a gradient, except for `state`, which gets a cotangent.

    `scales` are the scales of the weight, if the caller computed them, and `weight_amax` the amax of a primary weight,
    under delayed scaling.
    """

    scales: WeightScales | None
    seed: jax.Array | None
    state: LinearState | None
    weight_amax: jax.Array | None = None


def _check_arrays(op: str, recipe: Recipe, arrays: CallArrays) -> None:
    """Check that seed, scales and state are those that the recipe needs. No operand is read."""
    if arrays.seed is None and recipe.stochastic:
        raise ValueError(f"{seed_missing(op, type(recipe).__name__)}, such as jax.random.fold_in(key, layer)")
    advice = "the state of this layer from init_delayed, without weight_scales"
    fits = arrays.state is None or arrays.scales is None
    check_state(op, "state", "given" if arrays.state else None, recipe, advice, fits=fits)
    for tensor in (arrays.state.weight, arrays.state.activation, arrays.state.gradient) if arrays.state else ():
        shapes = {"scale": tensor.scale.shape, "amax_history": tensor.amax_history.shape}
        if shapes != recipe.state_shapes:
            raise ValueError(
                f"{op}: state ({shapes}) does not have the shapes {recipe.state_shapes}; pass the state of one layer"
            )


def _check_products(config: Config, w: CodedWeight, arrays: CallArrays) -> None:
    """Raise if a call uses what recipes with formats of single products do not support."""
    op, recipe = config.op, config.recipe
    if config.parallel is not None:
        raise NotImplementedError(f"{op}: gather_rows and scatter_rows need one format a role: {recipe} {NO_PRODUCTS}")
    if recipe.has_one_weight:
        return
    if arrays.scales is not None:
        raise ValueError(
            f"{op}: weight_scales is for one weight format, but forward and dgrad of {recipe} have two; leave it out"
        )
    if w.codes is not None or w.sink is None:
        check_takes_codes(op, "w", recipe)


def quantize_role(
    config: Config, x: jax.Array, arrays: CallArrays, role: Role, usage: Usage
) -> tuple[GemmOperand, jax.Array | None]:
    """Quantize x, w or dy, or round it to bfloat16. Also return its amax under delayed scaling.

    The matrix is zero-padded to whole blocks of rows if the recipe needs that and no mesh may shard them.
    """
    if config.values:
        return x.astype(jnp.bfloat16), None
    weight, name = role is Role.WEIGHT, _NAMES[role]
    scales = arrays.scales if weight else None
    if arrays.state is not None:
        state: TensorState = getattr(arrays.state, role.value)
        scales = WeightScales(state.scale)
    shard_spec = config.sharding.spec if weight else config.shard_spec(x, role)
    operand = OperandSpec.of(config.recipe, role, usage, math.prod(x.shape[:-1]), op=config.op, name=name)
    if operand.added_rows and may_shard_rows(x, config.out_sharding):
        operand = operand._replace(added_rows=0)
    columns = None if weight or shard_spec.local else config.sharding.count("K" if role is Role.ACTIVATION else "N")
    transposed = weight and config.sharding.layout == "KN"
    return quantize_shard(
        x, operand, shard_spec, scales, arrays.seed, apart=not weight, transposed=transposed, columns=columns
    )


def local_codes(config: Config, w: CodedWeight, arrays: CallArrays, usage: Usage) -> tuple[Any, jax.Array | None]:
    """Return the local codes of the weight, quantized if it is an array, and its amax under delayed scaling."""
    if w.codes is not None or w.sink is None:
        return w.codes, arrays.weight_amax
    return quantize_role(config, w.sink, arrays, Role.WEIGHT, usage)


def whole_weight(config: Config, w: CodedWeight, arrays: CallArrays) -> QuantizedArray:
    """Quantize and gather the plane of w that forward reads."""
    usage = config.stored(config.sharding.contracted)
    whole: QuantizedArray = gather_plane(config, local_codes(config, w, arrays, usage)[0], usage)
    return whole


def gather_plane(config: Config, codes: Any, usage: Usage) -> Any:
    """Gather one plane of w from local codes, or w from local values."""
    if config.values:
        assert isinstance(config.shards, WeightSharding)
        return config.shards.gather_values(codes)
    whole: QuantizedArray = config.shards.gather(keep_planes(codes, usage)) if config.gathers else codes
    is_frozen = not (config.gathers or config.learns) and config.sharding.layout == "NK"
    check_weight_format(config.op, "w", whole.format, config.recipe, frozen=is_frozen)
    return whole


def whole_k(config: Config, x: GemmOperand) -> GemmOperand:
    """Reshard x to whole rows of K. XLA would gather dequantized values."""
    mesh = config.sharding.spec.mesh
    if not isinstance(x, QuantizedArray):
        return whole_along(x, -1, mesh)
    planes = {}
    for usage, plane in x.planes.items():
        axis = 0 if layout.is_transposed(x.format, usage) else -1
        data, scale_inv = (whole_along(a, axis, mesh) if a.ndim else a for a in plane[:2])
        planes[usage] = plane._replace(data=data, scale_inv=scale_inv)
    return x.with_planes(planes)


def name_residuals(config: Config, operand: Any, saved: Usage, name: str | None) -> Any:
    """Name scales, and codes if `name` is passed, for checkpoint policies. Codes in the form of custom `Shards` pass.

    Values are named only if they are saved.
    """
    if config.values:
        return name_residual(operand, name) if saved and name is not None else operand
    if not isinstance(operand, QuantizedArray):
        return operand
    planes = {}
    for usage, plane in operand.planes.items():
        scales = [None if s is None else name_residual(s, policies.SCALES) for s in plane[1:]]
        data = plane.data if name is None else name_residual(plane.data, name if usage in saved else policies.FORWARD)
        planes[usage] = Plane(data, *scales)
    return operand.with_planes(planes)


def keep_planes(operand: Any, usage: Usage) -> Any:
    """Drop the planes that are not in `usage`. Values, and codes in the form of custom `Shards`, pass."""
    if not isinstance(operand, QuantizedArray):
        return operand
    return operand.with_planes({each: plane for each, plane in operand.planes.items() if each in usage})
