"""`qshard.jax.adam` in every mode of JAX; optax's own Adam in float32. Bits of a step: test_adam_steps.py."""

import functools
import operator

import ml_dtypes
import numpy as np
import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
import jax.numpy as jnp  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from qshard.jax import adam, adamw  # noqa: E402
from support.awkward import assert_bits_equal  # noqa: E402

SHAPES = {"w": (16, 384), "odd": (4, 100), "b": (24,), "s": ()}
STEPS = 4
SETTINGS = {
    "float32": {},
    "bfloat16 float16": {"mu_dtype": "bfloat16", "nu_dtype": "float16", "masters": True},
    "float8": {"mu_dtype": jnp.float8_e4m3fn, "nu_dtype": jnp.float8_e5m2, "masters": True},
    "float32 float8": {"nu_dtype": "float8_e4m3fn"},
}
every_setting = pytest.mark.parametrize("settings", list(SETTINGS.values()), ids=list(SETTINGS))


def draw(seed, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}


def dtype_of(settings):
    return ml_dtypes.bfloat16 if settings.get("masters") else np.float32


def train(transformation, params, dtype=np.float32):
    state = jax.jit(transformation.init)(params)

    @jax.jit
    def step(grads, state, params):
        updates, state = transformation.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for seed in range(STEPS):
        params, state = step(draw(seed, dtype), state, params)
    return params, state


def assert_trees_equal(a, b):
    for (path, x), y in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
        assert_bits_equal(np.asarray(x), np.asarray(y), jax.tree_util.keystr(path))


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_float32_is_optax_adamw(weight_decay):
    """Four steps of 1e-2, with updates of about 1e-2, agree to within 1e-4 of that, as roundings differ."""
    ours, _ = train(adamw(1e-2, weight_decay=weight_decay), draw(9))
    theirs, _ = train(optax.adamw(1e-2, weight_decay=weight_decay), draw(9))
    for name in SHAPES:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-6, atol=1e-6)


def mesh_of(kind):
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind, kind))


@pytest.mark.each_value
@every_setting
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_sharded_arrays_give_the_same_bits(settings, kind):
    dtype = dtype_of(settings)
    transformation = adamw(lambda count: 1e-2 / (1 + count), weight_decay=0.1, **settings)
    expected = train(transformation, draw(9, dtype), dtype)
    cuts = {"w": P("a", None), "odd": P("a", "b"), "b": P("b"), "s": P()}
    if kind is AxisType.Explicit:
        cuts["odd"] = P("a", None)
    mesh = mesh_of(kind)
    with jax.sharding.set_mesh(mesh):
        params = {name: jax.device_put(x, NamedSharding(mesh, cuts[name])) for name, x in draw(9, dtype).items()}
        made = train(transformation, params, dtype)
        assert_trees_equal(made, expected)
        assert made[0]["w"].sharding.is_equivalent_to(params["w"].sharding, 2)


@every_setting
def test_whole_blocks_are_updated_where_they_are(settings):
    """Shards of rows, and of whole blocks of columns, need no collective."""
    mesh = mesh_of(AxisType.Auto)
    w = jax.device_put(np.ones((16, 512), dtype_of(settings)), NamedSharding(mesh, P("a", "b")))
    transformation = adamw(1e-2, weight_decay=0.1, **settings)
    state = transformation.init({"w": w})
    program = jax.jit(transformation.update).lower({"w": w}, state, {"w": w}).compile().as_text()
    for collective in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        assert collective not in program


@every_setting
def test_shard_map_updates_in_place(settings):
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    params = {name: x for name, x in draw(1, dtype_of(settings)).items() if name in ("w", "b")}
    transformation = adamw(1e-2, weight_decay=0.1, **settings)
    state = jax.jit(transformation.init)(params)
    expected = jax.jit(transformation.update)(params, state, params)
    specs = jax.tree.map(lambda x: P("a") if x.ndim else P(), state)
    local = jax.jit(
        jax.shard_map(transformation.update, mesh=mesh, in_specs=(P("a"), specs, P("a")), out_specs=(P("a"), specs)),
        donate_argnums=1,
    )
    assert "output_to_operand_aliasing" in local.lower(params, state, params).compile().as_text()
    assert_trees_equal(local(params, state, params), expected)


def test_vmap_is_a_stack():
    transformation = adamw(1e-2, weight_decay=0.1, mu_dtype="float8_e4m3fn", nu_dtype="float16")
    stack = np.stack([draw(1)["w"], draw(2)["w"]])
    state = jax.tree.map(np.asarray, jax.jit(jax.vmap(transformation.init))(stack))
    made = jax.tree.map(np.asarray, jax.jit(jax.vmap(transformation.update))(stack, state, stack))
    update = jax.jit(transformation.update)
    for i in range(2):
        one = functools.partial(jax.tree.map, operator.itemgetter(i))
        assert_trees_equal(one(made), update(*one((stack, state, stack))))


def test_it_is_an_optax_transformation():
    chain = optax.chain(optax.clip_by_global_norm(1.0), adam(1e-2))
    train(chain, draw(9))
    injected = optax.inject_hyperparams(adam)(learning_rate=1e-2, b2=0.99)
    ours, state = train(injected, draw(9))
    assert float(state.hyperparams["learning_rate"]) == np.float32(1e-2)
    theirs, _ = train(optax.adam(1e-2, b2=0.99), draw(9))
    # 1 - b2 of an injected fp32 b2 is off by 2^-25 / 0.01 = 3e-6; updates are up to 1e-2 in each of four steps.
    np.testing.assert_allclose(ours["w"], theirs["w"], rtol=1e-5, atol=1e-5)
    masked = optax.masked(adam(1e-2), {"w": True, "odd": False, "b": False, "s": True})
    train(masked, draw(9))


def test_injected_decays_of_16_bits_raise():
    """In bfloat16, the dtype of the parameters, 0.999 is 1, and updates would be NaN."""
    params = {"w": jnp.ones((4, 128), jnp.bfloat16)}
    inject = functools.partial(optax.inject_hyperparams, adam)
    with pytest.raises(TypeError, match=r"adam: b1 \(.*bfloat16.*\n?.*hyperparam_dtype=jnp.float32"):
        inject()(learning_rate=1e-2).init(params)
    injected = inject(hyperparam_dtype=jnp.float32)(learning_rate=1e-2)
    updates, _ = injected.update(params, injected.init(params), params)
    assert np.isfinite(updates["w"]).all()


def test_masters_heal_what_a_parameter_could_not_take():
    """An update is a difference to the parameter, so the next one restores what rounding lost: the master is exact."""
    transformation = adam(1.0, b1=0.0, b2=0.0, eps=0.0, masters=True)
    params = {"w": jnp.asarray([[1.0, 1.0]], jnp.bfloat16)}
    state = transformation.init(params)
    state = state._replace(master={"w": jnp.asarray([[1.0 + 1e-6, 1.0 + 2.0**-9]], jnp.float32)})
    grads = {"w": jnp.ones((1, 2), jnp.bfloat16)}
    updates, state = transformation.update(grads, state, params)
    params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(state.master["w"], [[1e-6, 2.0**-9]], rtol=0.1)  # 1 + 1e-6 is off by up to 6e-8.
    updates, state = transformation.update({"w": jnp.zeros((1, 2), jnp.bfloat16)}, state, params)


def test_errors():
    transformation = adamw(1e-2, weight_decay=0.1)
    grads = {"w": jnp.ones((2, 2))}
    with pytest.raises(ValueError, match=r"params \(None\) are needed for weight decay or master weights; pass"):
        transformation.update(grads, transformation.init(grads))
    plain = adam(1e-2)
    plain.update(grads, plain.init(grads))
