"""`linear` on quantized weights, and `gathered_weight`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from qshard import recipes, reference
from qshard.jax import (
    CodedWeight,
    QuantizedArray,
    compute_scales,
    gather,
    gathered_weight,
    init_delayed,
    linear,
    quantize,
)
from qshard.recipes import CurrentScaling, DelayedScaling, Role
from support.awkward import assert_bits_equal
from support.hlo import collectives

RECIPES = [recipes.CurrentScaling(), recipes.BlockScaling(), recipes.MXFP8()]
every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
every_kind = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)


def values(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


X, W, DY = values(64, 128), values(256, 128, seed=1), values(64, 256, seed=2)


def codes_of(w, recipe, **options):
    return quantize(w, recipe.format(Role.WEIGHT), **options)


def product(x, w, recipe, **options):
    return jnp.sum(linear(x, w, recipe, **options) * DY)


@dataclasses.dataclass(frozen=True)
class Halves:
    """A weight in two halves of its rows, whose gradient is doubled."""

    def gather(self, codes):
        first, second = (half.rowwise for half in codes)
        plane = first._replace(data=jnp.concatenate([first.data, second.data]))
        return dataclasses.replace(codes[0], rowwise=plane)

    def scatter(self, gradient):
        return 2 * gradient


@every_recipe
def test_codes_are_the_weight(recipe):
    """Codes give the bits of the weight itself, for y and dx."""
    q = codes_of(W, recipe)
    for differentiate in (jax.value_and_grad, lambda f: jax.jit(jax.value_and_grad(f))):
        got, want = (differentiate(functools.partial(product, recipe=recipe))(X, w) for w in (q, W))
        assert_bits_equal(np.asarray(got[0]), np.asarray(want[0]))
        assert_bits_equal(np.asarray(got[1]), np.asarray(want[1]))


def test_codes_under_delayed_scaling():
    """x and dy are observed; a quantized weight has no amax."""
    recipe = DelayedScaling(history=2)
    state = init_delayed(recipe)
    q = codes_of(W, recipe)
    seen = jax.grad(lambda state: product(X, q, recipe, state=state))(state)
    assert_bits_equal(seen.activation.observed.amax, reference.amax(X))
    assert_bits_equal(seen.gradient.observed.amax, reference.amax(DY))
    assert float(seen.weight.observed.amax) == float(seen.weight.scale) == 0.0


@pytest.mark.parametrize("reshard", [True, False])
def test_the_gradient_goes_to_the_sink(reshard):
    """`gather` assembles the weight for y and dx; `scatter` maps its gradient to the cotangent of the sink."""
    recipe = CurrentScaling()
    scales = compute_scales(W, recipe)
    halves = [codes_of(half, recipe, scales=scales) for half in np.split(W, 2)]
    run = functools.partial(product, recipe=recipe, reshard_after_forward=reshard)
    dx, dw = jax.grad(run, (0, 1))(X, W)
    sink = np.zeros_like(W)
    got_dx, got_dw = jax.grad(lambda x, sink: run(x, CodedWeight(halves, sink, Halves())), (0, 1))(X, sink)
    assert_bits_equal(np.asarray(got_dx), np.asarray(dx))
    assert_bits_equal(np.asarray(got_dw), 2 * np.asarray(dw))
    whole = CodedWeight(codes_of(W, recipe), sink, Halves())
    got_dw = jax.grad(lambda sink: run(X, dataclasses.replace(whole, sink=sink)))(sink)
    assert_bits_equal(np.asarray(got_dw), 2 * np.asarray(dw))
    without = jax.grad(lambda x: run(x, CodedWeight(halves, None, Halves())))(X)
    assert_bits_equal(np.asarray(without), np.asarray(dx))


@every_recipe
def test_codes_of_shards_are_gathered(recipe):
    """In `shard_map`, codes of shards are gathered in forward and again in backward."""
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])

    def local(x, w, dy):
        q = codes_of(w, recipe, axis_name="fsdp")
        return jax.grad(lambda x: jnp.sum(linear(x, q, recipe, gather_axis="fsdp") * dy))(x)

    cut = P("fsdp")
    program = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(cut, cut, cut), out_specs=cut))
    lowered = program.lower(X, W, DY)
    assert lowered.as_text().count('"stablehlo.all_gather"') in (
        1,
        2,
    )  # Codes, and scales if they are gathered.
    whole = jax.jit(lambda x, w, dy: jax.grad(lambda x: jnp.sum(linear(x, codes_of(w, recipe), recipe) * dy))(x))
    parts = zip(np.split(X, 4), np.split(DY, 4), strict=True)
    want = np.concatenate([np.asarray(whole(x, W, dy)) for x, dy in parts])
    np.testing.assert_allclose(lowered.compile()(X, W, DY), want, rtol=1e-6, atol=1e-6)  # Another GEMM shape.


def gathered_locally(w, recipe):
    scales = compute_scales(w, recipe, axis_name="fsdp")
    whole = gathered_weight(w, recipe, gather_axis="fsdp", weight_scales=scales)
    return jax.tree.map(lambda part: part[None], whole)


@every_recipe
def test_the_gathered_weight_is_that_of_the_oracle(recipe):
    """Every device gathers the weight of the reference."""
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    local = functools.partial(gathered_locally, recipe=recipe)
    whole = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp")))(W)
    want = reference.quantize(W, recipe.format(Role.WEIGHT))
    for device in range(8):
        assert_bits_equal(np.asarray(whole.rowwise.data[device]), want.rowwise.data)
        assert_bits_equal(np.asarray(whole.rowwise.scale_inv[device]), want.rowwise.scale_inv)


@every_kind
@every_recipe
def test_the_gathered_weight_of_whole_arrays(recipe, kind):
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        w = jax.device_put(W, NamedSharding(mesh, P("fsdp")))
        whole = jax.jit(lambda w: gathered_weight(w, recipe, gather_axis="fsdp"))(w)
    assert isinstance(whole, QuantizedArray)
    assert whole.rowwise.data.sharding.is_fully_replicated
    want = reference.quantize(W, recipe.format(Role.WEIGHT))
    assert_bits_equal(np.asarray(whole.rowwise.data), want.rowwise.data)


def test_the_gathered_weight_is_what_linear_gathers():
    """A program with both has the gathers of `linear` alone."""
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    recipe = CurrentScaling()

    def local(x, w, both):
        y = linear(x, w, recipe, gather_axis="fsdp")
        return y, gathered_weight(w, recipe, gather_axis="fsdp").rowwise.data[None] if both else None

    counts = []
    for both in (False, True):
        run = jax.shard_map(functools.partial(local, both=both), mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp"))
        counts.append([c for c in collectives(jax.jit(run).lower(X, W).compile()) if c[0] == "all-gather"])
    assert counts[0] == counts[1] == [("all-gather", ("u8[256,128]",))]


def test_delayed_scaling_gathers_under_its_own_scale():
    recipe = DelayedScaling(history=2)
    state = init_delayed(recipe)
    state = dataclasses.replace(state, weight=dataclasses.replace(state.weight, scale=jnp.float32(3.0)))
    whole = gathered_weight(W, recipe, state=state)
    want = reference.quantize(W, recipe.format(Role.WEIGHT), scale=np.float32(3.0))
    assert_bits_equal(np.asarray(whole.rowwise.data), want.rowwise.data)


@pytest.mark.parametrize("number", [0, 7, 2**31 - 1])
def test_a_traced_seed_draws_what_the_number_draws(number):
    fmt = recipes.NVFP4().format(Role.GRADIENT).with_options(hadamard=False)
    want = quantize(X, fmt, seed=number)
    got = jax.jit(lambda seed: quantize(X, fmt, seed=seed))(jnp.int32(number))
    assert_bits_equal(np.asarray(got.rowwise.data), np.asarray(want.rowwise.data))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: linear(X, codes_of(W, recipes.MXFP8()), CurrentScaling()),
            ValueError,
            r"linear: w \(MXFP8_32x32.nonfinite=nan.\) is not in the weight format .* FP8_E4M3",
        ),
        (
            lambda: linear(X, codes_of(W[:, :64], CurrentScaling()), CurrentScaling()),
            ValueError,
            r"linear: w \(256, 64\) does not fit x \(64, 128\)",
        ),
        (
            lambda: gather(codes_of(W, CurrentScaling()), ("data", 1)),
            TypeError,
            r"gather: axis_name .* is not a mesh axis name",
        ),
    ],
)
def test_errors(call, error, text):
    with pytest.raises(error, match=text):
        call()
