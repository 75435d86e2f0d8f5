"""`switch_recipe` in JAX: a model that was converted with the new recipe, and its programs, are the same."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import qshard.jax as qj
from qshard.recipes import MXFP8, NVFP4, CurrentScaling
from support.awkward import assert_bits_equal
from support.jax_zero import RECIPES, formats_of
from support.jax_zero import params_of as zero_params

VALUES = NVFP4(forward="bf16", dgrad="bf16", wgrad="bf16")
ADAMW = qj.adamw(0.01)
SHAPES = {"up": (128, 256), "down": (256, 128)}


def params_of():
    keys = zip(jax.random.split(jax.random.key(0)), SHAPES.items(), strict=True)
    return {name: jax.random.normal(key, shape) / 16 for key, (name, shape) in keys}


def assert_same(mine, other):
    for one, two in zip(jax.tree.leaves(mine), jax.tree.leaves(other), strict=True):
        assert_bits_equal(np.asarray(one), np.asarray(two))


@functools.partial(jax.jit, static_argnums=0)
def step_of(policy, params, state, x, seed):
    def loss_of(params):
        weights, h = policy(params), x
        for i, name in enumerate(SHAPES):
            h = weights[name].linear(h, weight_layout="KN", seed=seed + i)
        return jnp.mean(h.astype(jnp.float32) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    updates, state = ADAMW.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


def train(policy, params, state, x, steps=2):
    losses = []
    for step in range(steps):
        params, state, loss = step_of(policy, params, state, x, jnp.uint32([2 * step, 0]))
        losses.append(loss)
    return params, state, losses


@pytest.mark.each_value
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
@pytest.mark.parametrize("then", ["MXFP8", VALUES], ids=str)
def test_policies_on_eight_devices(kind, then):
    """The program is that of a new policy, so nothing is traced again after the first step."""
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(kind,), devices=jax.devices("cpu")[:8])
    with jax.set_mesh(mesh):
        put = functools.partial(jax.device_put, device=NamedSharding(mesh, P("fsdp")))
        params, x = jax.tree.map(put, params_of()), put(jax.random.normal(jax.random.key(1), (256, 128)))
        policy = qj.Policy.of(params, "NVFP4", gather_axis="fsdp", grad_dtype="float32")
        params, state, _ = train(policy, params, ADAMW.init(params), x)
        new = qj.switch_recipe(policy, then)
        mine = train(new, params, state, x)
        traced = step_of._cache_size()
        train(new, params, state, x, steps=4)
        assert step_of._cache_size() == traced
        other = qj.Policy.of(params, then, gather_axis="fsdp", grad_dtype="float32")
        for name, weight in other(params).items():
            assert new(params)[name].dot_general == weight.dot_general
        assert_same(mine, train(other, params, state, x))


def test_patterns_of_policies():
    """Weights without a pattern keep their recipe, and one without a recipe keeps its sharding."""
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:2])
    params = jax.device_put(params_of(), NamedSharding(mesh, P("fsdp")))
    policy = qj.Policy.of(params, "NVFP4", gather_axis="fsdp")
    late = qj.switch_recipe(policy, {"up": None})
    assert isinstance(late(params)["up"], jax.Array)
    assert late(params)["down"].dot_general == policy(params)["down"].dot_general
    assert jax.tree.leaves(qj.switch_recipe(late, None)(params)) == jax.tree.leaves(params)
    again = qj.switch_recipe(late, "MXFP8")
    other = qj.Policy.of(params, "MXFP8", gather_axis="fsdp")
    assert all(again(params)[name].dot_general == other(params)[name].dot_general for name in params)
    assert policy(params)["up"].dot_general.recipe == NVFP4()
    with pytest.raises(ValueError, match="switch_recipe: pattern 'out' matches no layer"):
        qj.switch_recipe(policy, {"out": "MXFP8"})


@pytest.mark.parametrize("then", ["MXFP8", "DelayedScaling", None])
def test_primary_weights(then):
    """`recast` casts masters to the codes of the new recipe; without one, masters are the parameters."""
    values, x = params_of(), jax.random.normal(jax.random.key(1), (64, 256))
    first = qj.optimizer(ADAMW, "NVFP4")
    state = first.init(values)
    params = first.recast(state, values)
    loss = lambda params: jnp.mean(qj.linear(x, params["up"], "NVFP4", seed=1) ** 2)  # noqa: E731
    _, grads = qj.value_and_grad(loss)(params)
    updates, state = first.update(grads, state, params)
    params = optax.apply_updates(params, updates)
    if then is None:
        masters, inner = state
        updates, _ = ADAMW.update(jax.tree.map(jnp.ones_like, masters), inner, masters)
        assert jax.tree.map(jnp.shape, optax.apply_updates(masters, updates)) == SHAPES
        return
    late = qj.optimizer(ADAMW, then)
    states = jax.tree.map(lambda _: qj.init_delayed(then), values) if then == "DelayedScaling" else None
    mine = late.recast(state, params, states=states)
    assert_same(mine, late.recast(late.init(state.masters), state.masters, states=states))
    assert {each.format for each in mine.values()} == {late.recipe.weight}


def test_zero():
    """Lengths of slices depend on formats, so a switch joins the masters and cuts them again."""
    params = zero_params()
    old, *others = [qj.plan_zero(params, formats_of(recipe), 3, "data") for recipe in RECIPES.values()]
    for new in others:
        assert_same(new.shard(old.unshard(old.shard(params))), new.shard(params))


@pytest.mark.parametrize("then", ["MXFP8", "DelayedScaling", None])
def test_nnx(then):
    nnx = pytest.importorskip("flax.nnx")
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:2])

    def of(recipe):
        rngs = nnx.Rngs(0)
        model = nnx.Sequential(nnx.Linear(64, 64, rngs=rngs), nnx.relu, nnx.Linear(64, 64, rngs=rngs))
        for layer in (model.layers[0], model.layers[2]):
            layer.kernel.set_value(jax.device_put(layer.kernel.get_value(), NamedSharding(mesh, P("fsdp"))))
        if recipe is not None:
            qj.convert(model, recipe, gather_axis="fsdp", rngs=nnx.Rngs(qshard=0))
        return model

    @nnx.jit
    def step(model, x):
        wrt = nnx.DiffState(0, nnx.Any(nnx.Param, qj.nnx.ScalingState))
        return nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2), argnums=wrt)(model)

    x = jax.random.normal(jax.random.key(1), (64, 64))
    with jax.set_mesh(mesh):
        model, other = of("NVFP4"), of(then)
        step(model, x)
        assert qj.switch_recipe(model, then) is model
        loss, grads = step(model, x)
        want, want_grads = step(other, x)
        assert_same((loss, nnx.state(grads, nnx.Param)), (want, nnx.state(want_grads, nnx.Param)))
        assert nnx.graphdef(model) == nnx.graphdef(other)


def test_nnx_experts_streams_and_patterns():
    nnx = pytest.importorskip("flax.nnx")
    moe = qj.nnx.MoE(32, 32, num_experts=2, top_k=1, recipe="NVFP4", shared_intermediate_size=32, rngs=nnx.Rngs(0))
    stream = moe.experts.rngs
    qj.switch_recipe(moe, {"shared_*": CurrentScaling(), "": NVFP4(weight="NVFP4_16x16[nonfinite=nan]")})
    assert moe.shared_w13.dot_general.recipe == CurrentScaling()
    assert moe.experts.rngs is stream or moe.experts.recipe == NVFP4()
    qj.switch_recipe(moe, None)
    assert moe.experts.recipe is None
    assert moe.shared_w13.dot_general is jax.lax.dot_general
    with pytest.raises(ValueError, match=r"switch_recipe: model .MoE. has no converted layer"):
        qj.switch_recipe(moe, "MXFP8")
    model = nnx.Sequential(nnx.Linear(32, 32, rngs=nnx.Rngs(0)), nnx.Linear(20, 32, rngs=nnx.Rngs(0)))
    qj.convert(model, "CurrentScaling")
    for recipe, text in ((MXFP8(), r"layers.1.kernel \(20, 32\)"), ("NVFP4", r"\(20, 32\)|needs `rngs`")):
        with pytest.raises(ValueError, match=text):
            qj.switch_recipe(model, recipe)
    with pytest.raises(ValueError, match="needs `rngs`"):
        qj.switch_recipe(model, {"layers.0": "NVFP4"})
    wide = qj.convert(nnx.Sequential(*(nnx.Linear(20, 20, rngs=nnx.Rngs(0)) for _ in range(3))), "CurrentScaling")
    with pytest.raises(ValueError, match=r"layers.0.kernel .*; layers.0 \(do not fit; 2 more like these\)$"):
        qj.switch_recipe(wide, "MXFP8")
    assert [layer.dot_general.recipe for layer in model.layers] == [CurrentScaling()] * 2
    with pytest.raises(TypeError, match=r"switch_recipe: model .* is not a Policy or an nnx.Module"):
        qj.switch_recipe(params_of(), "MXFP8")


def test_convert_again_does_not_convert_back():
    """None in a pattern would leave a converted layer in its recipe."""
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Sequential(*(nnx.Linear(128, 128, rngs=nnx.Rngs(0)) for _ in range(2)))
    recipe = {"layers.0": None, "*": "CurrentScaling"}
    qj.convert(model, "MXFP8")
    with pytest.raises(ValueError, match=r"^convert: layers.0 has MXFP8\(\), .* call switch_recipe\("):
        qj.convert(model, recipe)
    qj.convert(qj.switch_recipe(model, {"layers.0": None}), recipe)
    assert [getattr(layer.dot_general, "recipe", None) for layer in model.layers] == [None, CurrentScaling()]
