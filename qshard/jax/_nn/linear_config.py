"""Static options of `linear` and `gathered_weight`: checks of their arguments, and the sharding of the weight."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from qshard._core.validation import quote, seed_missing
from qshard.jax._delayed_scaling import LinearState
from qshard.jax._nn.linear_vjp import Config, NonDifferentiable
from qshard.jax._ops.mesh import Spec, explicit_sharding, mesh_of
from qshard.jax._ops.validation import check_array, check_dtype, check_spec, check_spec_fits, seed_words
from qshard.jax._quantized.array import QuantizedArray
from qshard.jax._quantized.gather import CodedWeight, WeightLayout, WeightSharding, spec_of_codes
from qshard.jax._quantized.primary import CODED
from qshard.jax._quantized.quantize import as_scales
from qshard.jax._sharding.shard_spec import ShardSpec
from qshard.recipes import Recipe, check_state


def check_arguments(op: str, w: Any, weight_spec: Any, weight_scales: Any, seed: Any, state: Any) -> NonDifferentiable:
    """Check the types of arguments that `jit` would reject or misread."""
    if not isinstance(w, CODED):
        check_array(op, "w", w)
    check_spec(op, "weight_spec", weight_spec)
    if state is not None and not isinstance(state, LinearState):
        raise TypeError(
            f"{op}: state ({quote(state)}) is not a LinearState; pass the state of this layer from init_delayed"
        )
    scales = None if weight_scales is None else as_scales(op, "weight_scales", weight_scales)
    return NonDifferentiable(scales, seed_words(op, seed), state)


def configure(
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
    config = Config(
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
