"""`ragged_dot`: a linear layer per expert, on tokens that are sorted by expert.

x [M, K], sorted  ->  tiles of rows, one expert each  ->  codes, with scales per expert  ->  ragged products
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from qshard._core.operands import check_state
from qshard._core.validation import WeightLayout, as_layout, quote, seed_missing
from qshard.formats import Usage
from qshard.jax._delayed_scaling import LinearState, check_shared, require_gradient
from qshard.jax._experts.expert_parallel import GroupedRows
from qshard.jax._experts.ragged_dot_vjp import CallArrays, Config, Result, ragged_product
from qshard.jax._experts.ragged_values import ValueConfig, value_product
from qshard.jax._nn.activations import swiglu_gate_up
from qshard.jax._nn.linear import check_arguments
from qshard.jax._ops.mesh import AxisName, Spec, mesh_of, spec_of, vary_alike
from qshard.jax._ops.validation import (
    Seed,
    as_axes,
    as_names,
    check_array,
    check_dtype,
    check_spec_fits,
)
from qshard.jax._quantized.array import QuantizedArray
from qshard.jax._quantized.gather import CodedWeight, WeightSharding, spec_of_codes
from qshard.jax._quantized.primary import CODED, PrimaryWeight, open_weight
from qshard.jax._sharding.shard_spec import ShardSpec
from qshard.layout import plane
from qshard.recipes import Recipe, RecipeLike, as_recipe


def ragged_dot(
    x: jax.Array,
    w: jax.Array | QuantizedArray | PrimaryWeight | CodedWeight,
    group_sizes: jax.Array | GroupedRows,
    recipe: RecipeLike | None,
    *,
    weight_layout: WeightLayout | None = None,
    weight_spec: Spec = None,
    gather_axis: str | Sequence[str] | None = None,
    reshard_after_forward: bool = True,
    axis_name: AxisName = None,
    seed: Seed = None,
    state: LinearState | None = None,
) -> jax.Array:
    """Compute `linear` for each expert: rows of group e give `x_e @ w[e].T`, or `x_e @ w[e]`.

    Differentiable. Codes and scales are those that `linear` would compute from the rows of one expert alone, whatever
    the other rows are. Products are equal up to the order of fp32 sums: products of codes for formats with one scale,
    of bfloat16 values for block formats.

    Args:
      x: float32, bfloat16 or float16 `[M, K]`, rows sorted by expert.
      w: `[E, N, K]` or `[E, K, N]` in one of these dtypes. Or codes in the recipe's format for weights, with scales per
        expert: a frozen `QuantizedArray`, from `jax.vmap` of `quantize`; or a `PrimaryWeight`.
      group_sizes: integers `[E]`: the number of rows of each expert, 0 or more. Rows after the last group give zeros.
      recipe: the recipe, or its name, as for `linear`. None: no quantization; then `w` is cast to the dtype of `x`, and
        scales, seeds and states have no meaning.
      weight_layout: "KN" for `w` `[E, K, N]`, as in `jax.lax.ragged_dot`; "NK" for `[E, N, K]`, the default of
        `linear`. Required, since no shape tells them apart if N == K. Both give the same bits.
      weight_spec: the sharding of `w`. Experts over one mesh axis and rows over another: `P("expert", "fsdp")`.
      gather_axis: the mesh axis, or axes, along which FSDP shards the weights: codes of all experts are gathered
        together.
      reshard_after_forward: as for `linear`.
      axis_name: in `shard_map`, the mesh axes over which the rows of an expert are sharded: one set of scales then
        serves them. None: each device has its own.
      seed: the seed of stochastic rounding, as for `linear`. Expert e draws what `linear` draws with
        `seed XOR (e << 32)`. Pass a different seed on each device.
      state: the state of delayed scaling, from `init_delayed(recipe, (E,))`.

    Returns:
      `[M, N]` in the dtype of `x`. Where only the device knows that `group_sizes` are negative, or add up to more rows
      than `x` has, all is NaN, or without a recipe the first element.

    Raises:
      TypeError: an operand is not of a float dtype, or another argument has the wrong type.
      ValueError: `weight_layout` is missing; shapes do not match each other or the formats; `group_sizes` are negative
        or add up to more rows than `x` has; the recipe needs a seed or a state; or a mesh has Explicit axes, for which
        JAX has no ragged product.

    In `shard_map` it uses the tokens and experts of one device. `grouped_mlp(ep_axis=...)` also sends tokens to the
    devices of their experts. On Auto meshes each device multiplies all tokens. Weights are gathered as codes, if there
    is a recipe.

    On a GPU with a new enough cuBLASLt one op multiplies all experts, without a transfer of `group_sizes` to the host:
    codes of FP8 recipes with one scale or blocks of 128, and bfloat16 or float16 values otherwise. So `recipe=None` is
    a faster `jax.lax.ragged_dot`. Elsewhere, and for float32, it runs `jax.lax.ragged_dot_general`. `qshard info` shows
    which.

    >>> x, w = jnp.full((6, 32), 7.0), jnp.stack([jnp.full((16, 32), value) for value in (0.875, 1.75, 3.5)])
    >>> ragged_dot(x, w, jnp.array([2, 0, 3]), "CurrentScaling", weight_layout="NK")[:, 0]
    Array([196., 196., 784., 784., 784.,   0.], dtype=float32)

    Sources: `jax.lax.ragged_dot`; TransformerEngine (`GroupedLinear`: scales by expert, rows padded to blocks).
    """
    options = LayerOptions(recipe, weight_layout, weight_spec, gather_axis, reshard_after_forward, axis_name)
    return product_and_amaxes(options, x, w, group_sizes, seed, state)[0]


class LayerOptions(NamedTuple):
    """The arguments of `ragged_dot` that all weights of a layer share."""

    recipe: RecipeLike | None
    weight_layout: WeightLayout | None
    weight_spec: Spec
    gather_axis: str | Sequence[str] | None
    reshard_after_forward: bool
    axis_name: AxisName


def product_and_amaxes(
    options: LayerOptions,
    x: jax.Array,
    w: Any,
    group_sizes: jax.Array | GroupedRows,
    seed: Seed,
    state: LinearState | None,
    *,
    swiglu: bool = False,
    row_amaxes: jax.Array | None = None,
    known_axes: tuple[str, ...] = (),
) -> Result:
    """Compute `ragged_dot`, and optionally SwiGLU of its result. The amaxes of its rows save a read of the result.

    Args are as for `ragged_dot`, and:
      options: the other arguments of `ragged_dot`.
      swiglu: apply `swiglu_gate_up` to the product.
      row_amaxes: fp32 `[M]`, the amax of each row of `x`, if known.
      known_axes: manual mesh axes of experts, along which each device has its own state.

    Returns:
      The result; and with `swiglu` and a recipe the amax of each of its rows, otherwise None.
    """
    if options.recipe is None:
        recipe = None
        _check_unquantized(w, state)
    else:
        recipe = as_recipe(options.recipe, "ragged_dot", by_product=False)
    if options.weight_layout is None:
        raise ValueError(
            "ragged_dot: weight_layout (None) is not a layout; pass 'KN' for w [E, K, N], as in jax.lax.ragged_dot, "
            "or 'NK' for w [E, N, K], as in linear"
        )
    layout = as_layout("ragged_dot", options.weight_layout)
    check_array("ragged_dot", "x", x)
    if not isinstance(group_sizes, GroupedRows):
        check_array("ragged_dot", "group_sizes", group_sizes)
    seed_pair = check_arguments("ragged_dot", w, options.weight_spec, None, seed, state).seed
    if state is not None:
        check_shared("ragged_dot", options.axis_name, known=known_axes)
    if not isinstance(group_sizes, GroupedRows):
        _check_rows(x, group_sizes)
    made: Result = _checked_ragged_dot(
        x,
        w,
        group_sizes,
        seed_pair,
        state,
        row_amaxes,
        recipe=recipe,
        layout=layout,
        weight_spec=options.weight_spec,
        gather_axes=as_names("ragged_dot", "gather_axis", options.gather_axis),
        reshard_after_forward=options.reshard_after_forward,
        axes=as_axes("ragged_dot", options.axis_name),
        swiglu=swiglu,
    )
    return made


# Jitted for eager callers, also of gradients.
@functools.partial(
    jax.jit,
    static_argnames=("recipe", "layout", "weight_spec", "gather_axes", "reshard_after_forward", "axes", "swiglu"),
    inline=True,
)
def _checked_ragged_dot(
    x: jax.Array,
    w: Any,
    group_sizes: jax.Array | GroupedRows,
    seed: jax.Array | None,
    state: LinearState | None,
    row_amaxes: jax.Array | None,
    *,
    recipe: Recipe | None,
    layout: WeightLayout,
    weight_spec: Spec,
    gather_axes: tuple[str, ...],
    reshard_after_forward: bool,
    axes: tuple[str, ...],
    swiglu: bool,
) -> Result:
    check_dtype("ragged_dot", "x", x)
    w, weight_amax = open_weight(w) if isinstance(w, CODED) else (w, None)
    if isinstance(w, CodedWeight):
        codes, sink = w.codes, w.sink
    else:
        codes, sink = (w, None) if isinstance(w, QuantizedArray) else (None, w)
    if codes is None:
        check_dtype("ragged_dot", "w", sink)
    parts: Any = sink if codes is None else codes.plane(Usage.ROWWISE).data
    shape = jnp.shape(parts) if codes is None else codes.shape
    if len(shape) != 3 or x.ndim != 2:
        raise _no_fit(x, shape, layout)
    _check_mesh(x, parts, weight_spec)
    sharding = WeightSharding(_spec_of_expert(codes, sink, gather_axes, weight_spec), gather_axes, layout)
    if x.shape[1] != sharding.whole_shape(shape[1:])[layout.index("K")]:
        raise _no_fit(x, shape, layout)
    groups = group_sizes
    if not isinstance(groups, GroupedRows):
        _check_sizes(groups, shape[0])
    if recipe is None:
        x, w = vary_alike(x, w)
        y = value_product(ValueConfig(sharding, reshard_after_forward), x, w, groups)
        return swiglu_gate_up(y) if swiglu else y, None
    _check_recipe(x, shape[0], recipe, seed, state)
    plane(recipe.weight, sharding.spec.whole(shape[1:]), Usage.ROWWISE, op="ragged_dot", name="w")
    config = Config(
        recipe=recipe,
        sharding=sharding,
        axes=axes,
        learns=sink is not None,
        reshard_after_forward=reshard_after_forward,
        swiglu=swiglu,
    )
    seeds = None
    if seed is not None:
        first = groups.first_expert if isinstance(groups, GroupedRows) else 0
        high = seed[1] ^ (lax.iota(seed.dtype, shape[0]) + jnp.asarray(first, seed.dtype))
        seeds = jnp.stack([jnp.broadcast_to(seed[0], high.shape), high], axis=-1)
    if state is not None and sink is not None:
        sink, state = require_gradient("ragged_dot", sink, state)
    # In shard_map, cast an operand to vary over more axes outside of the custom_vjp: there JAX sums its gradient.
    x, *sinks = vary_alike(x, *([] if sink is None else [sink]))
    if isinstance(groups, GroupedRows) and groups.exchange is not None:
        sinks = [groups.exchange.guard(sink) for sink in sinks]
    weight = CodedWeight(codes, sinks[0] if sinks else None, None)
    return ragged_product(config, x, weight, CallArrays(groups, seeds, state, weight_amax, row_amaxes))


def _check_rows(x: jax.Array, group_sizes: Any) -> None:
    """Raise ValueError if the host knows that `group_sizes` are negative or add up to more rows than x has."""
    if isinstance(group_sizes, jax.core.Tracer) or not getattr(group_sizes, "is_fully_addressable", True):
        return
    # NumPy, since JAX would trace the sum within `jit`. `jax.transfer_guard` allows `device_get`.
    sizes = np.asarray(jax.device_get(group_sizes))
    rows = int(sizes.sum())
    if sizes.min(initial=0) < 0:
        raise ValueError(
            f"ragged_dot: group_sizes (smallest {sizes.min()}) must not be negative; pass the number of rows of each "
            "expert"
        )
    if rows > jnp.shape(x)[0]:
        raise ValueError(
            f"ragged_dot: group_sizes (sum {rows}) exceed the rows of x {jnp.shape(x)}; pass the number of rows of "
            "each expert"
        )


def _no_fit(x: jax.Array, w: tuple[int, ...], layout: WeightLayout) -> ValueError:
    return ValueError(f"ragged_dot: w {w} does not fit x {x.shape}; pass w as [E, {', '.join(layout)}] and x as [M, K]")


def _check_sizes(group_sizes: jax.Array, experts: int) -> None:
    if group_sizes.shape != (experts,) or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(
            f"ragged_dot: group_sizes ({group_sizes.dtype} {group_sizes.shape}) is not one integer for each of "
            f"{experts} experts; pass the number of rows of each expert"
        )


def _check_recipe(x: jax.Array, experts: int, recipe: Recipe, seed: Any, state: LinearState | None) -> None:
    if seed is None and recipe.stochastic:
        raise ValueError(f"{seed_missing('ragged_dot', type(recipe).__name__)}, such as jax.random.fold_in(key, layer)")
    advice = "init_delayed(recipe, (E,))"
    check_state("ragged_dot", "state", "given" if state else None, recipe, advice)
    if state is not None and state.weight.scale.shape != (experts,):
        raise ValueError(
            f"ragged_dot: state (scale {state.weight.scale.shape}) is not one for each of {experts} experts; pass "
            f"init_delayed(recipe, ({experts},))"
        )
    plane(recipe.activation, x.shape, Usage.ROWWISE, op="ragged_dot", name="x")


def _check_unquantized(w: Any, state: LinearState | None) -> None:
    """Raise if a call without a recipe has operands that only a recipe reads."""
    if isinstance(w, CODED):
        raise TypeError(f"ragged_dot: w ({quote(w)}) has codes, but recipe is None; pass the recipe of its format")
    if state is not None:
        raise ValueError("ragged_dot: state has scales, but recipe is None; pass DelayedScaling, or leave state out")


def _check_mesh(x: jax.Array, w: jax.Array, spec: Spec) -> None:
    for array in (x, w):
        if axes := jax.typeof(array).sharding.mesh.explicit_axes:
            raise ValueError(
                f"ragged_dot: JAX has no ragged product for Explicit mesh axes {axes}; call it inside jax.shard_map "
                "over them"
            )
    check_spec_fits("ragged_dot", "weight_spec", spec, mesh_of(w, spec), 3)


def _spec_of_expert(
    codes: QuantizedArray | None, sink: jax.Array | None, gather_axes: tuple[str, ...], spec: Spec
) -> ShardSpec:
    """The sharding of the weight of one expert: `spec` without the axis of experts."""
    own = spec
    if spec is not None:
        entries = PartitionSpec(*(*spec_of(spec, None), None, None, None)[1:3])
        own = NamedSharding(spec.mesh, entries) if isinstance(spec, NamedSharding) else entries
    names: dict[str, Any] = {"op": "ragged_dot", "name": "gather_axis", "spec_name": "weight_spec"}
    found: list[ShardSpec] = []

    def find(one: Any) -> Any:
        if isinstance(one, QuantizedArray):
            found.append(spec_of_codes(one, gather_axes, own, **names) if gather_axes else ShardSpec())
        else:
            found.append(ShardSpec.along(one, gather_axes, own, **names))
        return 0

    jax.eval_shape(jax.vmap(find), sink if codes is None else codes)
    return found[0]
