"""`Policy` for pytrees, equinox models and meshes, and its errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from qshard.jax import Policy, Weight, linear
from qshard.recipes import MXFP8, BlockScaling, CurrentScaling
from support.awkward import assert_bits_equal
from support.hlo import collectives

eqx = pytest.importorskip("equinox")
RECIPES = [CurrentScaling(), BlockScaling(), MXFP8()]
recipes = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)


def values(*shape, seed=0):
    """Return small integers: fp32 sums are exact in any order, but FP8 still rounds."""
    return jnp.asarray(np.random.default_rng(seed).integers(-3, 4, shape), jnp.float32)


X, DY = values(64, 64), values(64, 96, seed=2)
PARAMS = {"up": values(64, 96, seed=1), "heads": values(64, 3, 32, seed=3), "scale": values(64), "steps": jnp.arange(4)}


def assert_alike(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_bits_equal(np.asarray(a), np.asarray(b))


def step(function, x, w, dy):
    y, vjp = jax.vjp(function, x, w)
    return y, *vjp(dy)


def expected(recipe, x=X, w=PARAMS["up"].T, dy=DY):
    return jax.jit(functools.partial(step, functools.partial(linear, recipe=recipe)))(x, w, dy)


@recipes
def test_products(recipe):
    """`x @ w`, `linear` and `einsum` of a `Weight` have the bits of `linear`, within a differentiated function."""
    policy = Policy.of(PARAMS, recipe)
    weights = policy(PARAMS)
    assert [name for name, leaf in weights.items() if isinstance(leaf, Weight)] == ["heads", "up"]
    y, dx, dw = expected(recipe)
    for product, params, name, like in [
        (lambda x, w: x @ w, PARAMS, "up", dw.T),
        (lambda x, w: w.linear(x), PARAMS | {"up": PARAMS["up"].T}, "up", dw),
        (lambda x, w: w.einsum("...d,dn->...n", x), PARAMS, "up", dw.T),
    ]:
        policy = Policy.of(params, recipe, otherwise="raise")
        tree = {name: params[name]}
        own = Policy.of(tree, recipe)
        got = jax.jit(functools.partial(step, lambda x, tree: product(x, own(tree)[name])))(X, tree, DY)  # noqa: B023
        assert_alike(got, (y, dx, {name: like}))
    heads = weights["heads"].einsum("td,dhk->thk", X)
    assert_alike(heads.reshape(64, 96), linear(X, PARAMS["heads"].reshape(64, 96).T, recipe))
    assert_alike(np.asarray(X) @ weights["up"], y)


@recipes
def test_equinox(recipe):
    """A model for one example, under `vmap`, runs one product of all rows per layer, forward and backward."""
    model = eqx.nn.Linear(64, 96, use_bias=False, key=jax.random.key(0))
    model = eqx.tree_at(lambda layer: layer.weight, model, PARAMS["up"].T)
    policy = Policy.of(model, recipe)

    def rows(x, model):
        return jax.vmap(policy(model))(x)

    y, dx, dmodel = eqx.filter_jit(functools.partial(step, rows))(X, model, DY)
    assert_alike((y, dx, dmodel.weight), expected(recipe))


def test_equinox_attention_and_perceptron():
    """Nested layers and batches of sequences work; an indexed table raises with its name."""
    key = jax.random.key(0)
    attention = eqx.nn.MultiheadAttention(4, 64, key=key)
    policy = Policy.of(attention, "MXFP8")
    weights = policy(attention)
    assert weights.query_proj.weight.name == "query_proj.weight"
    x = values(2, 32, 64)
    got = eqx.filter_jit(lambda x: jax.vmap(lambda x: weights(x, x, x))(x))(x)
    matrix = {name: getattr(attention, f"{name}_proj").weight for name in ("query", "key", "value", "output")}
    query, key_heads, value = (linear(x, matrix[name], "MXFP8").reshape(2, 32, 4, 16) for name in list(matrix)[:3])
    want = linear(jax.nn.dot_product_attention(query, key_heads, value).reshape(2, 32, 64), matrix["output"], "MXFP8")
    assert jnp.linalg.norm(got - want) < 0.05 * jnp.linalg.norm(want)  # Softmax in another order, then a cast.
    assert jnp.linalg.norm(got - jax.vmap(lambda x: attention(x, x, x))(x)) > 0
    table = eqx.nn.Embedding(32, 64, key=key)
    with pytest.raises(
        TypeError, match=r"Weight: weight \(32, 64\) is used other than as the weight of a product; leave it out"
    ):
        Policy.of(table, "MXFP8")(table)(jnp.asarray(3))


def test_a_weight_is_no_array():
    """Uses other than products raise with a remedy; NumPy would wrap a `Weight` as an object."""
    policy = Policy.of({"w": values(32, 64)}, "MXFP8")
    assert str(policy) == "Policy({'w': MXFP8()})"
    weight = policy({"w": values(32, 64)})["w"]
    for use in (np.asarray, lambda w: 2 * w, lambda w: w < 0):
        with pytest.raises(TypeError, match=r"Weight: w \(32, 64\) is used other than as the weight of a product"):
            use(weight)
    with pytest.raises(AttributeError, match=r"Weight: w \(32, 64\) has no T; for x @ w.T write weight.linear\(x\)"):
        weight.T  # noqa: B018


def test_scan_over_layers():
    """Stacked weights keep their spec in `scan`, without the scanned axis."""
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    stacked = jax.device_put({"w": values(3, 64, 64)}, NamedSharding(mesh, P(None, "fsdp")))
    policy = Policy.of(stacked, "MXFP8", gather_axis="fsdp")
    assert policy(stacked)["w"].dot_general.options["weight_spec"].spec == P(None, "fsdp", None)

    @jax.jit
    def run(stacked, x):
        return jax.lax.scan(lambda x, weights: (x @ weights["w"], None), x, policy(stacked))[0]

    with jax.set_mesh(mesh):
        got = run(stacked, X)
    want = functools.reduce(lambda x, i: linear(x, np.asarray(stacked["w"])[i].T, "MXFP8"), range(3), X)
    assert_alike(got, want)


@pytest.mark.parametrize("mode", ["Auto", "Explicit", "shard_map"])
def test_fsdp(mode):
    """Codes are gathered and gradients scattered by the policy alone, without a change in the function."""
    kind = AxisType.Explicit if mode == "Explicit" else AxisType.Auto
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(kind,))
    x, params, dy = values(256, 64), {"up": values(64, 256, seed=1)}, values(256, 256, seed=2)
    rows = NamedSharding(mesh, P("fsdp"))
    want = expected(CurrentScaling(), x, params["up"].T, dy)
    with jax.set_mesh(mesh):
        x, params, dy = jax.device_put((x, params, dy), rows)
        local = {"axis_name": "fsdp"} if mode == "shard_map" else {}
        policy = Policy.of(params, CurrentScaling(), gather_axis="fsdp", **local)

        def program(x, params, dy):
            return step(lambda x, params: x @ policy(params)["up"], x, params, dy)

        if mode == "shard_map":
            program = jax.shard_map(program, in_specs=P("fsdp"), out_specs=P("fsdp"))
        compiled = jax.jit(program).lower(x, params, dy).compile()
        y, dx, grads = compiled(x, params, dy)
    assert_alike((y, dx), want[:2])
    np.testing.assert_allclose(grads["up"], want[2].T, rtol=1e-5, atol=1e-4)  # Each device scales its part of a sum.
    gathered = [array for kind, arrays in collectives(compiled) if kind == "all-gather" for array in arrays]
    assert gathered
    assert set(gathered) == {"u8[64,256]"}
    assert grads["up"].sharding.is_equivalent_to(rows, 2)


def mesh_of(kind=AxisType.Auto):
    return jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(kind, kind))


def put(kind=AxisType.Auto, **specs):
    return {name: jax.device_put(PARAMS[name], NamedSharding(mesh_of(kind), spec)) for name, spec in specs.items()}


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            lambda: Policy.of(put(up=P("fsdp")), "MXFP8"),
            ValueError,
            r"Policy: up is sharded over 'fsdp' \(P\('fsdp',\)\), which is neither",
        ),
        (
            lambda: Policy.of(put(up=P("fsdp", "tp")), "MXFP8", gather_axis="fsdp"),
            ValueError,
            r"Policy: up is sharded over 'tp' \(P\('fsdp', 'tp'\)\), which is neither",
        ),
        (
            lambda: Policy.of(put(up=P("tp")), "MXFP8", gather_axis="fsdp", kept_axes="tp"),
            ValueError,
            r"gather_axis \('fsdp'\) shards none of the 1 weights \(P\('tp'",
        ),
        (lambda: Policy.of({"scale": X[0]}, "MXFP8"), ValueError, "no weight of two or more axes that filter= selects"),
        (lambda: Policy.of(PARAMS, "MXFP8", filter="up"), TypeError, "is not a function"),
        (lambda: Policy("MXFP8", {"up": ("fsdp",)}, mesh=mesh_of()), TypeError, "is not a PartitionSpec"),
        (
            lambda: Policy("MXFP8", {"up": P("dp")}, mesh=mesh_of(), gather_axis="dp"),
            ValueError,
            "'dp', which is not an",
        ),
        (
            lambda: Policy("MXFP8", {"up": P("fsdp")}, mesh=mesh_of(), gather_axis=3),
            TypeError,
            r"Policy: gather_axis \(3\) is not a mesh axis name or a tuple of",
        ),
        (lambda: Policy.of(PARAMS, "MXFP8", weight_specs=3), TypeError, "weight_specs is not an option"),
    ],
)
def test_refusals(make, error, text):
    with pytest.raises(error, match=text):
        make()


def policy_of(**specs):
    return Policy("CurrentScaling", specs, mesh=mesh_of(), gather_axis="fsdp", kept_axes="tp")


@pytest.mark.parametrize(
    ("make", "params", "text"),
    [
        (lambda: Policy.of(PARAMS, "MXFP8"), lambda: {"up": X}, "params have no heads, which the policy was made for"),
        (
            lambda: Policy.of({"up": PARAMS["up"]}, "MXFP8"),
            lambda: {"up": X},
            r"up \(64, 64\) does not have the shape \(64, 96\) that the policy was made for; pass such",
        ),
        (lambda: policy_of(up=P(None, None, "fsdp")), lambda: PARAMS, "has more entries than the 2 axes"),
        (
            lambda: policy_of(up=P("fsdp")),
            lambda: put(up=P(None, "fsdp")),
            r"Policy: up is sharded as P\(None, 'fsdp'\), but the policy was made",
        ),
        (
            lambda: policy_of(up=P("fsdp")),
            lambda: put(up=P()),
            r"Policy: up is sharded as P\(\), but the policy was made for",
        ),
    ],
)
def test_refusals_of_a_call(make, params, text):
    """Refusals under `jit` come while tracing; a sharding known to the array alone is checked outside."""
    policy, tree = make(), params()
    with pytest.raises(ValueError, match=text):
        policy(tree)
    if "sharded as" not in text:
        with pytest.raises(ValueError, match=text):
            jax.jit(policy)(tree)


def test_refusals_where_types_tell():
    """Shardings are checked while tracing on Explicit meshes, by shard shapes in `shard_map`, and by `in_shardings`."""
    policy = Policy.of(put(AxisType.Explicit, up=P("fsdp")), "MXFP8", gather_axis="fsdp")
    with pytest.raises(ValueError, match=r"Policy: up is sharded as P\(None, 'fsdp'\), but the policy was made"):
        jax.jit(policy)(put(AxisType.Explicit, up=P(None, "fsdp")))
    policy, wrong = Policy.of(put(up=P("fsdp")), "MXFP8", gather_axis="fsdp"), put(up=P(None, "fsdp"))
    with pytest.raises(ValueError, match=r"up \(64, 24\) does not have the shape \(16, 96\) that the policy was"):
        jax.jit(jax.shard_map(policy, mesh=mesh_of(), in_specs=P(None, "fsdp"), out_specs=P(None, "fsdp")))(wrong)
    given = jax.jit(policy, in_shardings=(policy.shardings(wrong),))
    assert given(put(up=P("fsdp")))["up"].shape == (64, 96)
    with pytest.raises(ValueError, match="sharding"):
        given(wrong)


def test_weights_are_no_arrays():
    """Other products of a `Weight` raise."""
    weight = Policy.of(PARAMS, "CurrentScaling")(PARAMS)["up"]
    for product in (jnp.dot, jnp.matmul, lambda x, w: jnp.einsum("td,dn->tn", x, w)):
        with pytest.raises(TypeError, match="Weight"):
            product(X, weight)
    with pytest.raises(ValueError, match=r"up \(64, 96\) @ x \(64, 64\) is not a matrix \[N, K\] and a vector"):
        weight @ X
    with pytest.raises(ValueError, match=r"heads \(64, 3, 32\) is not a matrix \[K, N\]; call weight.einsum"):
        X @ Policy.of(PARAMS, "CurrentScaling")(PARAMS)["heads"]
