"""Experts in JAX: `ragged_dot`, and `linear` under `vmap`, have the bits of a loop of `linear` over experts.

Operands have few mantissa bits and one exponent or two, so that products and fp32 sums are exact in any order.
"""

import functools

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
    init_delayed,
    linear,
    optimizer,
    quantize,
    ragged_dot,
    update_delayed,
    value_and_grad,
)
from qshard.recipes import DelayedScaling
from support.awkward import assert_bits_equal
from support.formats import RECIPES
from support.hlo import collectives
from support.jax_experts import DY, ENDS, SEED, SIZES, E, K, M, N, W, X, exact, looped, mesh_of, step
from support.pairs import turns

OFTEN = ("DelayedScaling", "MXFP8", "NVFP4")
often = [pytest.param(name, marks=[] if name in OFTEN else pytest.mark.slow) for name in RECIPES]


@pytest.mark.parametrize("name", often)
def test_a_loop_over_experts(name):
    """Forward and both gradients equal the loop, with empty experts and rows beyond the last group."""
    recipe = RECIPES[name]
    states = init_delayed(recipe, (E,)) if recipe.stateful else None
    want = looped(X, W, DY, recipe, states)
    got = step(X, W, DY, SIZES, recipe, states)
    for i, (made, expected) in enumerate(zip(got[:3], want[:3], strict=True)):
        if recipe.gradient.hadamard and i == 2:  # Rotated values have rounded sums, in another order.
            np.testing.assert_allclose(made, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())
        else:
            assert_bits_equal(np.asarray(made), expected)
    assert not np.asarray(got[0])[ENDS[-1] :].any()
    assert not np.asarray(got[2])[SIZES == 0].any()
    for expert, seen in want[3].items():
        mine = jax.tree.map(lambda leaf, e=expert: leaf[e], got[3])
        jax.tree.map(lambda a, b: assert_bits_equal(np.asarray(a), np.asarray(b)), mine, seen)
    if recipe.stateful:
        new = update_delayed(states, got[3], recipe)
        assert (np.asarray(new.activation.scale) != 0).tolist() == (SIZES != 0).tolist()


def per_device(name):
    """Return a setup with experts over one mesh axis, weights and tokens over the other: tokens are (E, FSDP)."""
    recipe, mesh = RECIPES[name], mesh_of()
    groups = np.array([[[9, 0, 23], [40, 1, 0]], [[0, 0, 64], [17, 30, 2]]], np.int32)
    rows = 64
    x, dy = exact(2, 2, rows, K), exact(2, 2, rows, N, seed=2)
    return recipe, mesh, groups, x, dy


def one_step(x, w, dy, sizes, recipe, state, gather, axis_name=None):
    options = {"weight_spec": P("expert", "fsdp"), "gather_axis": "fsdp"} if gather else {}
    call = lambda x, w, state: ragged_dot(  # noqa: E731
        x, w, sizes, recipe, weight_layout="NK", seed=SEED, state=state, axis_name=axis_name, **options
    )
    y, vjp = jax.vjp(call, x, w, state)
    return y, *vjp(dy)


@pytest.mark.parametrize("name", often)
def test_experts_and_fsdp_in_shard_map(name):
    """One gather sends the codes of all local experts, and gradients are scattered to the shards of weights."""
    recipe, mesh, groups, x, dy = per_device(name)
    state = init_delayed(recipe, (E,)) if recipe.stateful else None
    alone = jax.jit(functools.partial(one_step, recipe=recipe, gather=False))
    ys, dxs, dw, seen = [], [], np.zeros_like(W), []
    for i, j in np.ndindex(2, 2):
        half = slice(3 * i, 3 * i + 3)
        own = None if state is None else jax.tree.map(lambda leaf, half=half: leaf[half], state)
        y, dx, part, amaxes = alone(x[i, j], W[half], dy[i, j], groups[i, j], state=own)
        ys.append(y)
        dxs.append(dx)
        dw[half] += part
        seen.append(amaxes)

    def local(x, w, dy, sizes, state):
        made = one_step(x[0, 0], w, dy[0, 0], sizes[0, 0], recipe, state, gather=True)
        return (made[0][None, None], made[1][None, None], *made[2:])

    tokens, weights = P("expert", "fsdp"), P("expert", "fsdp")
    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(tokens, weights, tokens, tokens, P("expert")),
        out_specs=(tokens, tokens, weights, P("expert")),
    )
    lowered = jax.jit(run).lower(x, W, dy, groups, state)
    got = lowered.compile()(x, W, dy, groups, state)
    assert_bits_equal(np.asarray(got[0]).reshape(4, *ys[0].shape), np.stack(ys))
    assert_bits_equal(np.asarray(got[1]).reshape(4, *dxs[0].shape), np.stack(dxs))
    np.testing.assert_allclose(
        got[2], dw, rtol=1e-6, atol=1e-6 * np.abs(dw).max()
    )  # Sums over devices, in another order.
    gathered = [array for kind, arrays in collectives(lowered.compile()) if kind == "all-gather" for array in arrays]
    codes = f"u8[3,{N},{K // recipe.weight.element.codes_per_byte}]"
    assert codes in gathered
    assert all(array == codes or np.prod(eval(array[array.index("[") :])) <= 3 * N * K // 64 for array in gathered)
    if state is not None:  # The maximum over devices that share the experts.
        for i in range(2):
            parts = [np.asarray(seen[2 * i + j].activation.observed.amax) for j in range(2)]
            assert_bits_equal(np.asarray(got[3].activation.observed.amax)[3 * i : 3 * i + 3], np.maximum(*parts))


PRIMARY_AND_LAYOUT = [(False, "NK"), (True, "KN"), (True, "NK"), (False, "KN")]


@turns(1, name=["MXFP8", "NVFP4", "CurrentScaling"], way={f"{each[0]}-{each[1]}": each for each in PRIMARY_AND_LAYOUT})
def test_shards_that_end_within_blocks(name, way):
    """Shards of 8 or 12 rows split blocks of 16 or 32: codes are those of the whole weight."""
    is_primary, layout = way
    recipe, mesh, cut = RECIPES[name], mesh_of(fsdp=8), P(None, "fsdp")
    want = step(X, W, DY, SIZES, recipe)
    masters = optimizer(optax.sgd(1.0), recipe, spec=cut)
    values = W if layout == "NK" else W.swapaxes(1, 2)

    def own(w, x, dy):
        given = {"weight_layout": layout, "weight_spec": cut, "gather_axis": "fsdp", "seed": SEED}
        loss = lambda w, x: (ragged_dot(x, w, SIZES, recipe, **given) * dy).sum()  # noqa: E731
        return value_and_grad(loss, (0, 1))(w, x)[1], ragged_dot(x, w, SIZES, recipe, **given)

    with jax.set_mesh(mesh):
        w = jax.device_put(values, NamedSharding(mesh, cut))
        w, specs = (masters.recast(masters.init(w), w), masters.specs(values, mesh)) if is_primary else (w, cut)
        rows = P("fsdp")
        run = jax.shard_map(own, in_specs=(specs, rows, rows), out_specs=((cut, rows), rows))
        (dw, dx), y = jax.jit(run)(w, np.tile(X, (8, 1)), np.tile(DY, (8, 1)))
    for got, expected in ((y, want[0]), (dx, want[1])):
        for part in np.split(np.asarray(got), 8):
            assert_bits_equal(part, np.asarray(expected))
    dw = dw if layout == "NK" else dw.swapaxes(1, 2)
    np.testing.assert_allclose(dw, 8 * np.asarray(want[2]), rtol=1e-6, atol=1e-5 * np.abs(want[2]).max())


def test_one_set_of_scales_for_rows_on_several_devices():
    """With `axis_name`, all rows of an expert share their scales across devices."""
    recipe, mesh = RECIPES["CurrentScaling"], mesh_of(fsdp=2)
    x = np.concatenate([exact(32, K), 4 * exact(32, K, seed=5)])
    sizes = np.array([[20, 12], [32, 0]], np.int32)
    run = jax.shard_map(
        lambda x, sizes: ragged_dot(x, W[:2], sizes[0], recipe, weight_layout="NK", axis_name="fsdp"),
        mesh=mesh,
        in_specs=P("fsdp"),
        out_specs=P("fsdp"),
    )
    order = np.concatenate([np.arange(20), np.arange(32, 64), np.arange(20, 32)])
    want = np.zeros((64, N), np.float32)
    want[order] = ragged_dot(x[order], W[:2], np.array([52, 12]), recipe, weight_layout="NK")
    assert_bits_equal(np.asarray(jax.jit(run)(x, sizes)), want)


@pytest.mark.each_value
@pytest.mark.parametrize("layout", ["NK", "KN"])
@pytest.mark.parametrize("name", ["CurrentScaling", "MXFP8"])
def test_codes_travel_on_auto_meshes(name, layout):
    recipe, mesh = RECIPES[name], mesh_of()
    spec = P("expert", "fsdp")
    options = {"weight_layout": layout, "weight_spec": spec, "gather_axis": "fsdp"}
    lies = np.asarray if layout == "NK" else lambda w: np.asarray(w).swapaxes(1, 2)
    with jax.set_mesh(mesh):
        w = jax.device_put(lies(W), NamedSharding(mesh, spec))
        program = step.lower(X, w, DY, SIZES, recipe, **options).compile()
        got = program(X, w, DY, SIZES)
    want = looped(X, W, DY, recipe)
    for made, expected in zip((*got[:2], lies(got[2])), want[:3], strict=True):
        assert_bits_equal(np.asarray(made), expected)
    assert got[2].sharding.is_equivalent_to(w.sharding, 3)
    moved = [array for kind, arrays in collectives(program) if kind == "all-gather" for array in arrays]
    assert f"u8[3,{','.join(map(str, w.shape[1:]))}]" in moved


@pytest.mark.parametrize("name", often)
def test_weights_of_the_layout_of_jax(name):
    """`[E, K, N]` gives the bits of `[E, N, K]`, with gradients in the layout of the weights; codes too."""
    recipe = RECIPES[name]
    state = init_delayed(recipe, (E,)) if recipe.stateful else None
    transposed = W.swapaxes(1, 2)
    y, dx, dw, seen = step(X, W, DY, SIZES, recipe, state)
    got = step(X, transposed, DY, SIZES, recipe, state, weight_layout="KN")
    for made, want in zip(got[:2], (y, dx), strict=True):
        assert_bits_equal(np.asarray(made), np.asarray(want))
    if recipe.gradient.hadamard:  # Rotated values have rounded sums, in another order.
        np.testing.assert_allclose(got[2].swapaxes(1, 2), dw, rtol=1e-6, atol=1e-6 * np.abs(dw).max())
    else:
        assert_bits_equal(np.asarray(got[2]).swapaxes(1, 2), np.asarray(dw))
    jax.tree.map(lambda a, b: assert_bits_equal(np.asarray(a), np.asarray(b)), got[3], seen)
    if not recipe.stateful and recipe.weight.shares_codes:
        codes = jax.jit(jax.vmap(lambda w: quantize(w, recipe.weight)))(transposed)
        made = ragged_dot(X, codes, SIZES, recipe, weight_layout="KN", seed=SEED)
        assert_bits_equal(np.asarray(made), np.asarray(y))


def test_square_weights_say_how_they_lie():
    """Where N == K, shapes are ambiguous, so a call without `weight_layout` raises."""
    x, w = exact(M, N), exact(E, N, N, seed=1)
    assert_bits_equal(
        np.asarray(ragged_dot(x, w, SIZES, "CurrentScaling", weight_layout="KN")),
        np.asarray(jax.lax.ragged_dot(x, w, SIZES)),
    )
    with pytest.raises(ValueError, match=r"weight_layout \(None\) is not a layout; pass 'KN' for w \[E, K, N\], as in"):
        ragged_dot(x, w, SIZES, "CurrentScaling")


def test_sizes_that_a_jitted_function_closes_over():
    """The host knows a closed-over `jax.Array`, and checks it."""
    sizes = jnp.asarray(SIZES)
    closed = jax.jit(lambda x, w: ragged_dot(x, w, sizes, "CurrentScaling", weight_layout="NK"))
    assert_bits_equal(np.asarray(closed(X, W)), np.asarray(step(X, W, DY, SIZES, RECIPES["CurrentScaling"])[0]))
    with pytest.raises(ValueError, match=r"group_sizes \(sum 189\) exceed the rows of x \(188, 96\); pass the"):
        closed(X[:188], W)


@pytest.mark.parametrize("name", ["CurrentScaling", "DelayedScaling", "NVFP4"])
def test_codes_as_weights(name):
    """Frozen codes and primary weights give the results of float32 weights."""
    recipe = RECIPES[name]
    state = init_delayed(recipe, (E,)) if recipe.stateful else None
    y, dx, dw, _ = step(X, W, DY, SIZES, recipe, state)
    q = jax.jit(jax.vmap(lambda w: quantize(w, recipe.weight, usage=Usage.ROWWISE)))(W)
    given = {"weight_layout": "NK", "seed": SEED, "state": state}
    call = lambda x, w, state=state: jnp.sum(ragged_dot(x, w, SIZES, recipe, **given | {"state": state}) * DY)  # noqa: E731
    assert_bits_equal(np.asarray(jax.jit(jax.grad(call))(X, q)), np.asarray(dx))
    assert_bits_equal(np.asarray(ragged_dot(X, q, SIZES, recipe, **given)), np.asarray(y))
    primary = PrimaryWeight.of(q)
    grads = jax.jit(value_and_grad(call, (1, 2) if recipe.stateful else (1,)))(X, primary, state)[1]
    assert_bits_equal(np.asarray(grads[0]), np.asarray(dw))
    with pytest.raises(TypeError, match=r"w is quantized, and codes have no gradient|got uint8"):
        jax.grad(call, 1)(X, q)


EXPERTS = 4
TOKENS, EACH = exact(EXPERTS, 256, K), exact(EXPERTS, 128, K, seed=1)
CALLS = exact(EXPERTS, 256, 128, seed=2)


@pytest.mark.each_value
@pytest.mark.parametrize("mode", ["Auto", "Explicit", "shard_map"])
@pytest.mark.parametrize("name", often)
def test_vmapped_experts(name, mode):
    """With experts over one mesh axis, FSDP and tokens over the other, results equal a loop with a key per expert."""
    recipe, mesh = RECIPES[name], mesh_of(AxisType.Explicit if mode == "Explicit" else AxisType.Auto)
    keys = jax.random.split(jax.random.key(0), EXPERTS)
    axes = {"axis_name": "fsdp"} if mode == "shard_map" else {}

    def one(x, w, dy, key, state, **options):
        y, vjp = jax.vjp(lambda x, w, state: linear(x, w, recipe, seed=key, state=state, **options), x, w, state)
        return y, *vjp(dy)

    states = init_delayed(recipe, (EXPERTS,)) if recipe.stateful else None
    alone = jax.jit(one)
    want = [
        alone(*parts, None if states is None else jax.tree.map(lambda leaf, i=i: leaf[i], states))
        for i, parts in enumerate(zip(TOKENS, EACH, CALLS, keys, strict=True))
    ]
    run = jax.vmap(functools.partial(one, weight_spec=P("fsdp"), gather_axis="fsdp", **axes))
    both, expert = P("expert", "fsdp"), P("expert")
    if mode == "shard_map":
        specs = (both, both, both, expert, expert)
        run = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=(both, both, both, expert))
    with jax.set_mesh(mesh):
        args = jax.device_put((TOKENS, EACH, CALLS), NamedSharding(mesh, both))
        keys, states = jax.device_put((keys, states), NamedSharding(mesh, expert))
        program = jax.jit(run).lower(*args, keys, states).compile()
        got = jax.tree.map(np.asarray, program(*args, keys, states))
    for i, expected in enumerate(want):
        assert_bits_equal(np.asarray(got[0][i]), np.asarray(expected[0]))
        for made, right in zip(got[1:3], expected[1:3], strict=True):  # fp32 sums in another order.
            np.testing.assert_allclose(made[i], right, rtol=1e-5, atol=1e-5 * float(jnp.abs(right).max()))
        for a, b in zip(jax.tree.leaves(got[3]), jax.tree.leaves(expected[3]), strict=True):
            assert_bits_equal(np.asarray(a[i]), np.asarray(b))
    gathered = [array for kind, arrays in collectives(program) if kind == "all-gather" for array in arrays]
    codes = f"8[2,128,{K // recipe.weight.element.codes_per_byte}]"  # Signed or unsigned.
    assert {f"u{codes}", f"s{codes}"}.intersection(gathered)
    assert not [array for array in gathered if array in (f"f32[2,128,{K}]", f"bf16[2,128,{K}]", f"f16[2,128,{K}]")]


def test_each_expert_draws_its_own_numbers():
    """Experts with the same rows, gradient and seed round differently; so do keys under `vmap`."""
    recipe = RECIPES["NVFP4"]
    x, dy, w = (
        np.tile(exact(16, 32), (2, 1)),
        np.tile(exact(16, 32, seed=1) / 7, (2, 1)),
        np.tile(exact(1, 32, 32), (2, 1, 1)),
    )
    _, dx, dw, _ = step(x, w, dy, np.array([16, 16]), recipe)
    assert (np.asarray(dx[:16]) != np.asarray(dx[16:])).any()
    assert (np.asarray(dw[0]) != np.asarray(dw[1])).any()
    keys = jax.random.split(jax.random.key(1), 2)
    grad = jax.jit(lambda key: jax.vjp(lambda w: linear(x[:16], w, recipe, seed=key), w[0])[1](dy[:16])[0])
    made = jax.jit(jax.vmap(grad))(keys)
    assert (np.asarray(made[0]) != np.asarray(made[1])).any()
    assert_bits_equal(np.asarray(made[1]), np.asarray(grad(keys[1])))


def test_more_rows_than_there_are():
    more = SIZES + np.array([0, 12, 0, 0, 0, 0], np.int32)
    with pytest.raises(ValueError, match=r"ragged_dot: group_sizes \(sum 201\) exceed the rows of x \(200, 96\)"):
        ragged_dot(X, W, more, "CurrentScaling", weight_layout="NK")
    y = jax.jit(lambda sizes: ragged_dot(X, W, sizes, "CurrentScaling", weight_layout="NK"))(more)
    assert np.isnan(y).all()


def test_an_overflow_stays_with_its_expert():
    """An inf in one row gives NaN in all rows of its expert, and in no others."""
    x = X.copy()
    x[45, 3] = np.inf
    y, dx, dw, _ = step(x, W, DY, SIZES, RECIPES["CurrentScaling"])
    own = np.zeros(M, bool)
    own[43:172] = True
    assert np.isnan(np.asarray(y)[own]).all()
    assert np.isfinite(np.asarray(y)[~own]).all()
    assert np.isnan(np.asarray(dw)[3]).all()
    assert np.isfinite(np.asarray(dw)[[0, 2, 5]]).all()
    assert np.isfinite(dx).all()


as_rows = functools.partial(ragged_dot, weight_layout="NK")


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: as_rows(X, W[0], SIZES, "MXFP8"),
            r"w \(64, 96\) does not fit x \(200, 96\); pass w as \[E, N, K\] and x as",
        ),
        (lambda: as_rows(X, W, SIZES[:2], "MXFP8"), r"group_sizes \(int32 \(2,\)\) is not one integer for each of 6"),
        (lambda: as_rows(X, W[:, :50], SIZES, "MXFP8"), r"ragged_dot: w \(50, 96\) is not a whole number of 32x32"),
        (lambda: as_rows(X, W, SIZES, "NVFP4"), "ragged_dot: NVFP4 uses stochastic rounding and needs `seed`; pass"),
        (lambda: as_rows(X, W, SIZES, "DelayedScaling"), "ragged_dot: DelayedScaling needs `state`; pass"),
        (
            lambda: as_rows(X, W, SIZES, DelayedScaling(), state=init_delayed("DelayedScaling")),
            r"state \(scale \(\)\) is not one for each of 6 experts; pass",
        ),
        (
            lambda: as_rows(X, jax.vmap(lambda w: quantize(w, "MXFP8_32x32"))(W), SIZES, "CurrentScaling"),
            r"ragged_dot: w \(MXFP8_32x32\) is not in the weight format of the",
        ),
        (lambda: as_rows(X, W, SIZES, recipes.MXFP8(), gather_axis="fsdp"), r"'fsdp'\) is not an axis of the mesh"),
    ],
)
def test_errors(call, text):
    with pytest.raises(ValueError, match=text):
        call()


def test_explicit_meshes_are_refused():
    mesh = mesh_of(AxisType.Explicit)
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match=r"Explicit mesh axes \('expert', 'fsdp'\).*inside jax.shard_map"),
    ):
        as_rows(jax.device_put(X, NamedSharding(mesh, P())), W, SIZES, "CurrentScaling")
