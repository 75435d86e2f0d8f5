"""Tree functions on primary weights in JAX: codes and masters never diverge silently.

Each optax transform and tree function is right, or raises before it changes anything.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from qshard.jax import (
    CodedWeight,
    PrimaryState,
    PrimaryWeight,
    adamw,
    dequantize_tree,
    linear,
    optimizer,
    quantize,
    value_and_grad,
)
from support.awkward import assert_bits_equal

RECIPE = "MXFP8"
X = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
VALUES = {"w": np.random.default_rng(1).standard_normal((32, 32)).astype(np.float32), "b": np.zeros(32, np.float32)}
SGD = optax.sgd(0.1)
FP8_ADAM = adamw(0.1, mu_dtype="float8_e4m3fn", nu_dtype="float8_e5m2")
AFTER = r"new codes of a PrimaryWeight: pass other transforms to qshard.jax.optimizer as inner"
PARTS = r"a subtree of type\s+<class 'qshard.jax.(_quantized.primary.PrimaryWeight|_optim.updates.CodesUpdate)'>"
CODES = r"PrimaryWeight: .* is not uint8: a tree function changed its codes; apply it to qshard.jax.dequantize_tree"


def fresh():
    return {name: jnp.array(value) for name, value in VALUES.items()}


def loss_of(params):
    return jnp.mean((linear(X, params["w"], RECIPE) + params["b"] - X) ** 2)


def state_of(state):
    """Return the state of the primary weights within that of a chain."""
    is_ours = lambda node: isinstance(node, PrimaryState)  # noqa: E731
    return next(node for node in jax.tree.leaves(state, is_leaf=is_ours) if is_ours(node))


def begin(transform):
    state = transform.init(fresh())
    return optimizer(SGD, RECIPE).recast(state_of(state), fresh()), state


def step(transform, params, state, differentiate=value_and_grad):
    loss, grads = differentiate(loss_of)(params)
    updates, state = transform.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


def train(transform, *, primary=True, jit=True, steps=3):
    if primary:
        params, state = begin(transform)
        run = functools.partial(step, transform)
    else:
        params, state = fresh(), transform.init(fresh())
        run = functools.partial(step, transform, differentiate=jax.value_and_grad)
    run = jax.jit(run, donate_argnums=(0, 1)) if jit else run
    losses = []
    for _ in range(steps):
        params, state, loss = run(params, state)
        losses.append(float(loss))
    return params, state, losses


def assert_codes_of(params, master):
    want = PrimaryWeight.of(quantize(master, "MXFP8_32x32[nonfinite=nan]"))
    jax.tree.map(lambda a, b: assert_bits_equal(np.asarray(a), np.asarray(b)), params, want)


def labels(tree):
    return {"w": "codes", "b": "values"}


INNER = {
    "chain": optax.chain(optax.clip(0.01), optax.add_decayed_weights(0.1), optax.adam(0.1), optax.scale(0.5)),
    "MultiSteps": optax.MultiSteps(SGD, 2),
    "apply_if_finite": optax.apply_if_finite(SGD, 3),
    "inject_hyperparams": optax.inject_hyperparams(optax.sgd)(0.1),
    "masked": optax.chain(optax.masked(optax.add_decayed_weights(0.1), lambda tree: {"w": True, "b": False}), SGD),
    "MultiSteps of FP8 states": optax.MultiSteps(FP8_ADAM, 2),
    "ema of FP8 states": optax.chain(FP8_ADAM, optax.ema(0.5)),
    "inject_hyperparams of adamw": optax.inject_hyperparams(adamw)(learning_rate=0.1),
}
AROUND = {
    "before": lambda own: optax.chain(optax.clip_by_global_norm(0.1), own),
    "identity": lambda own: optax.chain(own, optax.identity()),
    "zero_nans": lambda own: optax.chain(own, optax.zero_nans()),
    "apply_if_finite": lambda own: optax.chain(own, optax.apply_if_finite(optax.identity(), 3)),
    "masked": lambda own: optax.chain(own, optax.masked(optax.scale(0.5), {"w": False, "b": True})),
    "partition": lambda own: optax.partition({"codes": own, "values": SGD}, labels),
}


@pytest.mark.parametrize("name", INNER)
def test_transforms_within(name):
    """Inner transforms see masters, and give the bits of float32 weights."""
    params, state, losses = train(optimizer(INNER[name], RECIPE))
    want, _, want_losses = train(INNER[name], primary=False)
    assert losses == want_losses
    assert_bits_equal(np.asarray(state_of(state).masters["w"]), np.asarray(want["w"]))
    assert_codes_of(params["w"], want["w"])
    assert_bits_equal(np.asarray(params["b"]), np.asarray(want["b"]))


@pytest.mark.parametrize("name", AROUND)
def test_transforms_around(name):
    """Outer transforms that leave updates of codes alone equal float32 weights under the same transform."""
    params, state, losses = train(AROUND[name](optimizer(SGD, RECIPE)))
    want, _, want_losses = train(AROUND[name](SGD), primary=False)
    masters = state_of(state).masters
    assert_codes_of(params["w"], masters["w"])
    # XLA contracts a product and a sum to one rounding where no transform is between them.
    np.testing.assert_allclose(losses, want_losses, rtol=1e-6)
    np.testing.assert_allclose(masters["w"], want["w"], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(params["b"], want["b"], rtol=1e-5, atol=1e-7)


def where_matrices(tree):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, tree)


@pytest.mark.parametrize(
    ("after", "text"),
    [
        (optax.clip(1.0), AFTER),
        (optax.scale(-1), AFTER),
        (optax.scale(0.5), AFTER),
        (optax.scale_by_schedule(lambda count: 0.5), AFTER),
        (optax.clip_by_global_norm(1.0), AFTER),
        (optax.clip_by_block_rms(1.0), AFTER),
        (optax.scale_by_sign(), AFTER),
        (optax.centralize(), AFTER),
        (optax.add_noise(0.1, 0.1, 0), AFTER),
        (optax.stateless(lambda updates, _: optax.tree.cast(updates, jnp.bfloat16)), AFTER),
        (optax.masked(optax.clip(1.0), {"w": True, "b": False}), AFTER),
        (optax.conditionally_transform(optax.clip(1.0), lambda count: count < 2), AFTER),
        (optax.add_decayed_weights(0.01), PARTS),
        (optax.scale_by_trust_ratio(), PARTS),
        (optax.masked(optax.scale(-1), where_matrices), PARTS),
        (optax.masked(optax.set_to_zero(), where_matrices), PARTS),
        (optax.ema(0.9), PARTS),
        (optax.trace(0.9), PARTS),
        (optax.keep_params_nonnegative(), "CodesUpdate"),
    ],
)
def test_transforms_after_raise(after, text):
    """Any transform after the optimizer raises while JAX traces."""
    with pytest.raises((TypeError, ValueError), match=text):
        train(optax.chain(optimizer(SGD, RECIPE), after))


@pytest.mark.parametrize(
    ("around", "text"),
    [
        (lambda own: optax.MultiSteps(own, 2), AFTER),
        (lambda own: optax.apply_if_finite(own, 3), r"(?s)output.*PrimaryWeight"),
    ],
)
def test_wrappers_that_make_updates_raise(around, text):
    with pytest.raises(TypeError, match=text):
        train(around(optimizer(SGD, RECIPE)))


@pytest.mark.parametrize("zero", [optax.set_to_zero(), optax.masked(optax.set_to_zero(), {"w": True, "b": False})])
def test_zeros_for_updates(zero):
    """Zeros fit every dtype, so values must be checked: an error, or NaN under jit, where values are unknown."""
    transform = optax.chain(optimizer(SGD, RECIPE), zero)
    with pytest.raises(ValueError, match="update of a PrimaryWeight; pass other transforms to"):
        train(transform, jit=False)
    assert np.isnan(train(transform)[2][1:]).all()


def test_other_updates_raise():
    transform = optimizer(SGD, RECIPE)
    params, state = begin(transform)
    _, grads = value_and_grad(loss_of)(params)
    with pytest.raises(ValueError, match=PARTS):
        optax.apply_updates(params, grads)
    with pytest.raises(ValueError, match=PARTS):
        jax.tree.map(lambda p, g: p + 0.1 * g, params, grads)  # as sharpness-aware minimization does
    updates, _ = transform.update(grads, state, params)
    with pytest.raises(TypeError, match=r"CodesUpdate: \* is not supported on new codes; pass other transforms to"):
        jax.tree.map(lambda p, u: p - 0.1 * u, params, updates)
    with pytest.raises(TypeError, match=r"CodesUpdate: \+ is not supported on new codes; pass other"):
        jax.tree.leaves(updates, is_leaf=lambda node: hasattr(node, "seal"))[1] + 1
    with pytest.raises(ValueError, match=r"update of a PrimaryWeight \(jax\.Array, uint8 \(32, 32\)\) does not fit"):
        optax.apply_updates(jax.tree.map(lambda leaf: leaf[:1], params), updates)
    ints = jax.tree.map(jnp.zeros_like, params)
    with pytest.raises(ValueError, match=r"optimizer: grads\['w'\] \(qshard\.PrimaryWeight, float32 \(32, 32\)\)"):
        transform.update(ints, state, params)


def test_updates_pass_jit_and_cond():
    """Sealed updates pass through separate programs and `cond`."""
    transform = optimizer(SGD, RECIPE)
    params, state = begin(transform)
    _, grads = value_and_grad(loss_of)(params)
    updates, state = jax.jit(transform.update)(grads, state, params)
    none = jax.jit(transform.update)(jax.tree.map(jnp.zeros_like, grads), state, params)[0]
    for apply in (optax.apply_updates, jax.jit(optax.apply_updates)):
        assert_codes_of(apply(params, updates)["w"], state.masters["w"])
    chosen = jax.jit(lambda first: jax.lax.cond(first, lambda: updates, lambda: none))(True)
    moved = jax.device_put(chosen, jax.devices()[0])
    assert_codes_of(optax.apply_updates(params, moved)["w"], state.masters["w"])
    assert_codes_of(jax.tree.map(lambda p, u: p + u, params, updates)["w"], state.masters["w"])
    host = optax.apply_updates(jax.tree.map(np.asarray, params), updates)
    assert_codes_of(host["w"], state.masters["w"])


def test_updates_leave_shard_map():
    """Updates are pytrees like parameters, and have the same specs."""
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    own = optimizer(SGD, "CurrentScaling", spec=P("fsdp"), axis_name="fsdp")
    values = {"w": jnp.array(VALUES["w"])}
    cut, codes, masters = {"w": P("fsdp")}, own.specs(values, mesh), PrimaryState({"w": P("fsdp")}, P())
    run = functools.partial(jax.shard_map, mesh=mesh)
    state = own.init(values)
    params = jax.jit(run(own.recast, in_specs=(masters, cut), out_specs=codes))(state, values)
    update = run(own.update, in_specs=(cut, masters, codes), out_specs=(codes, masters))
    updates, state = jax.jit(update)(values, state, params)
    params = jax.jit(run(optax.apply_updates, in_specs=(codes, codes), out_specs=codes))(params, updates)
    want = PrimaryWeight.of(quantize(state.masters["w"], "FP8_E4M3[nonfinite=nan]"))
    jax.tree.map(lambda a, b: assert_bits_equal(np.asarray(a), np.asarray(b)), params["w"], want)


def test_equinox_apply_updates_raises():
    """It maps over updates first; `optax.apply_updates` works with equinox models."""
    eqx = pytest.importorskip("equinox")
    transform = optimizer(SGD, RECIPE)
    params, state = begin(transform)
    updates, _ = transform.update(value_and_grad(loss_of)(params)[1], state, params)
    with pytest.raises(ValueError, match=PARTS):
        eqx.apply_updates(params, updates)


TREE_FUNCTIONS = {
    "norm": optax.tree.norm,
    "l1": functools.partial(optax.tree.norm, ord=1),
    "sum": optax.tree.sum,
    "cast": lambda tree: optax.tree.cast(tree, jnp.bfloat16),
    "zeros": lambda tree: optax.tree.zeros_like(tree, dtype=jnp.float32),
    "scale": lambda tree: optax.tree.scale(0.9, tree),
    "add_scale": lambda tree: optax.tree.add_scale(tree, 0.1, tree),
    "incremental_update": lambda tree: optax.incremental_update(tree, tree, 0.1),
    "ema": lambda tree: optax.ema(0.9).update(tree, optax.ema(0.9).init(tree)),
    "mean": lambda tree: jax.tree.map(jnp.mean, tree),
    "bias_correction": lambda tree: optax.tree.bias_correction(tree, 0.9, jnp.int32(1)),
    "adam": optax.adam(0.1, mu_dtype=jnp.bfloat16).init,
}
LOOPS = {
    "loop": lambda tree: jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree))),
    "matrices": lambda tree: sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree) if leaf.ndim > 1) + jnp.float32(0),
    "reduce": lambda tree: jax.tree.reduce(lambda a, b: a + jnp.sum(jnp.square(b)), tree, 0.0),
    "norms": lambda tree: jnp.linalg.norm(jnp.array([jnp.linalg.norm(leaf) for leaf in jax.tree.leaves(tree)])),
    "max": optax.tree.max,
    "vdot": lambda tree: optax.tree.vdot(tree, tree),
    "ravel": lambda tree: jax.flatten_util.ravel_pytree(tree)[0],
}


@pytest.mark.parametrize(
    ("name", "recipe"), [*((name, "MXFP8") for name in TREE_FUNCTIONS), ("norm", "CurrentScaling"), ("norm", "NVFP4")]
)
def test_functions_of_trees_raise(name, recipe):
    own = optimizer(SGD, recipe)
    params = own.recast(own.init(fresh()), fresh())
    for run in (TREE_FUNCTIONS[name], jax.jit(TREE_FUNCTIONS[name])):
        with pytest.raises(TypeError, match=CODES):
            run(params)


@pytest.mark.parametrize("name", LOOPS)
def test_loops_over_leaves_raise(name):
    """JAX does not promote float8, the dtype of `guard`."""
    params, _ = begin(optimizer(SGD, RECIPE))
    for run in (LOOPS[name], jax.jit(LOOPS[name])):
        with pytest.raises(ValueError, match=r"float8_e5m2.* have no available implicit dtype promotion path"):
            run(params)


def test_loops_with_casts_are_infinite():
    params, _ = begin(optimizer(SGD, RECIPE))
    assert np.isinf(sum(jnp.sum(leaf.astype(jnp.float32) ** 2) for leaf in jax.tree.leaves(params)))
    assert not all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params))


def test_functions_that_compute_nothing():
    """Zeros, choices, comparisons, indices and copies of codes are right."""
    params, state = begin(optimizer(SGD, RECIPE))
    assert not np.any(dequantize_tree(jax.tree.map(jnp.zeros_like, params))["w"])
    chosen = optax.periodic_update(params, params, jnp.int32(1), 2)
    assert_codes_of(chosen["w"], state.masters["w"])
    assert jax.tree.all(jax.tree.map(lambda a, b: jnp.array_equal(a, b), params, chosen))
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), params, params)
    assert_codes_of(jax.tree.map(lambda leaf: leaf[1], stacked)["w"], state.masters["w"])


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_dequantize_tree(kind):
    """Norms, casts and averages of its values are right; values are sharded as codes are."""
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        params = jax.device_put(fresh(), {"w": NamedSharding(mesh, P(None, "fsdp")), "b": NamedSharding(mesh, P())})
        own = optimizer(SGD, RECIPE, spec=P(None, "fsdp"))
        params = own.recast(own.init(params), params)
        with pytest.raises(TypeError, match=CODES):
            jax.jit(optax.tree.norm)(params)
        values = jax.jit(dequantize_tree)(params)
        assert values["w"].sharding.is_equivalent_to(NamedSharding(mesh, P(None, "fsdp")), 2)
        norm = jax.jit(lambda params: optax.tree.norm(dequantize_tree(params)))(params)
    want = quantize(VALUES["w"], "MXFP8_32x32").dequantize()
    assert_bits_equal(np.asarray(values["w"]), np.asarray(want))
    np.testing.assert_allclose(norm, np.linalg.norm(want), rtol=1e-5)  # Devices sum in another order.
    assert dequantize_tree(params, jnp.bfloat16)["w"].dtype == jnp.bfloat16
    ema = optax.ema(0.9, debias=False)  # Of weights, as for evaluation.
    average, _ = ema.update(values, ema.init(values))
    np.testing.assert_allclose(average["w"], np.asarray(want) / 10, rtol=1e-6)
    average = optax.incremental_update(values, {"w": jnp.zeros((32, 32)), "b": jnp.zeros(32)}, 0.5)
    assert_bits_equal(np.asarray(average["w"]), np.asarray(want) / 2)
    with pytest.raises(TypeError, match=r"dequantize_tree: dtype .*int8"):
        dequantize_tree(params, jnp.int8)


def test_a_penalty_on_weights():
    """Within `value_and_grad`, the gradient of dequantized values is that of the weight."""
    params, _ = begin(optimizer(SGD, RECIPE))
    penalty = lambda params: 0.5 * optax.tree.norm(dequantize_tree(params), squared=True)  # noqa: E731
    value, grads = jax.jit(value_and_grad(penalty))(params)
    want = jax.value_and_grad(penalty)(dequantize_tree(params))
    assert_bits_equal(np.asarray(grads["w"]), np.asarray(want[1]["w"]))
    np.testing.assert_allclose(value, want[0], rtol=1e-6)  # XLA sums in another order under jit.
    with pytest.raises(TypeError, match=CODES):
        value_and_grad(optax.tree.norm)(params)
    of_zero = CodedWeight(params["w"].codes, None, object())
    with pytest.raises(TypeError, match=r"dequantize_tree: tree \(of type CodedWeight\) has a weight of ZeRO, whose"):
        dequantize_tree({"w": of_zero})


def test_derivatives_of_codes_raise():
    """Also where JAX gives integers no gradient, and only other leaves have one."""
    eqx = pytest.importorskip("equinox")
    params, _ = begin(optimizer(SGD, RECIPE))
    for differentiate in (functools.partial(jax.grad, allow_int=True), eqx.filter_grad):
        with pytest.raises(TypeError, match="linear: w is quantized, and codes have no gradient; exclude it from"):
            differentiate(loss_of)(params)


@pytest.mark.parametrize("kind", ["QuantizedArray", "PrimaryWeight"])
@pytest.mark.parametrize(
    ("call", "op"),
    [
        (lambda q: q + 1, r"\+"),
        (lambda q: 1 - q, "-"),
        (lambda q: jnp.ones((32, 32)) @ q, "@"),
        (lambda q: np.ones((32, 32)) * q, r"\*"),
        (lambda q: -q, "-"),
        (lambda q: abs(q), "abs"),
        (np.asarray, "conversion to an array"),
    ],
)
def test_arithmetic_on_codes_raises(kind, call, op):
    q = quantize(VALUES["w"], "NVFP4_16x16")
    text = rf"{kind}: {op} is not supported on codes; call .dequantize\(\) and use the result"
    with pytest.raises(TypeError, match=text):
        call(q if kind == "QuantizedArray" else PrimaryWeight.of(q))


@pytest.mark.filterwarnings("ignore:Sharding info not provided when restoring:UserWarning")
def test_a_state_that_is_restored_without_a_target(tmp_path):
    """A restored state without a target consists of dicts; the error says so, and names the target."""
    ocp = pytest.importorskip("orbax.checkpoint")
    own = optimizer(optax.adam(0.1), RECIPE)
    _, state = begin(own)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        dicts = checkpointer.restore(tmp_path / "state")
        again = checkpointer.restore(tmp_path / "state", jax.eval_shape(own.init, fresh()))
    with pytest.raises(TypeError, match=r"optimizer: state \(of type dict\) is not a PrimaryState; pass the result of"):
        own.recast(dicts, fresh())
    jax.tree.map(lambda a, b: assert_bits_equal(np.asarray(a), np.asarray(b)), again, state)
    assert jax.tree.structure(again) == jax.tree.structure(state)
    assert_codes_of(own.recast(again, fresh())["w"], state.masters["w"])


@pytest.mark.parametrize(
    "mode",
    [
        functools.partial(jax.debug_nans, True),
        functools.partial(jax.numpy_rank_promotion, "raise"),
        functools.partial(jax.numpy_dtype_promotion, "strict"),
        jax.checking_leaks,
    ],
    ids=["debug_nans", "rank_promotion", "dtype_promotion", "checking_leaks"],
)
def test_updates_in_modes_of_jax(mode):
    """Eager, and in separate programs."""
    with mode():
        own = optimizer(SGD, RECIPE)
        params, state = begin(own)
        updates, state = jax.jit(own.update)(fresh(), state, params)
        for apply in (optax.apply_updates, jax.jit(optax.apply_updates)):
            assert_codes_of(apply(params, updates)["w"], state.masters["w"])
