"""`qshard.jax.muon`: the same bits on every mesh and sharding, and optax's own Muon on one device."""

import re

import jax
import numpy as np
import pytest

optax = pytest.importorskip("optax")
import jax.numpy as jnp  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import qshard.jax as qj  # noqa: E402
from qshard.jax import muon  # noqa: E402
from qshard.jax._optim.newton_schulz import NewtonSchulz  # noqa: E402
from support.awkward import assert_bits_equal  # noqa: E402
from support.newton_schulz import COEFFICIENTS, assert_near_float64, draw_matrices  # noqa: E402

SHAPES = {"embed": (24, 16), "up": (48, 32), "odd": (33, 40), "experts": (16, 8, 24), "b": (24,)}
SHAPES |= {f"layers.{i}.w": (16, 16) for i in range(5)}
STEPS = 2
OPTIONS = {"weight_decay": 0.1, "adam_learning_rate": 1e-3}
FP8_SHAPES = {"up": (48, 32), "odd": (16, 40), "experts": (10, 16, 32)}
FP8_OPTIONS = {"ns_fp8_steps": 3, "ns_fp8_min_side": 16}


def draw(seed, dtype=np.float32, shapes=SHAPES):
    rngs = {name: np.random.default_rng([seed, *name.encode()]) for name in shapes}  # JAX sorts names.
    return {name: rngs[name].standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def train(transformation, params, place=lambda tree: tree, wrap=jax.jit):
    shapes = {name: x.shape for name, x in params.items()}
    state = jax.jit(transformation.init)(params)

    @wrap
    def step(grads, state, params):
        updates, state = transformation.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for seed in range(STEPS):
        params, state = step(place(draw(seed, shapes=shapes)), state, params)
    return params, state


@pytest.fixture(scope="module")
def on_one_device():
    return train(muon(0.02, **OPTIONS), jax.tree.map(jnp.asarray, draw(9)))


def assert_trees_equal(a, b):
    for (path, x), y in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
        assert_bits_equal(np.asarray(x), np.asarray(y), jax.tree_util.keystr(path))


SHARDINGS = {
    "rows": lambda shape: P("a") if shape[0] % 8 == 0 else P(None, "a"),
    "columns": lambda shape: P(*[None] * (len(shape) - 1), "a"),
    "whole": lambda shape: P(),
    "mixed": lambda shape: P(*[None] * (len(shape) - 2), "b", "a") if shape[0] % 2 == 0 else P(None, ("a", "b")),
}
SHARDINGS["mixed"] = lambda shape, two_axes=SHARDINGS["mixed"]: two_axes(shape) if len(shape) > 1 else P("b")
MESHES = [((2, 1), "columns"), ((4, 1), "rows"), ((8, 1), "rows"), ((8, 1), "whole"), ((4, 2), "mixed")]


def placed(tree, mesh, sharding):
    return {n: jax.device_put(x, NamedSharding(mesh, SHARDINGS[sharding](x.shape))) for n, x in tree.items()}


@pytest.mark.each_value
@pytest.mark.parametrize(("sizes", "sharding"), MESHES, ids=str)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_bits_do_not_depend_on_the_mesh(on_one_device, sizes, sharding, kind):
    mesh = jax.make_mesh(sizes, ("a", "b"), axis_types=(kind, kind))
    with jax.sharding.set_mesh(mesh):
        params = placed(draw(9), mesh, sharding)
        made = train(muon(0.02, **OPTIONS), params, lambda tree: placed(tree, mesh, sharding))
        assert_trees_equal(made, on_one_device)
        assert all(made[0][name].sharding.is_equivalent_to(x.sharding, x.ndim) for name, x in params.items())


def train_in_shard_map(sizes, sharding, shapes=SHAPES, options=OPTIONS):
    mesh = jax.make_mesh(sizes, ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    specs = {name: SHARDINGS[sharding](shape) for name, shape in shapes.items()}
    optimizer = muon(0.02, **options, spec=lambda name, _: specs[name])
    params = jax.tree.map(jnp.asarray, draw(9, shapes=shapes))
    state = optimizer.init(params)
    of_state = jax.tree_util.tree_map_with_path(lambda path, x: specs[path[-1].key] if x.ndim else P(), state)

    def wrap(step):
        spec = (specs, of_state, specs)
        return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=(specs, of_state)))

    return train(optimizer, params, wrap=wrap)


@pytest.mark.parametrize("sharding", ["rows", "mixed"])
def test_shard_map_gives_the_same_bits(on_one_device, sharding):
    assert_trees_equal(train_in_shard_map((4, 2), sharding), on_one_device)


@pytest.fixture(scope="module")
def in_fp8_on_one_device():
    return train(muon(0.02, **FP8_OPTIONS), jax.tree.map(jnp.asarray, draw(9, shapes=FP8_SHAPES)))


@pytest.mark.parametrize(
    ("sizes", "sharding", "kind"),
    [((2, 1), "columns", AxisType.Explicit), ((4, 1), "rows", AxisType.Auto), ((4, 2), "mixed", AxisType.Auto)],
    ids=str,
)
def test_bits_in_fp8_do_not_depend_on_the_mesh(in_fp8_on_one_device, sizes, sharding, kind):
    mesh = jax.make_mesh(sizes, ("a", "b"), axis_types=(kind, kind))
    with jax.sharding.set_mesh(mesh):
        params = placed(draw(9, shapes=FP8_SHAPES), mesh, sharding)
        made = train(muon(0.02, **FP8_OPTIONS), params, lambda tree: placed(tree, mesh, sharding))
    assert_trees_equal(made, in_fp8_on_one_device)


def test_shard_map_gives_the_same_bits_in_fp8(in_fp8_on_one_device):
    made = train_in_shard_map((8, 1), "rows", FP8_SHAPES, FP8_OPTIONS)
    assert_trees_equal(made, in_fp8_on_one_device)


@pytest.mark.parametrize("shape", [(128, 256), (3, 256, 128)], ids=str)
def test_first_steps_in_fp8_are_near_float64(shape):
    x, errors = draw_matrices(shape), []
    for fp8_steps in (0, 1, 3, 5):
        newton_schulz = NewtonSchulz(COEFFICIENTS, 5, 1e-8, fp8_steps, fp8_min_side=128)
        found = newton_schulz(jnp.asarray(x, jnp.bfloat16))
        errors.append(assert_near_float64(np.asarray(found, np.float32), x, fp8_steps))
    assert errors[0] < errors[2] < errors[3]


@pytest.mark.parametrize(("shape", "min_side"), [((32, 40), 0), ((2, 32, 48), 33)], ids=str)
def test_other_shapes_stay_in_bfloat16(shape, min_side):
    x = jnp.asarray(draw_matrices(shape), jnp.bfloat16)
    found, expected = (NewtonSchulz(COEFFICIENTS, 5, 1e-8, steps, min_side)(x) for steps in (3, 0))
    assert_bits_equal(np.asarray(found), np.asarray(expected), "bfloat16")


@pytest.mark.parametrize("shape", [(32, 48), (2, 48, 32)], ids=str)
def test_zeros_and_nan_in_fp8(shape):
    """Zeros have no direction. A NaN or an infinity reaches every element of its matrix, as in bfloat16."""
    x, run = jnp.asarray(draw_matrices(shape), jnp.bfloat16), NewtonSchulz(COEFFICIENTS, 5, 1e-8, 3, 0)
    assert not run(x * 0).any()
    for bad in (jnp.nan, jnp.inf):
        assert jnp.isnan(run(x.at[..., 3, 5].set(bad))).all()


def test_shards_travel_in_bfloat16():
    """Each shape has one all-to-all in each direction; experts that are sharded in whole batches need none."""
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,))
    optimizer = muon(0.02, axis_name="a")
    params = {name: jnp.ones(SHAPES[name]) for name in ("up", "layers.0.w", "layers.1.w", "experts")}
    state = optimizer.init(params)
    specs = jax.tree.map(lambda x: P("a") if x.ndim else P(), state)
    step = jax.shard_map(optimizer.update, mesh=mesh, in_specs=(P("a"), specs, P("a")), out_specs=(P("a"), specs))
    lines = jax.jit(step).lower(params, state, params).as_text().splitlines()
    sent = [line for line in lines if "stablehlo.all_" in line or "stablehlo.collective" in line]
    assert len(sent) == 4
    assert all("all_to_all" in line and "xbf16>" in line and "xf32>" not in line for line in sent)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, r"the gradient of w \(2, 4\) may differ over mesh axes \('a',\); pass axis_name or"),
        ({"spec": P("b")}, r"spec of w \(.*\) names 'b', which is not an axis of the mesh \('a',\)"),
        ({"spec": P("a", None, None)}, r"spec of w \(.*\) has more entries than the 2 axes"),
    ],
    ids=["no spec", "unknown axis", "too many entries"],
)
def test_gradients_that_differ_over_a_mesh_axis_need_a_spec(given, message):
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,))
    optimizer = muon(0.02, **given)
    step = jax.shard_map(
        lambda w: optimizer.update(w, optimizer.init(w))[0], mesh=mesh, in_specs=P("a"), out_specs=P("a")
    )
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(step, {"w": jnp.ones((4, 4))})


def test_eager_calls_give_the_same_bits(on_one_device):
    assert_trees_equal(train(muon(0.02, **OPTIONS), draw(9), wrap=lambda step: step), on_one_device)


@pytest.mark.parametrize(
    "options", [{"weight_decay": 0.1}, {"nesterov": False, "consistent_rms": 0.2, "beta": 0.5}], ids=str
)
def test_it_is_optax_muon(options):
    """Newton-Schulz rounds to bfloat16 three times in each of 5 steps here, and runs in float32 there.

    Roundings of up to 2^-9 are spread over all singular vectors, so the norm of their sum is bounded by 15 of them.
    """
    shapes = {"w": (48, 32), "x": (32, 48), "b": (24,)}
    params = {name: draw(9)["up"].reshape(-1)[: np.prod(shape)].reshape(shape) for name, shape in shapes.items()}
    grads = {name: draw(1)["up"].reshape(-1)[: np.prod(shape)].reshape(shape) for name, shape in shapes.items()}
    numbers = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)
    dimensions = {"w": numbers, "x": numbers, "b": None}
    theirs = optax.contrib.muon(0.02, adam_learning_rate=1e-3, muon_weight_dimension_numbers=dimensions, **options)
    ours = muon(0.02, adam_learning_rate=1e-3, **options)
    made = []
    for optimizer in (ours, theirs):
        state, update = jax.jit(optimizer.init)(params), jax.jit(optimizer.update)
        for scale in (1.0, -0.5, 0.25):
            updates, state = update({n: scale * g + 0.1 * params[n] for n, g in grads.items()}, state, params)
        made.append(updates)
    if not options.get("nesterov", True):  # optax gives AdamW Nesterov momentum too.
        np.testing.assert_allclose(made[0]["b"], made[1]["b"], rtol=1e-5, atol=1e-8)
    for name in ("w", "x"):
        assert np.linalg.norm(made[0][name] - made[1][name]) <= 15 * 2**-9 * np.linalg.norm(made[1][name])


def test_injected_hyperparameters():
    """Settings that the program depends on must be static, and the error names all of them."""
    optax = pytest.importorskip("optax")
    params = {"w": jnp.ones((16, 32))}
    with pytest.raises(
        TypeError, match=r"ns_steps \(.*\) is an array, .* pass static_args=\('ns_steps', 'eps', "
    ) as raised:
        optax.inject_hyperparams(muon)(learning_rate=0.1).init(params)
    names = tuple(re.findall(r"'(\w+)'", str(raised.value)))
    injected = optax.inject_hyperparams(muon, static_args=names)(learning_rate=0.1, consistent_rms=0.2)
    made, _ = jax.jit(injected.update)(params, injected.init(params), params)
    own = muon(0.1, consistent_rms=0.2)
    np.testing.assert_allclose(made["w"], own.update(params, own.init(params), params)[0]["w"], rtol=1e-5)


def test_a_stack_has_the_scale_of_its_matrices():
    """Singular values after five steps are within 0.7 and 1.2, of a stack that has two batches too."""
    w = {"w": jnp.asarray(np.random.default_rng(0).standard_normal((11, 24, 6)), jnp.float32)}
    for axis, scale in ((-2, 2.0), (-1, 1.0)):
        optimizer = muon(1.0, output_axis=axis)
        updates, _ = optimizer.update(w, optimizer.init(w))
        values = np.linalg.svd(np.asarray(updates["w"]), compute_uv=False) / scale
        assert values.min() > 0.6
        assert values.max() < 1.3


def test_names_choose_the_algorithm():
    params = {"embed": jnp.ones((4, 4)), "mlp": {"up": jnp.ones((4, 4)), "router": jnp.ones((4, 4))}, "b": jnp.ones(4)}
    state = muon(0.1, rules={"*.router": "adamw", "embed": "muon"}).init(params)
    assert [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(state.mu)] == [
        "['embed']",
        "['mlp']['up']",
    ]
    assert state.adamw.mu["mlp"]["up"] is None
    assert state.adamw.mu["mlp"]["router"].shape == (4, 4)


def test_a_checkpoint_loads_on_another_mesh(on_one_device, tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    one, eight = (jax.make_mesh((n,), ("a",), axis_types=(AxisType.Auto,)) for n in (1, 8))
    optimizer = muon(0.02, **OPTIONS)
    saved = train(optimizer, placed(draw(9), eight, "rows"), lambda tree: placed(tree, eight, "rows"))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", saved)
        checkpointer.wait_until_finished()
        target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(one, P())), saved)
        assert_trees_equal(checkpointer.restore(tmp_path / "state", target), on_one_device)


def test_primary_weights_have_the_codes_of_updated_masters():
    own = qj.optimizer(muon(0.02), "MXFP8", filter=lambda name, p: p.ndim == 2)
    params = {"up": jnp.asarray(draw(9)["up"][:32])}
    state = own.init(params)
    params = own.recast(state, params)
    grads = {"up": jnp.asarray(draw(1)["up"][:32])}
    updates, after = own.update(grads, state, params)
    plain, _ = muon(0.02).update(grads, state.inner, state.masters)
    assert_bits_equal(np.asarray(after.masters["up"]), np.asarray(state.masters["up"] + plain["up"]))
    assert jax.tree.structure(optax.apply_updates(params, updates)) == jax.tree.structure(params)
