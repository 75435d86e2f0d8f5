"""`grouped_mlp` in JAX: meshes, `shard_map`, remat, `vmap`, and what is refused."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import qshard.jax as qj
from support.awkward import assert_bits_equal
from support.formats import RECIPES
from support.hlo import collectives
from support.jax_expert_parallel import ALL

T, K, E, H, WIDE = 64, 2, 4, 64, 128


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


X, ROUTER, DY = normal(T, H), normal(E, H, seed=1), normal(T, H, seed=4)
W13, W2 = normal(E, 2 * WIDE, H, seed=2) / H**0.5, normal(E, H, WIDE, seed=3) / WIDE**0.5


def layer(x, router, w13, w2, recipe="CurrentScaling", **options):
    indices, weights = qj.topk_routing(x @ router.T, K)
    return qj.grouped_mlp(x, indices, weights, w13, w2, recipe, **options)


@functools.partial(jax.jit, static_argnames="recipe")
def step(x, router, w13, w2, dy, recipe="CurrentScaling"):
    y, vjp = jax.vjp(functools.partial(layer, recipe=recipe), x, router, w13, w2)
    return y, *vjp(dy)


def assert_close(made, want, error):
    for got, expected in zip(made, want, strict=True):
        assert np.linalg.norm(np.asarray(got) - expected) <= error * np.linalg.norm(expected)


def often(name):
    """Parametrize by recipe; recipes other than `name` are slow."""
    names = [None, "CurrentScaling", "MXFP8"]
    cases = [pytest.param(each, marks=[] if each == name else pytest.mark.slow) for each in names]
    return pytest.mark.parametrize("recipe", cases)


@often(None)
def test_an_auto_mesh_of_eight_devices(recipe):
    """XLA shards tokens; results are those of one device, up to the order of sums."""
    want = step(X, ROUTER, W13, W2, DY, recipe)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    given = [jax.device_put(a, rows) for a in (X, DY)], [jax.device_put(a, whole) for a in (ROUTER, W13, W2)]
    with jax.set_mesh(mesh):
        made = step(given[0][0], *given[1], given[0][1], recipe)
    assert_close(made, [np.asarray(a) for a in want], 5e-3)  # A few codes move to a neighbour.


@often("MXFP8")
def test_tokens_of_each_device_in_shard_map(recipe):
    """Each device computes its own tokens, and gathers codes of the weights that FSDP shards."""
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    x, dy = normal(8, T, H, seed=6), normal(8, T, H, seed=7)

    def local(x, router, w13, w2, dy):
        options = {"weight_spec": P(None, "fsdp"), "gather_axis": "fsdp"}
        y, vjp = jax.vjp(functools.partial(layer, recipe=recipe, **options), x[0], router, w13, w2)
        dx, *rest = vjp(dy[0])
        return y[None], dx[None], *rest

    sharded = P(None, "fsdp")
    specs = (P("fsdp"), P(), sharded, sharded, P("fsdp"))
    results = (P("fsdp"), P("fsdp"), P(), sharded, sharded)
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=results))
    made = run(x, ROUTER, W13, W2, dy)
    alone = [step(x[i], ROUTER, W13, W2, dy[i], recipe) for i in range(8)]
    each = [[np.asarray(one[number]) for one in alone] for number in range(5)]
    # XLA computes the logits of the router with another dot, so a few codes move to a neighbour.
    assert_close(made, [*map(np.stack, each[:2]), *map(sum, each[2:])], 5e-3)
    compiled = run.lower(x, ROUTER, W13, W2, dy).compile()
    gathers = [array for kind, arrays in collectives(compiled) for array in arrays if kind == "all-gather"]
    if recipe is None:
        return
    assert {f"u8[{E},{2 * WIDE},{H}]", f"u8[{E},{H},{WIDE}]"} <= set(gathers)
    assert not any(array.startswith(("f32[4,256", "f32[4,64")) for array in gathers)


@often("CurrentScaling")
def test_remat_keeps_bits(recipe):
    call = functools.partial(layer, recipe=recipe)

    @functools.partial(jax.jit, static_argnums=0)
    def run(call, *given):
        y, vjp = jax.vjp(call, *given)
        return y, *vjp(jnp.asarray(DY))

    for made, want in zip(run(jax.checkpoint(call), X, ROUTER, W13, W2), run(call, X, ROUTER, W13, W2), strict=True):
        assert_bits_equal(np.asarray(made), np.asarray(want))


@pytest.mark.parametrize("name", ["CurrentScaling", pytest.param("E4M3", marks=pytest.mark.slow)])
def test_swiglu_passes_amaxes(name):
    """The bits of separate calls, where h and its gradient are read for their amaxes."""
    recipe = ALL[name]
    indices, weights = (np.asarray(each) for each in qj.topk_routing(X @ ROUTER.T, K))

    def in_parts(x, weights, w13, w2):
        permutation = qj.moe_permutation(indices, E)
        given = {"group_sizes": permutation.group_sizes, "recipe": recipe, "weight_layout": "NK"}
        gate_up = qj.ragged_dot(qj.moe_permute(x, permutation), w13, **given)
        h = qj.swiglu(gate_up[:, :WIDE], gate_up[:, WIDE:])
        return qj.moe_unpermute(qj.ragged_dot(h, w2, **given), permutation, weights)

    def whole(x, weights, w13, w2):
        return qj.grouped_mlp(x, indices, weights, w13, w2, recipe)

    def both_ways(call, *given):
        y, vjp = jax.vjp(call, *given)
        return y, *vjp(jnp.asarray(DY))

    columns, found = [], []
    for call in (whole, in_parts):
        run = jax.jit(functools.partial(both_ways, call))
        text = run.lower(X, weights, W13, W2).as_text()
        columns.append(sorted(map(int, re.findall(r"@qshard_amax_grouped.* : \(tensor<\d+x(\d+)xf32>", text))))
        found.append(run(X, weights, W13, W2))
    assert columns == [[1, 1, H, H], [H, H, WIDE, 2 * WIDE]]
    for got, want in zip(*found, strict=True):
        assert_bits_equal(np.asarray(got), np.asarray(want))


def test_vmap_and_scan():
    """Over the layers of a model, as users stack them."""
    w13, w2 = np.stack([W13, 2 * W13]), np.stack([W2, W2 / 2])
    routers = np.stack([ROUTER, -ROUTER])
    each = [layer(X, *of) for of in zip(routers, w13, w2, strict=True)]
    mapped = jax.jit(jax.vmap(functools.partial(layer, X)))(routers, w13, w2)
    assert_close(mapped, [np.asarray(y) for y in each], 1e-5)
    scanned = jax.jit(lambda *ws: jax.lax.scan(lambda x, w: (layer(x, *w), None), X, ws)[0])(routers, w13, w2)
    assert_close([scanned], [np.asarray(layer(layer(X, ROUTER, W13, W2), -ROUTER, 2 * W13, W2 / 2))], 1e-3)


@pytest.mark.parametrize(("dtype", "experts"), [("uint8", 256), ("int8", 200), ("int16", 1 << 15)])
def test_narrow_indices(dtype, experts):
    """The number of experts may not fit the dtype of the indices."""
    indices = np.array([[100], [0], [7], [0]], dtype)
    made = qj.moe_permutation(indices, experts)
    np.testing.assert_array_equal(made.tokens, [1, 3, 2, 0])
    np.testing.assert_array_equal(np.flatnonzero(made.group_sizes), [0, 7, 100])


def test_delayed_scaling():
    """Both products have states, whose amaxes are the cotangents."""
    recipe = RECIPES["DelayedScaling"]
    states = tuple(qj.init_delayed(recipe, (E,)) for _ in range(2))
    indices, weights = qj.topk_routing(X @ ROUTER.T, K)

    def loss(w13, w2, states):
        return (qj.grouped_mlp(X, indices, weights, w13, w2, recipe, states=states) * DY).sum()

    observed = jax.jit(jax.grad(loss, argnums=2))(*map(jnp.asarray, (W13, W2)), states)
    for state, seen, w in zip(states, observed, (W13, W2), strict=True):
        new = qj.update_delayed(state, seen, recipe)
        np.testing.assert_array_equal(seen.weight.observed.amax, np.abs(w).max((1, 2)))
        assert (np.asarray(new.activation.scale) > 0).all()


GOOD = {"x": X, "indices": np.zeros((T, K), np.int32), "weights": np.ones((T, K), np.float32), "w13": W13, "w2": W2}
WRONG = [
    (
        {"w13": W13[:, :WIDE]},
        ValueError,
        r"grouped_mlp: w13 \(4, 128, 64\) and w2 \(4, 64, 128\) do not fit x \(64, 64\)",
    ),
    ({"weight_layout": "KN"}, ValueError, r"pass them as \[E, H, 2 I\] and \[E, I, H\] for weight_layout 'KN'"),
    ({"weight_layout": 1}, ValueError, r"grouped_mlp: weight_layout \(1\) is not a layout; pass 'NK' for w13"),
    (
        {"indices": np.zeros((T, 3), np.int32)},
        ValueError,
        r"grouped_mlp: indices \(64, 3\) and weights \(64, 2\) do not",
    ),
    ({"indices": np.zeros((T, K), np.float32)}, TypeError, r"moe_permutation: indices \(.*\) are not integers"),
    ({"x": X.astype(np.int32)}, TypeError, r"grouped_mlp: x \(int32\)"),
    ({"w2": [1]}, TypeError, r"grouped_mlp: w2 \(\[1\]\) is not a JAX or NumPy array"),
    ({"recipe": "NVFP4"}, ValueError, "ragged_dot: NVFP4 uses stochastic rounding and needs `seed`"),
]


@pytest.mark.parametrize(("wrong", "kind", "text"), WRONG, ids=[text[:30] for *_, text in WRONG])
def test_what_is_refused(wrong, kind, text):
    given = {**GOOD, "recipe": "CurrentScaling", **wrong}
    options = {name: given.pop(name) for name in ("weight_layout",) if name in given}
    with pytest.raises(kind, match=text):
        qj.grouped_mlp(*given.values(), **options)


CALLS = [
    (lambda: qj.moe_permutation(jnp.zeros(3, jnp.int32), E), r"indices \(3,\) are not \[T, k\]; pass the k experts"),
    (lambda: qj.moe_permutation(GOOD["indices"], 0), r"num_experts \(0\) is not positive"),
    (
        lambda: qj.moe_permute(X[:9], qj.moe_permutation(GOOD["indices"], E)),
        r"moe_permute: x \(9, 64\) does not have 64",
    ),
    (lambda: qj.topk_routing(X, H + 1), r"topk_routing: top_k \(65\) is not a number of experts of logits \(64, 64\)"),
]


@pytest.mark.parametrize(("call", "text"), CALLS, ids=[text[:30] for _, text in CALLS])
def test_wrong_shapes_are_refused(call, text):
    with pytest.raises(ValueError, match=text):
        call()
