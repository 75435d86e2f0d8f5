"""`MoE` of flax nnx and linen: both compute `grouped_mlp`, train, and share experts over devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import qshard.jax as qj
import qshard.jax.linen as ql
import qshard.jax.nnx as qn
from qshard.recipes import NVFP4
from support.awkward import assert_bits_equal
from support.formats import RECIPES

H, WIDE, E, K = 32, 64, 4, 2
SIZES = {"num_experts": E, "top_k": K}
DEEPSEEK = {"score_function": "sigmoid", "scale": 2.5, "expert_bias": True, "shared_intermediate_size": 32}


def values(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


X = values(3, 16, H)
TARGET = values(3, 16, H, seed=1)


def loss_of(y):
    return jnp.square(X + y - TARGET).mean()


def variables_of(moe):
    """Return the linen variables of an nnx layer."""
    params = {name: getattr(moe, name).get_value() for name in ("router", "w13", "w2")}
    shared = ("shared_w13", "shared_w2")
    params |= {name: {"kernel": getattr(moe, name).kernel.get_value()} for name in shared if getattr(moe, name)}
    bias = {} if moe.expert_bias is None else {ql.EXPERT_BIAS: {"bias": moe.expert_bias.get_value()}}
    return {"params": params, **bias}


def test_nnx_and_linen_are_grouped_mlp():
    """With every option of DeepSeek-V3, in both flax APIs and by hand."""
    moe = qn.MoE(H, WIDE, recipe="CurrentScaling", rngs=nnx.Rngs(0), **SIZES, **DEEPSEEK)
    moe.expert_bias.set_value(jnp.arange(4.0) / 10)
    y, logits = nnx.jit(lambda moe, x: moe(x, return_router_logits=True))(moe, X)
    linen = ql.MoE(WIDE, recipe="CurrentScaling", **SIZES, **DEEPSEEK)
    assert_bits_equal(np.asarray(jax.jit(linen.apply)(variables_of(moe), X)), np.asarray(y))
    shapes = jax.eval_shape(linen.init, jax.random.key(0), X)
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, variables_of(moe))

    @jax.jit
    def by_hand(router, w13, w2, up, down):
        indices, weights = qj.topk_routing(X @ router, K, score_function="sigmoid", scale=2.5, bias=jnp.arange(4) / 10)
        y = qj.grouped_mlp(X, indices, weights, w13, w2, "CurrentScaling", weight_layout="KN")
        linear = functools.partial(qj.linear, recipe="CurrentScaling", weight_layout="KN")
        return y + linear(qj.swiglu(*jnp.split(linear(X, up), 2, -1)), down)

    kernels = moe.router, moe.w13, moe.w2, moe.shared_w13.kernel, moe.shared_w2.kernel
    want = by_hand(*(kernel.get_value() for kernel in kernels))
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5 * float(jnp.abs(want).max()))  # XLA fuses other sums.
    np.testing.assert_allclose(logits, X @ kernels[0].get_value(), rtol=1e-5, atol=1e-5)


often = [pytest.param(name, marks=[] if name == "NVFP4" else pytest.mark.slow) for name in (*RECIPES, None)]


@pytest.mark.parametrize("name", often)
def test_nnx_trains(name):
    """The loss falls, and every expert and the router learn; `convert` gives the recipe and its state."""
    model = qn.MoE(H, WIDE, recipe=None, rngs=nnx.Rngs(0), **SIZES)
    if name is not None:
        model = qj.convert(model, RECIPES[name], rngs=nnx.Rngs(1))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    wrt = nnx.DiffState(0, nnx.Any(nnx.Param, qn.ScalingState))
    before = jax.tree.map(np.asarray, nnx.state(model, nnx.Param))

    @nnx.jit
    def step(model, optimizer):
        loss, grads = nnx.value_and_grad(lambda model: loss_of(model(X)), argnums=wrt)(model)
        grads, amaxes = nnx.split_state(grads, nnx.Param, qn.ScalingState)
        optimizer.update(model, grads)
        if name == "DelayedScaling":
            nnx.update(model, qj.update_delayed(nnx.state(model, qn.ScalingState), amaxes, RECIPES[name]))
        return loss

    losses = [float(step(model, optimizer)) for _ in range(12)]
    assert losses[-1] < 0.8 * losses[0], losses
    moved = jax.tree.map(
        lambda a, b: (np.asarray(a) != b).reshape(len(b), -1).any(1), nnx.state(model, nnx.Param), before
    )
    assert all(part.all() for part in jax.tree.leaves(moved))


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in ("DelayedScaling", "NVFP4")])
def test_linen_trains(name):
    """States and seeds are those of `DotGeneral`."""
    recipe = RECIPES[name]
    model = ql.MoE(WIDE, recipe=recipe, **SIZES, shared_intermediate_size=32)
    variables = model.init({"params": jax.random.key(0), "qshard": jax.random.key(1)}, X)
    optimizer = optax.adam(1e-2)
    state = optimizer.init(variables["params"])

    @jax.jit
    def step(variables, state, key):
        call = lambda variables: loss_of(model.apply(variables, X, rngs={"qshard": key}))  # noqa: E731
        loss, grads = jax.value_and_grad(call)(variables)
        updates, state = optimizer.update(grads["params"], state)
        new = {"params": optax.apply_updates(variables["params"], updates)}
        if recipe.stateful:
            new[ql.STATES] = qj.update_delayed(variables[ql.STATES], grads[ql.STATES], recipe)
        return loss, new, state

    losses = []
    for key in jax.random.split(jax.random.key(2), 12):
        loss, variables, state = step(variables, state, key)
        losses.append(float(loss))
    assert losses[-1] < 0.8 * losses[0], losses
    if recipe.stateful:
        assert variables[ql.STATES]["w13"].activation.scale.shape == (E,)


@pytest.mark.slow
@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_expert_parallel(api):
    """A layer that was created with all experts runs in `shard_map` with those of each device."""
    mesh = jax.make_mesh((4,), ("ep",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    x, experts = values(16, H), P("ep")
    moe = qn.MoE(H, WIDE, recipe="CurrentScaling", rngs=nnx.Rngs(0), ep_axis="ep", **SIZES)
    alone = qn.MoE(H, WIDE, recipe="CurrentScaling", rngs=nnx.Rngs(0), **SIZES)
    if api == "nnx":
        graph, state = nnx.split(moe)
        specs = jax.tree_util.tree_map_with_path(lambda path, _: P() if "router" in str(path) else experts, state)
        run = lambda state, x: nnx.merge(graph, state)(x)  # noqa: E731
    else:
        layer = ql.MoE(WIDE, recipe="CurrentScaling", options={"ep_axis": "ep"}, **SIZES)
        state = layer.init(jax.random.key(0), x)
        assert state["params"]["w13"].shape == (E, H, 2 * WIDE)
        state = variables_of(alone)
        specs = {"params": {"router": P(), "w13": experts, "w2": experts}}
        run = layer.apply
    y = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(specs, experts), out_specs=experts))(state, x)
    want = nnx.jit(lambda moe, x: moe(x))(alone, x)
    assert np.linalg.norm(y - want) <= 2e-6 * np.linalg.norm(want)  # fp32 sums in another order.


def test_convert():
    """`convert` gives experts and the shared expert a recipe, and their sharding; the router stays."""
    model = qn.MoE(H, WIDE, recipe=None, rngs=nnx.Rngs(0), shared_intermediate_size=32, **SIZES)
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    for weight, spec in ((model.w13, P(None, "fsdp")), (model.w2, P(None, "fsdp"))):
        weight.set_value(jax.device_put(weight.get_value(), NamedSharding(mesh, spec)))
    assert qj.convert(model, {"shared*": None, "*": "CurrentScaling"}, gather_axis="fsdp") is model
    assert model.experts.recipe == RECIPES["CurrentScaling"]
    assert dict(model.experts.options)["gather_axis"] == "fsdp"
    assert not isinstance(model.shared_w13.dot_general, qj.DotGeneral)
    with jax.set_mesh(mesh):
        assert nnx.jit(lambda model, x: model(x))(model, X).shape == X.shape
    model.w2.set_value(jax.device_put(model.w2.get_value(), NamedSharding(mesh, P(None, None, "fsdp"))))
    with pytest.raises(ValueError, match=r"has w13 sharded as .* and w2 as .*; shard both along the same axes"):
        qj.convert(model, "CurrentScaling", gather_axis="fsdp")
    narrow = qn.MoE(H, 8, recipe=None, rngs=nnx.Rngs(0), **SIZES)
    with pytest.raises(ValueError, match=r"convert: w13 \(4, 32, 16\) has K = 32 and N = 16, which are no whole"):
        qj.convert(narrow, "MXFP8")


def test_layers_of_a_scan():
    """A module that stacks three layers has states and streams for each, also after `switch_recipe`."""

    @nnx.vmap(in_axes=0, out_axes=0)
    def stacked(rngs):
        return qn.MoE(H, WIDE, recipe=None, rngs=rngs, **SIZES)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def run(layer, x):
        return layer(x)

    moe = qj.convert(stacked(nnx.Rngs(0).split(3)), "DelayedScaling")
    assert moe.experts.w13_state.get_value().weight.scale.shape == (3, E)
    wrt = nnx.DiffState(0, qn.ScalingState)
    seen = nnx.grad(lambda moe: run(moe, X).sum(), argnums=wrt)(moe)["experts"]["w13_state"].get_value()
    np.testing.assert_array_equal(seen.weight.observed.amax, jnp.abs(moe.w13[...]).max((2, 3)))
    for recipe in ("NVFP4", NVFP4(weight="NVFP4_16x16[nonfinite=nan]"), "MXFP8"):
        qj.switch_recipe(moe, recipe, rngs=nnx.Rngs(0))
        assert moe.experts.rngs is None or moe.experts.rngs.count.shape == (3,)
        assert moe.experts.w13_state is None
    y, want = nnx.jit(run)(moe, X), X
    for layer in range(3):
        one = jax.tree.map(lambda a, layer=layer: a[layer], nnx.state(moe))
        want = nnx.merge(nnx.graphdef(moe), one)(want)
    np.testing.assert_allclose(y, want, rtol=1e-3, atol=1e-3 * np.abs(want).max())
    assert qj.switch_recipe(moe, None).experts.recipe is None


def test_what_is_refused():
    with pytest.raises(
        TypeError, match=r"MoE: ep_group \('ep'\) is not an option; pass one of weight_spec, gather_axis"
    ):
        qn.MoE(H, WIDE, recipe="MXFP8", rngs=nnx.Rngs(0), ep_group="ep", **SIZES)
    with pytest.raises(TypeError, match="MoE: ep_group"):
        ql.MoE(WIDE, recipe="MXFP8", options={"ep_group": "ep"}, **SIZES).init(jax.random.key(0), X)
    with pytest.raises(ValueError, match="topk_routing: top_k"):
        qn.MoE(H, WIDE, recipe="MXFP8", rngs=nnx.Rngs(0), num_experts=2, top_k=3)
    with pytest.raises(ValueError, match=r"grouped_mlp: ep_axis \('ep'\) is not an axis of an enclosing jax.shard_map"):
        qn.MoE(H, WIDE, recipe="MXFP8", rngs=nnx.Rngs(0), ep_axis="ep", **SIZES)(X)
