"""Primary weights in JAX: codes as parameters, masters in the optimizer state, with the bits of float32 weights.

The reference keeps float32 parameters, which `linear` quantizes in each call.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from qshard import recipes
from qshard.formats import Usage
from qshard.jax import (
    PrimaryWeight,
    adamw,
    init_delayed,
    linear,
    merge_observed,
    optimizer,
    quantize,
    update_delayed,
    value_and_grad,
)
from support.awkward import assert_bits_equal
from support.formats import GATHERED, MIXES, STATELESS
from support.hlo import collectives

MIXED = {name: recipe for name, recipe in MIXES.items() if recipe.weight.gather_refusal is None}
RECIPES = GATHERED | MIXED
MODES = {
    "one device": (None, {}),
    "Auto": (AxisType.Auto, {"fsdp": 4}),
    "Auto, hybrid": (AxisType.Auto, {"replica": 2, "fsdp": 2}),
    "Explicit": (AxisType.Explicit, {"fsdp": 4}),
    "shard_map": (AxisType.Auto, {"fsdp": 4}),
    "shard_map, hybrid": (AxisType.Auto, {"replica": 2, "fsdp": 4}),
}
ROWS, STEPS, KEY = 512, 3, jax.random.key(3)
# Its op has exact bits. LLVM contracts `weight_decay * p + step` of optax to a fused multiply-add in some programs, and
# not in others with the same HLO: masters then differ by one unit in the last place.
ADAMW = adamw(0.01, weight_decay=0.1)


def values(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def params_of():
    """Return parameters; shards of `up` split blocks of 128 and 32."""
    return {"up": {"w": values(64, 32), "b": values(64, seed=1)}, "down": {"w": values(32, 64, seed=2) / 8}}


def batch_of(step):
    return values(ROWS, 32, seed=10 + step)


def loss_of(params, states, x, key, recipe, **options):
    up, down = ({"state": states[name]["w"]} if states else {} for name in ("up", "down"))
    h = linear(x, params["up"]["w"], recipe, seed=key, **up, **options) + params["up"]["b"]
    y = linear(jax.nn.relu(h), params["down"]["w"], recipe, seed=jax.random.fold_in(key, 1), **down, **options)
    return jnp.sum((y - 2 * x) ** 2) / ROWS


def states_of(recipe):
    """Return a tree of states like the parameters."""
    if not recipe.stateful:
        return None
    return {"up": {"w": init_delayed(recipe), "b": None}, "down": {"w": init_delayed(recipe)}}


def assert_trees_equal(actual, expected):
    jax.tree.map(lambda a, b: assert_bits_equal(np.asarray(a), np.asarray(b)), actual, expected)


def spec_of(path, p):
    return P("fsdp") if "'w'" in path else P()


def specs_of(tree):
    """Return the specs of a tree whose paths end in those of parameters, as optax states do."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: spec_of(jax.tree_util.keystr(path), leaf), tree)


def mesh_of(mode):
    kind, sizes = MODES[mode]
    sizes = sizes or {"fsdp": 1}
    return jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(kind or AxisType.Auto,) * len(sizes),
        devices=jax.devices()[: np.prod(list(sizes.values()))],
    )


def train(recipe, mode, *, primary, inner, micro=1, steps=STEPS):
    """Train with donated buffers, and return the losses and the float32 values."""
    mesh, local = mesh_of(mode), mode.startswith("shard_map")
    batch = P(tuple(mesh.axis_names))
    options = {} if mode == "one device" else {"weight_spec": P("fsdp"), "gather_axis": "fsdp"}
    masters = optimizer(inner, recipe, spec=spec_of, axis_name="fsdp" if local else None)

    def gradients(params, states, x, key):
        run = functools.partial(loss_of, recipe=recipe, **options, **({"axis_name": batch[0]} if local else {}))
        differentiate = value_and_grad if primary else jax.value_and_grad
        total = None
        for part, number in zip(jnp.split(x, micro), range(micro), strict=True):
            made = differentiate(run, (0, 1))(params, states, part, jax.random.fold_in(key, number))
            total = made if total is None else (total[0] + made[0], merged(total[1], made[1]))
        loss, (grads, seen) = total
        if local:
            loss = jax.lax.psum(loss, batch[0])
        return loss, grads, seen

    def merged(a, b):
        return jax.tree.map(jnp.add, a[0], b[0]), merge_observed(a[1], b[1]) if a[1] else None

    def step(params, state, states, x, key):
        loss, grads, seen = gradients(params, states, x, key)
        if recipe.stateful:
            states = jax.tree.map(
                lambda state, amaxes: update_delayed(state, amaxes, recipe),
                states,
                seen,
                is_leaf=lambda node: type(node).__name__ == "LinearState",
            )
        if primary:
            updates, state = masters.update(grads, state, params, **({"states": states} if states else {}))
        else:
            updates, state = inner.update(grads, state, params)
        return optax.apply_updates(params, updates), state, states, loss

    params, states = params_of(), states_of(recipe)
    with jax.set_mesh(mesh):
        of_params = specs_of(params)
        params = jax.device_put(params, jax.tree.map(functools.partial(NamedSharding, mesh), of_params))
        states = jax.device_put(states, NamedSharding(mesh, P()))
        state = (masters if primary else inner).init(params)
        recast = functools.partial(masters.recast, states=states)
        if local:
            before, of_params = of_params, masters.specs(params) if primary else of_params
            of_state = specs_of(state)
            recast = jax.shard_map(recast, in_specs=(of_state, before), out_specs=of_params)
            specs = (of_params, of_state, P())
            step = jax.shard_map(step, in_specs=(*specs, batch, P()), out_specs=(*specs, P()))
        if primary:
            params = jax.jit(recast)(state, params)
        program, losses = jax.jit(step, donate_argnums=(0, 1, 2)), []
        for number in range(steps):
            x = jax.device_put(batch_of(number), NamedSharding(mesh, batch))
            old = (params, state)
            params, state, states, loss = program(*old, states, x, jax.random.fold_in(KEY, number))
            kept = [
                jax.tree_util.keystr(path)
                for path, leaf in jax.tree_util.tree_leaves_with_path(old)
                if leaf.ndim > 1 and not leaf.is_deleted()
            ]
            assert kept == []
            losses.append(float(loss))
    if primary:
        weights = {name: params[name]["w"] for name in params}
        for name, weight in weights.items():
            master = np.asarray(state.masters[name]["w"])
            if not recipe.stateful:
                want = PrimaryWeight.of(quantize(master, recipe.weight))
                assert_trees_equal(weight, want)
            assert weight.data.sharding.is_equivalent_to(state.masters[name]["w"].sharding, 2)
            params[name]["w"] = master
    return losses, jax.tree.map(np.asarray, params)


def assert_same_bits(name, mode, inner=ADAMW, **options):
    got, want = (train(RECIPES[name], mode, primary=primary, inner=inner, **options) for primary in (True, False))
    assert got[0] == want[0]
    assert got[0][-1] < got[0][0]
    jax.tree.map(assert_bits_equal, got[1], want[1])


@pytest.mark.parametrize(("name", "mode"), [(name, list(MODES)[i % len(MODES)]) for i, name in enumerate(GATHERED)])
def test_bits_of_float32_weights(name, mode):
    """Losses and masters have the bits of float32 training; codes are those of the masters, with their sharding."""
    assert_same_bits(name, mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", RECIPES)
def test_bits_of_float32_weights_for_all(name, mode):
    assert_same_bits(name, mode, steps=10)


def test_bits_of_float32_weights_over_microbatches():
    """Codes are computed once for all microbatches, and the inner transform may be any chain: it sees float32 alone."""
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.05, momentum=0.9))
    assert_same_bits("CurrentScaling", "Auto", inner, micro=2)


def in_shard_map(recipe, micro):
    """Lower a step over four devices with a `scan` over microbatches."""
    mesh = mesh_of("shard_map")
    masters = optimizer(optax.sgd(0.01), recipe, spec=spec_of, axis_name="fsdp")
    params = params_of()
    state = masters.init(params)
    specs = masters.specs(params, mesh), specs_of(state)
    weights = jax.eval_shape(lambda: optimizer(optax.sgd(0.01), recipe).recast(state, params))

    def step(params, state, batches):
        zeros = jax.tree.map(jnp.zeros_like, {name: {"w": m["w"]} for name, m in state.masters.items()})
        zeros["up"]["b"] = jnp.zeros(64)

        def accumulate(total, x):
            loss = functools.partial(loss_of, recipe=recipe, gather_axis="fsdp")
            return jax.tree.map(jnp.add, total, value_and_grad(loss)(params, None, x, KEY)[1]), None

        grads, _ = jax.lax.scan(accumulate, zeros, batches)
        updates, state = masters.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    run = jax.shard_map(step, mesh=mesh, in_specs=(*specs, P(None, "fsdp")), out_specs=specs)
    return jax.jit(run).lower(weights, state, jax.ShapeDtypeStruct((micro, ROWS, 32), jnp.float32))


@pytest.mark.parametrize("name", ["CurrentScaling", "MXFP8"])
def test_codes_are_made_once_a_step(name):
    """Casts are outside the loop over microbatches, with one all-reduce for all weights; inside, codes are gathered."""
    lowered = in_shard_map(RECIPES[name], micro=3)
    found = collectives(lowered.compile())
    gathered = {array for kind, arrays in found if kind == "all-gather" for array in arrays}
    assert gathered == {"u8[64,32]", "u8[32,64]"}
    amaxes = [arrays for kind, arrays in found if kind == "all-reduce" and arrays[0].startswith("s32")]
    assert len(amaxes) == 1
    weights = r"@qshard_(cast|quantize)\w*\(.*tensor<(16x32|8x64)xf32>"
    casts = [line for line in lowered.as_text().splitlines() if re.search(weights, line)]
    loop = lowered.as_text().split("stablehlo.while")[1].split("stablehlo.all_reduce")[0]
    assert len(casts) >= 2
    assert not any(line in loop for line in casts)


def test_stacked_weights():
    """Layers stacked for `scan` have a scale each, and the bits of separate float32 weights."""
    stack, x = values(3, 32, 32), values(32, 32, seed=1)
    inner = optax.adam(0.01)

    def loss(params, x):
        return jnp.sum(jax.lax.scan(lambda x, w: (linear(x, w, "CurrentScaling"), None), x, params["w"])[0] ** 2)

    @functools.partial(jax.jit, static_argnums=(2, 3))
    def step(params, state, masters, differentiate):
        value, grads = differentiate(loss)(params, x)
        updates, state = masters.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    masters = optimizer(inner, "CurrentScaling")
    state = masters.init({"w": stack})
    params = masters.recast(state, {"w": stack})
    assert params["w"].shape == (3, 32, 32)
    assert params["w"].scale_inv.shape == (3,)
    plain, plain_state = {"w": stack}, inner.init({"w": stack})
    for _ in range(2):
        params, state, got = step(params, state, masters, value_and_grad)
        plain, plain_state, want = step(plain, plain_state, inner, jax.value_and_grad)
        assert float(got) == float(want)
        assert_bits_equal(np.asarray(state.masters["w"]), np.asarray(plain["w"]))


@pytest.mark.parametrize("name", ["CurrentScaling", "MXFP8"])
def test_weights_as_flax_has_them(name):
    """Weights [K, N] have codes in the same layout."""
    recipe, w, x = RECIPES[name], values(32, 64), values(ROWS, 32, seed=1)
    inner = optax.sgd(0.01)
    masters = optimizer(inner, recipe)
    loss = lambda params: jnp.mean(linear(x, params["w"], recipe, weight_layout="KN") ** 2)  # noqa: E731

    @functools.partial(jax.jit, static_argnums=(2, 3))
    def step(params, state, of, differentiate):
        value, grads = differentiate(loss)(params)
        updates, state = of.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    plain, plain_state = {"w": w}, inner.init({"w": w})
    state = masters.init(plain)
    params = masters.recast(state, plain)
    for _ in range(2):
        params, state, got = step(params, state, masters, value_and_grad)
        plain, plain_state, want = step(plain, plain_state, inner, jax.value_and_grad)
        assert float(got) == float(want)
    assert_bits_equal(np.asarray(state.masters["w"]), np.asarray(plain["w"]))


def test_a_checkpoint(tmp_path):
    """orbax restores state and parameters with their sharding; masters alone restore the parameters."""
    ocp = pytest.importorskip("orbax.checkpoint")
    recipe, mesh = RECIPES["NVFP4"], mesh_of("Auto")
    masters = optimizer(optax.adam(0.01), recipe, spec=spec_of)
    with jax.set_mesh(mesh):
        params = jax.device_put(params_of(), NamedSharding(mesh, P("fsdp")))
        state = masters.init(params)
        params = masters.recast(state, params)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "run", {"params": params, "state": state})
            checkpointer.wait_until_finished()
            target = jax.tree.map(ocp.utils.to_shape_dtype_struct, {"params": params, "state": state})
            again = checkpointer.restore(tmp_path / "run", target)
        recast = masters.recast(again["state"], params_of())
    assert jax.tree.structure(again) == jax.tree.structure({"params": params, "state": state})
    jax.tree.map(
        lambda a, b: assert_bits_equal(np.asarray(a), np.asarray(b)), again, {"params": params, "state": state}
    )
    assert_trees_equal(recast, params)
    assert again["params"]["up"]["w"].data.sharding.is_equivalent_to(params["up"]["w"].data.sharding, 2)


def test_a_train_state_of_flax():
    """flax's TrainState calls `init`, `update` and `optax.apply_updates`."""
    masters = optimizer(optax.sgd(0.1), "MXFP8")
    TrainState = pytest.importorskip("flax.training.train_state").TrainState
    state = TrainState.create(apply_fn=None, params={"w": values(32, 32)}, tx=masters)
    state = state.replace(params=masters.recast(state.opt_state, state.params))
    x = values(32, 32, seed=1)
    loss = jax.jit(value_and_grad(lambda params: jnp.mean((linear(x, params["w"], "MXFP8") - x) ** 2)))
    step = jax.jit(lambda state: state.apply_gradients(grads=loss(state.params)[1]))
    first, _ = loss(state.params)
    for _ in range(3):
        state = step(state)
    assert loss(state.params)[0] < first
    want = PrimaryWeight.of(quantize(state.opt_state.masters["w"], RECIPES["MXFP8"].weight))
    assert_trees_equal(state.params["w"], want)


W, X = values(64, 32), values(ROWS, 32, seed=1)
MASTERS = optimizer(optax.sgd(1.0), "CurrentScaling")
STATE = MASTERS.init({"w": W})
CODES = MASTERS.recast(STATE, {"w": W})


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: MASTERS.init(CODES),
            TypeError,
            r"optimizer: params\['w'\] \(PrimaryWeight\(FP8_E4M3\[nonfinite=nan\]",
        ),
        (
            lambda: MASTERS.update({"w": W}, STATE, {"w": W}),
            TypeError,
            r"optimizer: params\['w'\] \(numpy\.ndarray, float32 \(64, 32\)\) is not quantized",
        ),
        (lambda: MASTERS.update({"w": W[0]}, STATE, CODES), ValueError, r"grads\['w'\] .* is not the gradient of"),
        (lambda: MASTERS.update({"w": W}, STATE), ValueError, r"params \(None\) are required; pass them to update"),
        (lambda: MASTERS.update({"w": W}, (), CODES), TypeError, r"state \(\(\)\) is not a PrimaryState"),
        (lambda: optimizer(optax.sgd, "MXFP8"), TypeError, r"optimizer: inner \(<function sgd at .*>\) has no init"),
        (
            lambda: optimizer(optax.sgd(1.0), recipes.Recipe(weight="NVFP4", activation="NVFP4", gradient="NVFP4")),
            ValueError,
            "optimizer: weights cannot be codes of NVFP4: its rowwise and columnwise planes have",
        ),
        (
            lambda: optimizer(optax.sgd(1.0), "DelayedScaling").recast(STATE, {"w": W}),
            ValueError,
            "optimizer: DelayedScaling quantizes with the scales in `states`",
        ),
        (
            lambda: optimizer(optax.sgd(1.0), "MXFP8", filter=lambda path, p: True).init({"b": W[0]}),
            ValueError,
            r"optimizer: params\['b'\] \(32,\) has fewer than two axes, so it is",
        ),
        (
            lambda: jax.grad(lambda p: linear(X, p["w"], "CurrentScaling").sum())(CODES),
            TypeError,
            r"grad requires .* but got uint8",
        ),
        (
            lambda: jax.jit(jax.grad(lambda q: linear(X, q, "CurrentScaling").sum()))(CODES["w"].codes),
            TypeError,
            "linear: w is quantized, and codes have no gradient; exclude it from differentiation",
        ),
        (lambda: value_and_grad(CODES), TypeError, r"value_and_grad: fun .* is not a function"),
    ],
)
def test_errors(call, error, text):
    with pytest.raises(error, match=text):
        call()


def adapted(adapters, base, x, key, recipe, **options):
    """Return a LoRA loss: a frozen weight, plus a product of two thin matrices in high precision."""
    y = linear(x, base, recipe, seed=key, **options) + (x @ adapters["a"].T) @ adapters["b"].T
    return jnp.sum((y - jnp.concatenate([x, -x], axis=1)) ** 2) / ROWS


def often(name):
    return [] if name in ("CurrentScaling", "MXFP8", "NVFP4") else pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "mode"),
    [pytest.param(name, list(MODES)[-i % len(MODES)], marks=often(name)) for i, name in enumerate(STATELESS)],
)
def test_adapters_of_a_frozen_base(name, mode):
    """The base is codes, gathered as they are; adapters have the bits of a float32 base."""
    recipe, mesh, local = STATELESS[name], mesh_of(mode), mode.startswith("shard_map")
    batch = P(tuple(mesh.axis_names))
    gathers = {} if mode == "one device" else {"weight_spec": P("fsdp"), "gather_axis": "fsdp"}
    w, whole = values(64, 32), {"a": values(4, 32, seed=3) / 8, "b": np.zeros((64, 4), np.float32)}
    usage = Usage.ROWWISE if recipe.weight.shares_codes else Usage.BOTH
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, batch))
        base = jax.device_put(w, NamedSharding(mesh, P("fsdp")))

        def frozen(w):
            cut = {"axis_name": "fsdp"} if local else {} if mode == "one device" else {"spec": P("fsdp")}
            return quantize(w, recipe.weight, usage=usage, seed=KEY, **cut)

        def run(adapters, w, x, key, codes):
            base = frozen(w) if codes else w
            options = gathers | ({"axis_name": batch[0]} if local else {})
            value, grads = jax.value_and_grad(functools.partial(adapted, recipe=recipe, **options))(
                adapters, base, x, key
            )
            return (jax.lax.psum(value, batch[0]) if local else value), grads

        if local:
            run = lambda *args, codes, run=run: jax.shard_map(  # noqa: E731
                functools.partial(run, codes=codes), in_specs=(P(), P("fsdp"), batch, P()), out_specs=(P(), P())
            )(*args)
        programs = [jax.jit(functools.partial(run, codes=codes)) for codes in (True, False)]
        results = []
        for program in programs[: 1 if recipe.weight.stochastic else 2]:
            adapters, losses = jax.device_put(whole, NamedSharding(mesh, P())), []
            for number in range(3):
                loss, grads = program(adapters, base, x, jax.random.fold_in(KEY, number))
                adapters = jax.tree.map(lambda p, g: p - 0.05 * g, adapters, grads)
                losses.append(float(loss))
            results.append((losses, jax.tree.map(np.asarray, adapters)))
    assert results[0][0][-1] < results[0][0][0]
    for losses, adapters in results[1:]:
        assert losses == results[0][0]
        jax.tree.map(assert_bits_equal, adapters, results[0][1])
