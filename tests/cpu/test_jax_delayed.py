"""Delayed scaling in JAX: casts with scales of earlier steps, amaxes as gradients of states, one update for a model."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from qshard import reference
from qshard.jax import init_delayed, linear, merge_observed, spread_states, update_delayed
from qshard.recipes import CurrentScaling, DelayedScaling, Role
from support.awkward import assert_bits_equal
from support.hlo import collectives

RECIPE = DelayedScaling(history=3, margin=1)
ROLES = [role.value for role in Role]


def values(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


X, W, DY = values(16, 64), values(32, 64, seed=1), values(16, 32, seed=2)


def state_with(**scales):
    """Return a state with the scales."""
    fresh = init_delayed(RECIPE)
    return type(fresh)(
        **{role: dataclasses.replace(getattr(fresh, role), scale=jnp.float32(scale)) for role, scale in scales.items()}
    )


STATE = state_with(weight=3.0, activation=7.3, gradient=0.77)


def step(x, w, state, dy, recipe=RECIPE, **options):
    """Return y, and the gradients of sum(y * dy) with respect to x, w and the state."""
    y, vjp = jax.vjp(lambda x, w, state: linear(x, w, recipe, state=state, **options), x, w, state)
    return y, *vjp(dy)


def assert_states_equal(actual, expected):
    for got, want in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert_bits_equal(got, np.asarray(want))


def test_stacked_layers_are_updated_as_each_alone():
    """Stacked states in a tree have the bits of single updates, eagerly and under jit."""
    alone = [step(factor * X, W, STATE, DY)[-1] for factor in (1, np.inf, 0)]
    stack = lambda trees: jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)  # noqa: E731
    states, amaxes = {"a": STATE, "b": [stack([STATE] * 2)]}, {"a": alone[0], "b": [stack(alone[1:])]}
    for update in (update_delayed, jax.jit(update_delayed, static_argnums=2)):
        new = update(states, amaxes, RECIPE)
        made = [new["a"], *(jax.tree.map(lambda leaf, i=i: leaf[i], new["b"][0]) for i in range(2))]
        for got, amax in zip(made, alone, strict=True):
            assert_states_equal(got, update_delayed(STATE, amax, RECIPE))


def test_one_update_for_a_model():
    """The update runs one kernel per element format for all states."""
    states = [init_delayed(RECIPE, shape=(4,)) for _ in range(5)]
    text = jax.jit(functools.partial(update_delayed, recipe=RECIPE)).lower(states, states).as_text()
    assert text.count("@qshard_update_delayed_scale") == 2


FRESH = init_delayed(RECIPE)


@pytest.mark.parametrize("mode", ["Auto", "Explicit", "shard_map"])
def test_first_scales_are_of_the_whole(mode):
    """First scales come from the amax of the whole w and x, however they are sharded."""
    kind = {"Auto": AxisType.Auto, "Explicit": AxisType.Explicit}.get(mode, AxisType.Auto)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,), devices=jax.devices()[:4])
    options = {"weight_spec": P("data"), "gather_axis": "data"}
    y, dx, dw, seen = step(X, W, FRESH, DY)
    for role, values in zip((Role.WEIGHT, Role.ACTIVATION), (W, X), strict=True):
        scale = reference.delayed_scale(0, reference.amax(values), RECIPE.format(role).element, margin=RECIPE.margin)
        new = update_delayed(FRESH, seen, RECIPE)
        assert_bits_equal(getattr(new, role.value).scale, scale)
    with jax.set_mesh(mesh):
        if mode == "shard_map":
            run = jax.shard_map(
                functools.partial(step, axis_name="data", **options),
                in_specs=(P("data"), P("data"), P(), P("data")),
                out_specs=(P("data"), P("data"), P("data"), P()),
            )
            cut = (X, W, FRESH, DY)
        else:
            run = functools.partial(step, **options)
            cut = [jax.device_put(a, jax.NamedSharding(mesh, P("data"))) for a in (X, W, DY)]
            cut.insert(2, FRESH)
        got = jax.jit(run)(*cut)
    for mine, want in zip(got[:2], (y, dx), strict=True):
        assert_bits_equal(np.asarray(mine), np.asarray(want))
    np.testing.assert_allclose(got[2], dw, rtol=1e-5, atol=1e-5)  # Another order of the sum over rows.
    assert_states_equal(got[3], seen)


def loss(state, x, w=W):
    return jnp.sum(jnp.sin(linear(x, w, RECIPE, state=state)))


BATCHES = np.stack([X, 5 * X, X / 3])


def largest():
    return reference.amax(BATCHES)


def test_microbatches():
    """A Python loop and a scan merge amaxes to their maximum, starting from zeros."""
    zeros = jax.tree.map(jnp.zeros_like, STATE)
    merged = zeros
    for x in BATCHES:
        merged = merge_observed(merged, jax.grad(loss)(STATE, x))
    assert_bits_equal(merged.activation.observed.amax, largest())

    def accumulate(amaxes, x):
        return merge_observed(amaxes, jax.grad(loss)(STATE, x)), None

    scanned, _ = jax.jit(lambda batches: jax.lax.scan(accumulate, zeros, batches))(BATCHES)
    assert_states_equal(scanned, merged)
    assert_bits_equal(update_delayed(STATE, scanned, RECIPE).activation.amax_history[-1], largest())


def test_shared_state():
    """Calls in a loop share a state through copies of `spread_states`."""

    def total(state):
        copies = spread_states(state, len(BATCHES))
        return jax.lax.scan(lambda sum_, each: (sum_ + loss(*each), None), 0.0, (copies, BATCHES))[0]

    amaxes = jax.jit(jax.grad(total))(STATE)
    assert_bits_equal(amaxes.activation.observed.amax, largest())
    assert_bits_equal(amaxes.weight.observed.amax, reference.amax(W))
    update_delayed(STATE, amaxes, RECIPE)


def summed_by_jax(state):
    return sum(loss(state, x) for x in BATCHES)


MISUSES = {
    "summed by JAX": lambda: jax.grad(summed_by_jax)(STATE),
    "summed": lambda: jax.tree.map(jnp.add, jax.grad(loss)(STATE, X), jax.grad(loss)(STATE, 5 * X)),
    "mean": lambda: jax.tree.map(lambda a, b: (a + b) / 2, *(jax.grad(loss)(STATE, x) for x in BATCHES[:2])),
    "scaled": lambda: jax.tree.map(lambda leaf: leaf * 0.5, jax.grad(loss)(STATE, X)),
    "rounded": lambda: jax.tree.map(lambda leaf: leaf.astype("bfloat16").astype("float32"), jax.grad(loss)(STATE, X)),
    "summed, then merged": lambda: merge_observed(jax.grad(summed_by_jax)(STATE), jax.grad(loss)(STATE, X)),
}


@pytest.mark.parametrize("name", MISUSES)
def test_no_misuse_is_silent(name):
    """Misuse raises; under jit, where values are unknown, scales become NaN."""
    amaxes = MISUSES[name]()
    with pytest.raises(ValueError, match="update_delayed: amaxes were summed, averaged, scaled or rounded; merge"):
        update_delayed(STATE, amaxes, RECIPE)
    new = jax.jit(functools.partial(update_delayed, recipe=RECIPE))(STATE, amaxes)
    assert np.isnan(new.activation.scale)


def test_unused_states_stay():
    """A layer not used in a step has zero amaxes, which leave its state."""
    zeros = jax.grad(lambda state: 0.0 * state.weight.scale)(STATE)
    assert_states_equal(update_delayed(STATE, zeros, RECIPE), STATE)


def test_reduction_of_all_amaxes_at_once():
    """States that vary over the mesh return local amaxes, and the update reduces them all at once."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def local(x, w, state, dy):
        mine = jax.tree.map(lambda leaf: jax.lax.pcast(leaf, "data", to="varying"), state)
        amaxes = jax.grad(lambda state: jnp.sum(linear(x, w, RECIPE, state=state) * dy))(mine)
        return update_delayed(state, amaxes, RECIPE, axis_name="data")

    program = jax.shard_map(local, mesh=mesh, in_specs=(P("data"), P(), P(), P("data")), out_specs=P())
    compiled = jax.jit(program).lower(X, W, STATE, DY).compile()
    assert_states_equal(compiled(X, W, STATE, DY), update_delayed(STATE, step(X, W, STATE, DY)[3], RECIPE))
    assert sum(len(arrays) for _, arrays in collectives(compiled)) == 2  # one per element format


def unchecked(axis_name, out=None):
    """Return the amaxes of a step in `shard_map(check_vma=False)`, where types do not show varying axes."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])

    def local(x, w, state, dy):
        amaxes = step(x, w, state, dy, gather_axis="data", axis_name=axis_name)[3]
        return jax.tree.map(lambda leaf: leaf[None], amaxes) if out else amaxes

    specs = (P("data"), P("data"), P(), P("data"))
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out or P(), check_vma=False))(
        X, W, STATE, DY
    )


def test_what_types_do_not_tell_is_to_be_named():
    """Without axis_name, the amaxes of one device would be returned as those of all."""
    with pytest.raises(ValueError, match="linear: check_vma=False hides which devices share state; pass as"):
        unchecked(None)
    assert_states_equal(unchecked("data"), step(X, W, STATE, DY)[3])
    each = unchecked((), P("data")).activation.observed.amax
    assert_bits_equal(np.asarray(each), np.array([reference.amax(x) for x in np.split(X, 4)]))


def test_amaxes_of_whole_weights_without_types():
    """For a tensor-parallel weight, without a gather, amaxes are reduced over the axes that share the state."""
    mesh = jax.make_mesh((4,), ("tp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])

    def local(x, w, state, dy):
        return step(x, w, state, dy, axis_name="tp")[3]

    specs = (P(), P("tp"), P(), P(None, "tp"))
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    assert_states_equal(jax.jit(run)(X, W, STATE, DY), step(X, W, STATE, DY)[3])


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: linear(X, W, RECIPE),
            ValueError,
            "linear: DelayedScaling needs `state`; pass the state of this",
        ),
        (
            lambda: linear(X, W, CurrentScaling(), state=STATE),
            ValueError,
            "linear: state is for DelayedScaling, and the recipe is",
        ),
        (
            lambda: linear(X, W, RECIPE, state=init_delayed(RECIPE, (2,))),
            ValueError,
            r"linear: state \(\{'scale': \(2,\), 'amax_history': \(2, 3\)\}\) does not",
        ),
        (lambda: linear(X, W, DelayedScaling(), state=STATE), ValueError, r"linear: state \(\{'scale': \(\)"),
        (
            lambda: update_delayed(STATE, STATE, CurrentScaling()),
            TypeError,
            r"\(CurrentScaling\) has no scaling state; pass DelayedScaling, the",
        ),
        (lambda: update_delayed(STATE, [STATE], RECIPE), ValueError, r"do not have the structure of states"),
        (lambda: update_delayed([STATE, 1.0], [STATE, 1.0], RECIPE), ValueError, "update_delayed: states has leaves"),
    ],
)
def test_errors(call, error, text):
    with pytest.raises(error, match=text):
        call()
