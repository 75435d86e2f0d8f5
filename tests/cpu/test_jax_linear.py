"""JAX-specific behaviour of `linear`: given scales, seeds, sharded rows, and errors while tracing.

Products are tested in test_linear.py, sharded ones in test_jax_fsdp.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from qshard import formats, recipes, reference
from qshard.formats import Usage
from qshard.jax import WeightScales, compute_scales, linear, quantize
from qshard.recipes import CurrentScaling, Recipe
from support.awkward import BFLOAT16

RECIPE = CurrentScaling()
SEED = 0x0123456789ABCDEF


def values(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def test_given_scales():
    """Given scales replace those that the call would compute."""
    x, w = values(8, 64), values(48, 64, seed=1)
    scales = compute_scales({"w": w, "other": 100 * w}, RECIPE)
    np.testing.assert_array_equal(linear(x, w, RECIPE, weight_scales=scales["w"]), linear(x, w, RECIPE))
    assert (linear(x, w, RECIPE, weight_scales=scales["other"]) != linear(x, w, RECIPE)).any()


def test_compute_scales():
    """Each leaf has the scale of the reference; under vmap, stacked layers have one each."""
    pow2 = CurrentScaling(weight=formats.FP8_E4M3.with_options(pow2=True))
    weights = {"a": values(4, 8), "b": [values(3, 5, dtype=BFLOAT16), np.zeros((2, 2), np.float32)]}
    scales = compute_scales(weights, pow2)
    assert jax.tree.structure(jax.tree.map(lambda w: WeightScales(0, 0), weights)) == jax.tree.structure(scales)
    for w, made in zip(jax.tree.leaves(weights), [scales["a"], *scales["b"]], strict=True):
        assert made.scale_inv == reference.quantize(w, pow2.weight).rowwise.scale_inv
    stacked = values(3, 4, 8)
    made = jax.vmap(lambda w: compute_scales(w, RECIPE))(stacked)
    np.testing.assert_array_equal(
        made.scale_inv, [reference.quantize(w, RECIPE.weight).rowwise.scale_inv for w in stacked]
    )
    assert compute_scales({}, RECIPE) == {}


def test_forward_alone_makes_no_columnwise_plane():
    text = jax.jit(lambda x, w: linear(x, w, RECIPE)).lower(values(8, 64), values(48, 64)).as_text()
    assert "qshard_cast_tensor" in text
    assert "transpose" not in text


def test_a_seed_is_an_integer_two_words_or_a_key():
    x, w, dy = exact(64, 128), exact(64, 128, seed=1), exact(64, 64, seed=2)
    words = jnp.asarray([SEED & 0xFFFFFFFF, SEED >> 32], jnp.uint32)
    number, pair, key = (
        jax.jit(lambda w, seed=seed: jax.vjp(lambda w: linear(x, w, recipes.NVFP4(), seed=seed), w)[1](dy)[0])(w)
        for seed in (SEED, words, jax.random.key(0))
    )
    np.testing.assert_array_equal(number, pair)
    assert (number != key).any()


def exact(*shape, seed=0):
    """Return numbers with amax 2688: the global scale of NVFP4 is 1, and bfloat16 represents all values."""
    x = 400 * values(*shape, seed=seed)
    x.flat[0] = 2688
    return x


def step(x, w, dy, recipe, **options):
    y, vjp = jax.vjp(lambda x, w: linear(x, w, recipe, seed=SEED, **options), x, w)
    return y, *vjp(dy)


def test_shards_with_rows_of_zeros_draw_what_the_whole_draws():
    """Eight shards of 5 rows, each padded to 16 for dw, draw the random numbers of 40 rows."""
    x, dy, one = exact(40, 32), exact(40, 32, seed=1), np.eye(32, dtype=np.float32)
    unit = formats.FP8_E4M3.with_options(pow2=True)  # Represents an identity matrix exactly.
    recipe = Recipe(weight=unit, activation=formats.NVFP4, gradient=formats.NVFP4.with_options(rounding="stochastic"))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def local(x, dy):
        return step(x, one, dy, recipe, axis_name="data")[:2]

    program = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
    whole = jax.jit(lambda x, dy: step(x, one, dy, recipe)[:2])(x, dy)
    for got, want in zip(program(x, dy), whole, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("out", [None, P(None, None, "model")], ids=str)
def test_rows_that_an_explicit_mesh_does_not_cut(out):
    """Types show that rows are unsharded: zero padding needs no collective, however K and N are sharded."""
    x, w, dy = exact(3, 7, 64), exact(32, 64, seed=1), exact(3, 7, 32, seed=2)
    want = jax.jit(lambda *args: step(*args, recipes.MXFP8()))(x, w, dy)
    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        cut = P("model" if out else None, None)
        args = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in ((x, P()), (w, cut), (dy, out or P()))]
        got = jax.jit(lambda *args: step(*args, recipes.MXFP8(), out_sharding=out))(*args)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(jnp.abs(b).max()))  # fp32 sums in another order.


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_rows_that_a_mesh_cuts_are_whole_blocks(kind):
    """Only gradients need whole blocks. Zero padding of sharded rows would come from other devices."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    text = r"x \(40, 64\) is not a whole number of 32x1 blocks of MXFP8_E4M3.nonfinite=nan.; pad the rows to 64"
    x, w = jax.device_put(values(40, 64), NamedSharding(mesh, P("data"))), values(32, 64)
    with jax.set_mesh(mesh):
        with pytest.raises(ValueError, match=text):
            jax.grad(lambda w: jnp.sum(linear(x, w, recipes.MXFP8())))(w)
        assert linear(x, w, recipes.MXFP8()).shape == (40, 32)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda x, w: linear(x, w[:, :3], RECIPE), ValueError, r"linear: w \(48, 3\) does not fit x \(8, 64\)"),
        (lambda x, w: linear(x, w[0], RECIPE), ValueError, r"linear: w \(64,\) does not have two axes"),
        (lambda x, w: linear(x.astype(int), w, RECIPE), TypeError, r"linear: x \(int.*\) is not float32"),
        (lambda x, w: linear(x, w.astype(int), RECIPE), TypeError, r"linear: w \(int.*\) is not float32"),
        (lambda x, w: linear(x, w, "current"), ValueError, r"linear: recipe \('current'\) is not a recipe name"),
        (lambda x, w: linear(x, w, recipes.MXFP8()), ValueError, r"linear: w \(48, 64\) is not a whole number of"),
        (
            lambda x, w: linear(x, w[:32], recipes.NVFP4()),
            ValueError,
            r"linear: NVFP4 uses stochastic rounding .*; pass a",
        ),
        (lambda x, w: linear(x, w, RECIPE, seed="0"), TypeError, r"linear: seed \('0'\) is not an integer"),
        (lambda x, w: linear(x, w, RECIPE, seed=0.5), TypeError, r"linear: seed \(0.5\) is not an integer"),
        (lambda x, w: compute_scales([w, w.astype(int)], RECIPE), TypeError, r"compute_scales: weights \(int"),
        (lambda x, w: linear(x, w, RECIPE, gather_axis="fsdp"), ValueError, r"'fsdp'\) is not an axis of the mesh"),
        (lambda x, w: linear(x, w, RECIPE, gather_axis=("a", 1)), TypeError, r"is not a mesh axis name"),
    ],
)
def test_errors(call, error, match):
    """Errors are raised while tracing."""
    with pytest.raises(error, match=match):
        jax.grad(lambda x: jnp.sum(call(x, values(48, 64))))(values(8, 64))


def test_quantize_has_no_derivative_but_linear_has():
    x, w = values(8, 64), values(48, 64)
    with pytest.raises(TypeError, match=r"has no derivative; use qshard\.jax\.linear, or stop the gradient"):
        jax.grad(lambda w: jnp.sum(quantize(w, RECIPE.weight, usage=Usage.BOTH).dequantize()))(w)
    assert jax.grad(lambda w: jnp.sum(linear(x, w, RECIPE)))(w).shape == w.shape
