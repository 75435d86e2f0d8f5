"""Probes of `qshard.jax.linear`: rows equal `stats` of the operands, in every mode, and no result changes."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from qshard.jax import init_delayed, init_numerics, linear, numerics_of
from qshard.numerics import stats
from qshard.recipes import MXFP8, DelayedScaling, Role
from support.awkward import awkward_values
from support.formats import RECIPES
from support.pairs import turns

NAMES = [
    name if name in ("CurrentScaling", "DelayedScaling", "NVFP4") else pytest.param(name, marks=pytest.mark.slow)
    for name in RECIPES
]
EXACT = ("zeros_made", "subnormal", "saturated", "nonfinite_given", "nonfinite_made")


def operands(rows=64):
    x = awkward_values((rows, 64), 1, kinds=("normal", "outlier", "zeros"))
    w = np.random.default_rng(2).standard_normal((96, 64)).astype(np.float32) / 8
    dy = np.random.default_rng(3).standard_normal((rows, 96)).astype(np.float32) * 1e-6
    return x, w, dy


def given_to(recipe):
    return {
        "seed": 7 if recipe.stochastic else None,
        "state": init_delayed(recipe) if isinstance(recipe, DelayedScaling) else None,
    }


def step(recipe, x, w, dy, probe, **options):
    """Return the loss, the gradients of x and w, and the cotangent of the probe."""
    options = {**given_to(recipe), **options}
    state = options.pop("state")

    def loss_of(x, w, probe, state):
        more = {} if probe is None else {"probe": probe}
        return jnp.sum(linear(x, w, recipe, **options, **more, state=state) * dy)

    wrt = (0, 1) if probe is None else (0, 1, 2)
    loss, grads = jax.value_and_grad(loss_of, (*wrt, *((3,) if state is not None else ())))(x, w, probe, state)
    return loss, grads[: len(wrt)]


@functools.cache
def step_on_one_device(name):
    """Return the results of `step` for 256 rows of x on one device, with a probe."""
    return jax.jit(functools.partial(step, RECIPES[name]))(*operands(256), init_numerics())


def on_one_device(name):
    return numerics_of(step_on_one_device(name)[1][2], RECIPES[name])


def assert_row_is(row, x, fmt):
    want = stats(x, fmt)
    for name in EXACT:
        assert getattr(row, name) == pytest.approx(getattr(want, name), rel=1e-12, abs=0), name
    assert row.sqnr_db == pytest.approx(want.sqnr_db, rel=1e-5, nan_ok=True)
    assert (row.amax, row.elements, row.format) == (np.abs(x).max(), x.size, str(fmt))


@pytest.mark.parametrize("name", NAMES)
def test_on_one_device(name):
    """A probe changes no bit of the step."""
    recipe, (x, w, dy) = RECIPES[name], operands(256)
    plain = jax.jit(functools.partial(step, recipe))(x, w, dy, None)
    loss, (*grads, seen) = step_on_one_device(name)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves((loss, grads)), strict=True):
        np.testing.assert_array_equal(a, b)
    rows = numerics_of({"up": seen}, recipe)
    assert [(row.layer, row.role, row.calls) for row in rows.rows] == [("up", role, 1) for role in Role]
    for role, array in zip((Role.WEIGHT, Role.ACTIVATION, Role.GRADIENT), (w, x, dy), strict=True):
        if not recipe.format(role).stochastic:
            assert_row_is(rows.of("up", role), array, recipe.format(role))


@turns(1, name=list(RECIPES), kind=[AxisType.Auto, AxisType.Explicit])
def test_sharded_over_devices(name, kind):
    """Under jit on eight devices, counts are those of whole arrays."""
    recipe, (x, w, dy) = RECIPES[name], operands(256)
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        cut = [jax.device_put(array, NamedSharding(mesh, P("fsdp"))) for array in (x, w, dy)]
        run = jax.jit(functools.partial(step, recipe, weight_spec=P("fsdp"), gather_axis="fsdp"))
        rows = numerics_of(run(*cut, init_numerics())[1][2], recipe)
    assert_alike(rows, on_one_device(name))


def assert_alike(rows, want):
    assert len(rows.rows) == len(want.rows) == 3
    for row, whole in zip(rows.rows, want.rows, strict=True):
        for name in ("elements", "amax", *EXACT):
            assert getattr(row, name) == getattr(whole, name), (row.role, name)
        for name in ("scale_low", "scale_high"):
            assert getattr(row, name) == pytest.approx(getattr(whole, name), rel=1e-6)
        assert row.sqnr_db == pytest.approx(whole.sqnr_db, rel=1e-4, nan_ok=True)


@pytest.mark.each_value
@pytest.mark.parametrize(("name", "check_vma"), [*((name, True) for name in RECIPES), ("NVFP4", False)])
def test_in_shard_map(name, check_vma):
    """With one scale for x by axis_name, rows are those of the whole. Shards of w split 2-D blocks."""
    recipe, (x, w, dy) = RECIPES[name], operands(256)
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))

    def one(x, w, dy, probe):
        return step(recipe, x, w, dy, probe, gather_axis="fsdp", axis_name="fsdp")[1]

    inside = jax.shard_map(
        one,
        mesh=mesh,
        in_specs=(P("fsdp"), P("fsdp"), P("fsdp"), P()),
        out_specs=(P("fsdp"), P("fsdp"), P()),
        check_vma=check_vma,
    )
    assert_alike(numerics_of(jax.jit(inside)(x, w, dy, init_numerics())[2], recipe), on_one_device(name))


def test_a_probe_for_each_device():
    """Probes sharded along a leading axis count their own device; without axis_name, each has its own scale."""
    x, w, dy = operands(256)
    x *= np.linspace(1, 2, 256, dtype=np.float32)[:, None]
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))

    def one(x, w, dy, probe):
        seen = step(RECIPES["CurrentScaling"], x, w, dy, jax.tree.map(lambda p: p[0], probe), gather_axis="fsdp")[1][2]
        return jax.tree.map(lambda p: p[None], seen)

    inside = jax.shard_map(one, mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp"))
    seen = jax.jit(inside)(x, w, dy, init_numerics((8,)))
    for role in Role:
        assert np.unique(getattr(seen, role.value)[:, 2]).size > 1
    row = numerics_of(seen, "CurrentScaling").of("", Role.ACTIVATION)
    assert (row.calls, row.elements, row.amax) == (8, x.size, np.abs(x).max())
    assert row.scale_low < row.scale_high


def test_scan_and_remat():
    """A scan takes a probe per layer; recomputation does not count twice."""
    x, w = jnp.ones((32, 64)), jnp.stack([jnp.eye(64) * factor for factor in (1.0, 2.0, 4.0)])

    def loss_of(probes):
        @jax.checkpoint
        def layer(x, given):
            return linear(x, given[0], MXFP8(), probe=given[1]), None

        return jax.lax.scan(layer, x, (w, probes))[0].sum()

    seen = jax.jit(jax.grad(loss_of))(init_numerics((3,)))
    assert [float(a) for a in seen.activation[:, 2]] == [1.0, 1.0, 2.0]
    assert numerics_of(seen, "MXFP8").of("", Role.WEIGHT).calls == 3


def test_beside_the_gradient_of_a_state():
    """A step of delayed scaling differentiates states and probes together."""
    recipe, (x, w, _) = DelayedScaling(), operands()

    def loss_of(state, probe):
        return linear(x, w, recipe, state=state, probe=probe).sum()

    amaxes, seen = jax.jit(jax.grad(loss_of, (0, 1)))(init_delayed(recipe), init_numerics())
    rows = numerics_of([seen], recipe)
    for role in Role:
        assert rows.of("0", role).amax == getattr(amaxes, role.value).observed.amax > 0


def test_sums_of_probes_are_refused():
    x, w, _ = operands()
    gradient = jax.grad(lambda p: sum(linear(x, w, "MXFP8", probe=p).sum() for _ in range(2)))
    seen = jax.jit(gradient)(init_numerics())
    with pytest.raises(ValueError, match=r"the probe of '0' \(weight\) was used by 2 calls, so its amaxes are"):
        numerics_of([seen], "MXFP8")
    half = jax.tree.map(lambda p: p / 4, seen)
    with pytest.raises(ValueError, match=r"numerics_of: the probe of '0' \(weight\) was used by 0\.5 calls, so"):
        numerics_of([half], "MXFP8")


def test_not_finite_and_kn():
    x, w, _ = operands()
    x = x.copy()
    x[0, :2] = np.inf, np.nan
    gradient = jax.grad(lambda p: linear(x, w.T, "CurrentScaling", weight_layout="KN", probe=p).sum())
    seen = jax.jit(gradient)(init_numerics())
    rows = numerics_of([seen], "CurrentScaling")
    assert rows.of("0", Role.ACTIVATION).nonfinite_given == 2 / x.size
    assert math.isfinite(rows.of("0", Role.ACTIVATION).amax)
    assert_row_is(rows.of("0", Role.WEIGHT), w, RECIPES["CurrentScaling"].weight)


def test_mistakes():
    x, w, _ = operands()
    with pytest.raises(TypeError, match=r"probe \(3\) is not a Probe; pass one from init_numerics, for this"):
        linear(x, w, "MXFP8", probe=3)
    with pytest.raises(TypeError, match=r"shape .* is not a tuple"):
        init_numerics(3)
    with pytest.raises(TypeError, match="is not a Probe; pass the gradient with respect to the probes"):
        numerics_of({"up": jnp.zeros(3)}, "MXFP8")
    with pytest.raises(ValueError, match="linear: probe does not support local_axes, gather_rows"):
        linear(x, w, "MXFP8", probe=init_numerics(), vmap_as_rows=True)
