"""Every public function of `qshard.jax` that computes, as a small call on arrays: the rows of test_jax_matrix.py."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import qshard.jax as qj
from qshard._core.flat_shards import FlatSlice, plan_master
from qshard.formats import FP8_E4M3, Usage


class Row(NamedTuple):
    """A call of the public names in `of`, on arrays; `differentiable`: in its first argument."""

    of: tuple[str, ...]
    call: Callable[..., Any]
    args: tuple[jax.Array, ...]
    differentiable: bool = False


def _normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


X, W = _normal(0, 32, 32), _normal(1, 32, 32)
EXPERTS, SIZES = jnp.stack([W, 2 * W]), jnp.array([20, 10], jnp.int32)
LABELS = jnp.asarray(np.random.default_rng(2).integers(0, 32, 32), jnp.int32)
ONES = jnp.ones(32)
FORMATS = ("FP8_E4M3", "MXFP8_E4M3", "NVFP4")


def _mixture(x: jax.Array, w13: jax.Array, w2: jax.Array) -> jax.Array:
    """Route by two columns of x."""
    return qj.grouped_mlp(x, *qj.topk_routing(x[:, :2], 1, normalize=False), w13, w2, "CurrentScaling")


def _with_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """y, and the gradients of the arguments where that of y is y."""

    def call(*args: jax.Array) -> Any:
        y, vjp = jax.vjp(function, *args)
        return y, vjp(y)

    return call


def _linear(recipe: str, **options: Any) -> Callable[..., Any]:
    return lambda x, w: qj.linear(x, w, recipe, **options)


def _delayed(x: jax.Array, w: jax.Array) -> Any:
    """A step of delayed scaling, of a layer that two copies share."""
    state = qj.init_delayed("DelayedScaling")
    seen = jax.grad(lambda s: (qj.linear(x, w, "DelayedScaling", state=s) * x[:, :1]).sum())(state)
    merged = qj.merge_observed(seen, seen)
    return qj.update_delayed(state, merged, "DelayedScaling"), qj.spread_states(state, 2)


def _probe(x: jax.Array, w: jax.Array) -> Any:
    probe = qj.init_numerics()
    return jax.grad(lambda p: (qj.linear(x, w, "MXFP8", probe=p) * x[:, :1]).sum())(probe).gradient[:3]


def _primary(x: jax.Array, w: jax.Array) -> Any:
    """A step of a primary weight, by a power of two, so that XLA may fuse it."""
    optimizer = qj.optimizer(optax.sgd(0.5), "MXFP8")
    state = optimizer.init({"w": w})
    params = optimizer.recast(state, {"w": w})
    loss = lambda p: (qj.linear(x, p["w"], "MXFP8") * x[:, :1]).sum()  # noqa: E731
    updates, state = optimizer.update(qj.value_and_grad(loss)(params)[1], state, params)
    return optax.apply_updates(params, updates), state


def _adam(make: Callable[..., Any], gradient: jax.Array, w: jax.Array) -> Any:
    optimizer = make(1e-2)
    return optimizer.update(gradient, optimizer.init(w), w)


def _master(x: jax.Array) -> Any:
    plan = plan_master([FlatSlice((32, 32), FP8_E4M3)])
    pieces = [qj.cast_master(None, [half], [start], plan=plan)[0] for start, half in ((0, x[:16]), (512, x[16:]))]
    return pieces, qj.join_pieces(jnp.stack([piece.data for piece in pieces]), [0, 512], "FP8_E4M3", (32, 32))


def _plain(x: jax.Array) -> Any:
    q = qj.quantize(x, "MXFP8_E4M3")
    return q.dequantize(), qj.from_plain(*qj.to_plain({"w": q}))["w"].dequantize()


def _codes(x: jax.Array, w: jax.Array) -> Any:
    """A weight of codes whose gradient goes to an array beside them."""
    codes = qj.quantize(jax.lax.stop_gradient(w), "FP8_E4M3")
    return qj.linear(x, qj.CodedWeight(codes, w, None), "CurrentScaling")


ROWS = {
    "quantize": Row(
        ("quantize", "QuantizedArray", "Plane"),
        lambda x: [qj.quantize(x, fmt, usage=Usage.BOTH) for fmt in FORMATS],
        (X,),
    ),
    "quantize stochastic": Row(("quantize",), lambda x: qj.quantize(x, "NVFP4[rounding=stochastic]", seed=3), (X,)),
    "dequantize": Row(("QuantizedArray",), lambda x: [qj.quantize(x, f).dequantize() for f in FORMATS], (X,)),
    "dequantize_tree": Row(
        ("dequantize_tree",), lambda x: qj.dequantize_tree([qj.quantize(x, f) for f in FORMATS]), (X,)
    ),
    "compute_scales": Row(
        ("compute_scales", "WeightScales"), lambda x, w: qj.compute_scales([x, w], "CurrentScaling"), (X, W)
    ),
    "gathered_weight": Row(("gathered_weight",), lambda w: qj.gathered_weight(w, "MXFP8"), (W,)),
    "linear": Row(("linear",), _linear("CurrentScaling"), (X, W), True),
    "linear MXFP8": Row(("linear",), _linear("MXFP8"), (X, W), True),
    "linear NVFP4": Row(("linear",), _linear("NVFP4", seed=3), (X, W), True),
    "linear of codes": Row(("linear", "CodedWeight", "Shards"), _codes, (X, W), True),
    "delayed": Row(
        ("init_delayed", "update_delayed", "merge_observed", "spread_states", "LinearState", "TensorState", "Observed"),
        _delayed,
        (X, W),
    ),
    "probe": Row(("init_numerics", "Probe"), _probe, (X, W)),
    "einsum": Row(("einsum",), lambda x, w: qj.einsum("td,dn->tn", x, w, "CurrentScaling"), (X, W), True),
    "DotGeneral": Row(
        ("DotGeneral",), lambda x, w: qj.DotGeneral("MXFP8")(x, w, (((1,), (0,)), ((), ()))), (X, W), True
    ),
    "ragged_dot": Row(
        ("ragged_dot",),
        lambda x, w: qj.ragged_dot(x, w, SIZES, "CurrentScaling", weight_layout="KN"),
        (X, EXPERTS),
        True,
    ),
    "ragged_dot of values": Row(
        ("ragged_dot",), lambda x, w: qj.ragged_dot(x, w, SIZES, None, weight_layout="KN"), (X, EXPERTS), True
    ),
    "grouped_mlp": Row(
        ("grouped_mlp", "topk_routing", "moe_permutation", "moe_permute", "moe_unpermute", "MoEPermutation"),
        _mixture,
        (X, jnp.concatenate([EXPERTS, 3 * EXPERTS], axis=1), EXPERTS),
        True,
    ),
    "cross_entropy": Row(("cross_entropy",), lambda x: qj.cross_entropy(x, LABELS), (X,), True),
    "linear_cross_entropy": Row(
        ("linear_cross_entropy",), lambda x, w: qj.linear_cross_entropy(x, w, LABELS), (X, W), True
    ),
    "rms_norm": Row(("rms_norm",), lambda x: qj.rms_norm(x, ONES, 1e-5), (X,), True),
    "rms_norm_quantize": Row(("rms_norm_quantize",), lambda x: qj.rms_norm_quantize(x, ONES, 1e-5, "FP8_E4M3"), (X,)),
    "swiglu": Row(("swiglu",), qj.swiglu, (X, W), True),
    "swiglu_quantize": Row(("swiglu_quantize",), lambda x, w: qj.swiglu_quantize(x, w, "FP8_E4M3"), (X, W)),
    "primary": Row(
        ("PrimaryWeight", "PrimaryOptimizer", "PrimaryState", "optimizer", "value_and_grad"), _primary, (X, W)
    ),
    "adam": Row(("adam",), functools.partial(_adam, qj.adam), (X, W)),
    "adamw": Row(("adamw",), functools.partial(_adam, qj.adamw), (X, W)),
    "muon": Row(("muon", "MuonState"), functools.partial(_adam, qj.muon), (X, W)),
    "master": Row(("cast_master", "join_pieces"), _master, (X,)),
    "plain": Row(("from_plain", "to_plain"), _plain, (X,)),
}

NO_ROW = {
    "Policy": "says which weights a pytree of parameters has; `Weight` calls linear",
    "Weight": "says what linear does with a weight",
    "ZeroPlan": "static; its methods are for shard_map (test_jax_zero.py)",
    "check_recipes": "static data of a policy or a model",
    "convert": "changes a model outside of transforms; its layers call linear",
    "describe": "static data of a tree",
    "describe_recipes": "static data of a policy or a model",
    "disabled_checks": "static data of an export",
    "gather": "moves codes over a mesh (test_jax_law.py)",
    "load_quantized": "reads files (test_jax_load_quantized.py)",
    "numerics_of": "reads values on the host",
    "ops": "a module; test_jax_modes.py has its primitive",
    "plan_zero": "static",
    "policies": "a module of names",
    "rebuild": "static data of a tree",
    "stream_weights": "yields names and arrays outside of transforms (test_jax_stream.py)",
    "switch_recipe": "changes a policy or a model outside of transforms (test_jax_switch.py)",
}


def rows_with_gradients() -> dict[str, Row]:
    return {
        name: row._replace(call=_with_gradients(row.call)) if row.differentiable else row for name, row in ROWS.items()
    }
