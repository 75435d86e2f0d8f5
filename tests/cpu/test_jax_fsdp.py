"""FSDP with every recipe: fp32 shards are quantized before the gather, codes are gathered, gradients are sharded.

A step over devices equals that of one device, which test_linear.py and test_delayed.py compare with the reference:
operands have the same bits, products differ by the order of fp32 sums. On a CPU, XLA turns a reduce-scatter into an
all-reduce and a slice, and may merge the gathers of forward and backward; test_jax_h100.py has the collectives of a
GPU.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from qshard import reference
from qshard.formats import FP8_E4M3, Usage
from qshard.jax import compute_scales, gather, init_delayed, linear, quantize, update_delayed
from qshard.recipes import CurrentScaling, Role
from support.awkward import TAME, assert_bits_equal, awkward_values
from support.formats import MIXES, RARE_MIXES, RECIPES, STATEFUL, STATELESS
from support.hlo import collectives
from support.weight_path import path_of

SEED = 0x0123456789ABCDEF
RECIPE = CurrentScaling()
# Recipes run with both values of a mode, and alternate in a second choice of two.
TURNS = {name: (recipe, i % 2) for i, (name, recipe) in enumerate((STATELESS | STATEFUL).items())}


def in_turn(**modes):
    """Parametrize by recipe and both values of a mode; some mixes of formats run one of them, and the other if slow."""
    ((name, values),) = modes.items()
    cases = [
        pytest.param(recipe, turn, value, id=f"{label}-{value}", marks=[pytest.mark.slow] if slow else [])
        for i, (label, (recipe, turn)) in enumerate(TURNS.items())
        for j, value in enumerate(values)
        for slow in [label in RARE_MIXES or (label in MIXES and i // 2 % 2 != j)]
    ]
    return pytest.mark.parametrize(("recipe", "turn", name), cases)


KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
N, K, ROWS = 64, 128, 1024  # Rows: whole blocks on each of eight devices.


def mesh_of(kind, **sizes):
    devices = jax.devices()[: np.prod(list(sizes.values()))]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes), devices=devices)


def values(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


X, W, DY = values(ROWS, K), awkward_values((N, K), seed=1, kinds=TAME), values(ROWS, N, seed=2)
WHOLE = reference.quantize(W, FP8_E4M3, Usage.BOTH)


def states_of(recipe, shape=()):
    """Return the argument `state` of `linear`, if the recipe has one, with a scale for each role."""
    if not recipe.stateful:
        return {}
    fresh, scales = init_delayed(recipe, shape), zip(Role, (3.0, 7.3, 0.77), strict=True)
    scaled = {
        role.value: dataclasses.replace(getattr(fresh, role.value), scale=jnp.full(shape, scale, jnp.float32))
        for role, scale in scales
    }
    return {"state": dataclasses.replace(fresh, **scaled)}


def step(x, w, dy, states, recipe=RECIPE, **options):
    """Return y, gradients of sum(y * dy), and those of states: dy is fixed, since rounding amplifies last bits."""
    y, vjp = jax.vjp(lambda x, w, states: linear(x, w, recipe, seed=SEED, **options, **states), x, w, states)
    return y, *vjp(dy)


@functools.cache
def expected(recipe=RECIPE):
    """Return the step of one device, with its states."""
    made = jax.jit(functools.partial(step, recipe=recipe))(X, W, DY, states_of(recipe))
    return jax.tree.map(np.asarray, made)


def assert_step(actual, recipe=RECIPE, w_sharding=None, x_sharding=None):
    for got, want in zip(actual[:3], expected(recipe)[:3], strict=True):  # fp32 sums in another order.
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())
    for got, want in zip(*(jax.tree.leaves(made[3:]) for made in (actual, expected(recipe))), strict=True):
        assert_bits_equal(got, want)
    if w_sharding is not None:
        assert actual[2].sharding.is_equivalent_to(w_sharding, 2)
        assert actual[1].sharding.is_equivalent_to(x_sharding, X.ndim)


def moved(compiled, kind):
    return sorted(array for each, arrays in collectives(compiled) if each == kind for array in arrays)


def assert_codes_travel(compiled, recipe):
    """Check that codes are gathered, and otherwise only scales and amaxes of partial blocks."""
    gathered = moved(compiled, "all-gather")
    bits = 8 // recipe.weight.element.codes_per_byte
    codes = [array for array in gathered if array in (f"u8[{N},{K * bits // 8}]", f"u8[{K},{N * bits // 8}]")]
    assert codes
    for array in set(gathered) - set(codes):
        size = np.prod([int(n) for n in array[array.index("[") + 1 : -1].split(",")])
        assert size <= N * K // 8, array
    if all(recipe.format(role).block is None for role in Role):
        assert set(gathered) == {f"u8[{N},{K}]"}
    if recipe.stateful:
        reduced = moved(compiled, "all-reduce")
        assert [array for array in reduced if array.startswith("s32")] == ["s32[]"] * 3


@pytest.mark.each_value
@in_turn(kind=[AxisType.Auto, AxisType.Explicit])
def test_step(recipe, turn, kind, request):
    """A step with 8 shards of 8 rows, which split all 2-D blocks; with scales of `compute_scales`, or its own."""
    if recipe.gradient.block == (128, 128) and kind is AxisType.Auto:
        reason = "XLA gathers the codes of a gradient in square blocks of more columns than it has; bits are right"
        request.applymarker(pytest.mark.xfail(raises=AssertionError, strict=True, reason=reason))
    mesh = mesh_of(kind, fsdp=8 if turn == (kind is AxisType.Auto) else 2)
    rows = NamedSharding(mesh, P("fsdp"))

    def program(x, w, dy, states):
        given = {"weight_scales": compute_scales([w], recipe)[0]} if turn and recipe.weight.block is None else {}
        given = {} if recipe.stateful else given
        return step(x, w, dy, states, recipe, weight_spec=P("fsdp", None), gather_axis="fsdp", **given)

    with jax.set_mesh(mesh):
        states = jax.device_put(states_of(recipe), NamedSharding(mesh, P()))
        args = (*jax.device_put((X, W, DY), (rows, rows, rows)), states)
        compiled = jax.jit(program).lower(*args).compile()
        assert_step(compiled(*args), recipe, rows, rows)
    assert_codes_travel(compiled, recipe)


@pytest.mark.each_value
@in_turn(check_vma=[True, False])
def test_step_in_shard_map(recipe, turn, check_vma):
    mesh, cut = mesh_of(AxisType.Auto, fsdp=8), P("fsdp")

    def local(x, w, dy, states):
        given = turn == check_vma and not recipe.stateful
        scales = compute_scales([w], recipe, axis_name="fsdp")[0] if given else None
        return step(x, w, dy, states, recipe, gather_axis="fsdp", weight_scales=scales, axis_name="fsdp")

    program = jax.shard_map(
        local, mesh=mesh, in_specs=(cut, cut, cut, P()), out_specs=(cut, cut, cut, P()), check_vma=check_vma
    )
    compiled = jax.jit(program).lower(X, W, DY, states_of(recipe)).compile()
    assert_step(compiled(X, W, DY, states_of(recipe)), recipe)
    assert f"f32[{N // 8},{K}]" in moved(compiled, "reduce-scatter")
    if not recipe.stateful:
        assert_codes_travel(compiled, recipe)


@pytest.mark.parametrize(
    "recipe", [*RECIPES.values(), *(pytest.param(mix, id=name, marks=pytest.mark.slow) for name, mix in MIXES.items())]
)
def test_scan_and_remat(recipe):
    """Scanned layers, with scales or states from outside the loop, equal unrolled layers."""
    x, ws, options = values(128, 64), values(2, 64, 64, seed=1) / 8, states_of(recipe, (2,))
    if recipe.weight.block is None and not recipe.stateful:
        options = {"weight_scales": jax.vmap(lambda w: compute_scales(w, recipe))(ws)}

    def layer(h, layer):
        w, options = layer
        return jnp.tanh(linear(h, w, recipe, seed=SEED, **options)), None

    def scanned(ws, options):
        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, (ws, options))[0] ** 2)

    def unrolled(ws, options):
        h = x
        for i in range(2):
            h, _ = layer(h, jax.tree.map(lambda leaf, i=i: leaf[i], (ws, options)))
        return jnp.sum(h**2)

    argnums = (0, 1) if recipe.stateful else (0,)
    made = []
    for f in (scanned, unrolled):
        loss, (dw, *seen) = jax.jit(jax.value_and_grad(f, argnums))(ws, options)
        states = [update_delayed(options["state"], each["state"], recipe) for each in seen]
        made.append(jax.tree.leaves((loss, dw, states)))
    for got, want in zip(*made, strict=True):
        # fp32 sums in another order, over two layers and a tanh; gradients are about 10.
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_vmap():
    """Stacked layers under `vmap` have a scale each."""
    x, w, dy = values(3, 8, 64), values(3, 48, 64, seed=1), values(3, 8, 48, seed=2)
    for i, made in enumerate(zip(*jax.jit(jax.vmap(lambda *a: step(*a, {})[:3]))(x, w, dy), strict=True)):
        for got, want in zip(made, step(x[i], w[i], dy[i], {})[:3], strict=True):  # fp32 sums in another order.
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


@pytest.mark.each_value
@KINDS
@pytest.mark.parametrize(
    ("sizes", "x", "w", "dy", "options"),
    [
        # Gathered codes saved for backward; no `gather_axis`, so XLA partitions the product.
        ({"fsdp": 8}, P("fsdp"), P("fsdp"), P("fsdp"), {"gather_axis": "fsdp", "reshard_after_forward": False}),
        ({"fsdp": 8}, P(), P("fsdp"), P(None, "fsdp"), {}),
        # Replicated weights.
        ({"data": 8}, P("data"), P(), P("data"), {}),
        # Tensor parallelism along the columns of w: a partial sum on each device.
        ({"tp": 4}, P(None, "tp"), P(None, "tp"), P(), {"out_sharding": P(None, None)}),
        # Hybrid: weights are sharded along one mesh axis and replicated along the other; the batch along both.
        ({"replica": 2, "fsdp": 4}, P(("replica", "fsdp")), P("fsdp"), P(("replica", "fsdp")), {"gather_axis": "fsdp"}),
    ],
    ids=["kept", "by XLA", "replicated", "contracted", "hybrid"],
)
def test_step_with_other_cuts(kind, sizes, x, w, dy, options):
    mesh = mesh_of(kind, **sizes)
    if kind is AxisType.Auto:
        options = {name: option for name, option in options.items() if name != "out_sharding"}
    cuts = [NamedSharding(mesh, spec) for spec in (x, w, dy)]
    with jax.set_mesh(mesh):
        args = jax.device_put((X, W, DY), tuple(cuts))
        program = jax.jit(functools.partial(step, states={}, weight_spec=P(*(*w, None, None)[:2]), **options))
        assert_step(program(*args), RECIPE, cuts[1], cuts[0])


@pytest.mark.parametrize(
    ("batch", "weight", "axes"), [(("replica", "fsdp"), P("fsdp"), {"gather_axis": "fsdp"}), ("fsdp", P(), {})]
)
def test_other_cuts_in_shard_map(batch, weight, axes):
    """Hybrid sharding, and replicated weights: where types show that w does not vary, its gradient is summed."""
    local = functools.partial(step, states={}, axis_name=batch, **axes)
    program = jax.shard_map(
        lambda *args: local(*args)[:3],
        mesh=mesh_of(AxisType.Auto, replica=2, fsdp=4),
        in_specs=(P(batch), weight, P(batch)),
        out_specs=(P(batch), P(batch), weight),
    )
    assert_step((*jax.jit(program)(X, W, DY), {}))


@KINDS
def test_backward_keeps_no_whole_weight(kind):
    """Only the codes of the local shard are saved for backward, as bits."""
    mesh = mesh_of(kind, fsdp=8)
    rows = NamedSharding(mesh, P("fsdp"))
    with jax.set_mesh(mesh):
        x, w = jax.device_put((X, W), (rows, rows))
        _, vjp = jax.vjp(lambda w: linear(x, w, RECIPE, weight_spec=P("fsdp"), gather_axis="fsdp"), w)
        kept = [leaf for leaf in jax.tree.leaves(vjp) if leaf.size == W.size]
    assert [leaf.dtype.name for leaf in kept] == ["uint8"]
    assert kept[0].sharding.is_equivalent_to(rows, 2)


def test_one_reduction_for_all_weights():
    """Weights of different shapes and shardings share one all-reduce."""
    mesh = mesh_of(AxisType.Auto, fsdp=8)
    weights = {"a": values(64, 128), "b": values(128, 1024), "c": values(8)}
    specs = {"a": P("fsdp"), "b": P(None, "fsdp"), "c": P()}
    sharded = {k: jax.device_put(w, NamedSharding(mesh, specs[k])) for k, w in weights.items()}
    compiled = jax.jit(lambda w: compute_scales(w, RECIPE)).lower(sharded).compile()
    assert len(collectives(compiled)) == 1
    for name, scales in compiled(sharded).items():
        assert scales.scale_inv == reference.quantize(weights[name], FP8_E4M3).rowwise.scale_inv


@pytest.mark.parametrize("name", ["MXFP8", "NVFP4"])
def test_codes_of_x_travel_where_its_k_is_cut(name):
    """On an Auto mesh, one plane of x is gathered for dw, which is whole along K: at most one byte an element."""
    recipe, mesh, spec = STATELESS[name], mesh_of(AxisType.Auto, fsdp=2, tp=2), P("fsdp", None, "tp")
    wide = 256  # Runs of 128 share an amax, and are not split.
    x, w, dy = values(4, 64, wide), values(N, wide, seed=1), values(4, 64, N, seed=2)
    options = {"weight_spec": P("fsdp"), "gather_axis": "fsdp"}
    want = jax.jit(functools.partial(step, recipe=recipe))(x, w, dy, {})
    with jax.set_mesh(mesh):
        x, w = jax.device_put(x, NamedSharding(mesh, spec)), jax.device_put(w, NamedSharding(mesh, P("fsdp")))
        dy = jax.device_put(dy, NamedSharding(mesh, P("fsdp")))
        program = jax.jit(functools.partial(step, recipe=recipe, **options)).lower(x, w, dy, {}).compile()
        got = program(x, w, dy, {})
    for made, expected in zip(got[:3], want[:3], strict=True):
        np.testing.assert_allclose(made, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())  # Sum order.
    sizes = [(array, np.prod(eval(array[array.index("[") :]))) for array in moved(program, "all-gather")]
    per_byte, rows = recipe.activation.element.codes_per_byte, x.size // 2
    assert all(array.startswith("u8") for array, _ in sizes), sizes
    # Two gathers of w, its scales, and the codes of the local rows of x, with their scales.
    assert sum(size for _, size in sizes) <= (2 * N * wide + rows) // per_byte + N * wide // 16 + rows // 16
    assert sum(size == rows // per_byte for _, size in sizes) == 1


def test_spec_may_name_the_mesh():
    """A NamedSharding supplies the mesh for an array without one."""
    cut = NamedSharding(mesh_of(AxisType.Auto, fsdp=8), P("fsdp"))
    w = jax.jit(lambda w: gather(quantize(w, FP8_E4M3), "fsdp", spec=cut))(W)
    assert_bits_equal(w.rowwise.data, WHOLE.rowwise.data)
    result = jax.jit(functools.partial(step, states={}, weight_spec=cut, gather_axis="fsdp"))(X, W, DY)
    assert_step(result)
    assert result[2].sharding.is_equivalent_to(cut, 2)


def test_errors():
    mesh = mesh_of(AxisType.Auto, fsdp=8, tp=1)
    q = quantize(jax.device_put(W, NamedSharding(mesh, P("fsdp"))), FP8_E4M3)
    with pytest.raises(ValueError, match=r"axis_name \('data'\) is not an axis of the mesh \('fsdp', 'tp'\)"):
        gather(q, "data")
    with pytest.raises(ValueError, match=r"spec \(P\('tp', None\)\) does not shard over axis_name \('fsdp'\); pass"):
        gather(q, "fsdp", spec=P("tp"))
    with pytest.raises(ValueError, match=r"gather: axis_name \('fsdp'\) is not an axis of the mesh \(\)"):
        gather(quantize(W, FP8_E4M3), "fsdp")
    with pytest.raises(ValueError, match=r"gather: QuantizedArray\(FP8_E4M3, float32, no plane\) has no plane"):
        gather(dataclasses.replace(q, rowwise=None), "fsdp")
    stack = quantize(values(2, 16, 32), FP8_E4M3, usage=Usage.COLUMNWISE)
    with pytest.raises(ValueError, match=r"gather: spec \(P\(None, 'fsdp', None\)\) does not shard the first or"):
        gather(stack, "fsdp", spec=NamedSharding(mesh, P(None, "fsdp")))
    with pytest.raises(ValueError, match=r"scale_inv \(varying over 'fsdp'\) is not one scale for the whole tensor"):
        jax.shard_map(
            lambda w: gather(quantize(w, FP8_E4M3), "fsdp").dequantize(),
            mesh=mesh,
            in_specs=P("fsdp"),
            out_specs=P("fsdp"),
        )(W)


def test_a_weight_enters_few_modules():
    """Before a module joins the path, see whether another should do its work."""
    mesh, spec = mesh_of(AxisType.Auto, fsdp=2), P("fsdp")
    x, w = jnp.ones((64, 320)), jnp.ones((192, 320))

    def gradients(x, w):
        return jax.grad(lambda x, w: linear(x, w, RECIPE, gather_axis="fsdp").sum(), (0, 1))(x, w)

    step = jax.shard_map(gradients, mesh=mesh, in_specs=(spec, spec), out_specs=(spec, spec))
    path = path_of({w.size, w.size // 2}, lambda: jax.eval_shape(step, x, w))
    assert len(path) <= 14, sorted(path)
