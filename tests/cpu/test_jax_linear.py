"""`qshard.jax.linear` in every mode, against a GEMM in float64 of the oracle's operands.

Operands are the oracle's to the bit (test_quantize.py), so what may differ is the sum of each product: fp32, in any
order, then one rounding to the dtype of the result, or two for bfloat16 (`qshard.jax.gemm`).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from qshard import formats, recipes, reference
from qshard.formats import Usage
from qshard.jax import WeightScales, compute_scales, linear, quantize
from qshard.recipes import CurrentScaling, Role
from support.awkward import BFLOAT16

RECIPE = CurrentScaling()


def values(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def oracle(x, w, dy, recipe=RECIPE):
    """y, dx, dw in float64 of quantized operands."""
    q = {
        role: reference.quantize(a, recipe.format(role)).dequantize(np.float32).astype(np.float64)
        for role, a in ((Role.ACTIVATION, x), (Role.WEIGHT, w), (Role.GRADIENT, dy))
    }
    xq, wq, dq = q[Role.ACTIVATION], q[Role.WEIGHT], q[Role.GRADIENT]
    dw = np.tensordot(dq, xq, (range(dq.ndim - 1), range(xq.ndim - 1)))
    return xq @ wq.T, dq @ wq, dw


def value_and_grads(x, w, dy, recipe=RECIPE, **options):
    """y, dx, dw: the gradients of sum(y * dy), so that dy is what reaches the linear."""

    def loss(x, w):
        y = linear(x, w, recipe, **options)
        return jnp.sum(y.astype(jnp.float32) * dy.astype(jnp.float32)), y

    (dx, dw), y = jax.grad(loss, argnums=(0, 1), has_aux=True)(x, w)
    return y, dx, dw


def assert_close(actual, expected, dtype, roundings=1):
    for got, want, kind in zip(actual, expected, dtype, strict=True):
        assert (got.shape, got.dtype) == (want.shape, kind)
        # Each term of a sum has an fp32 error of the largest partial sum; each rounding half a unit of the dtype.
        error = np.abs(np.asarray(got, np.float64) - want)
        limit = 1e-5 * np.abs(want).max(initial=0) + roundings * jnp.finfo(kind).eps / 2 * np.abs(want)
        assert (error <= limit).all(), (error / limit).max()


def test_given_scales():
    """They replace the weight's own, and stand for what this call would have computed."""
    x, w = values(8, 64), values(48, 64, seed=1)
    scales = compute_scales({"w": w, "other": 100 * w}, RECIPE)
    np.testing.assert_array_equal(linear(x, w, RECIPE, weight_scales=scales["w"]), linear(x, w, RECIPE))
    assert (linear(x, w, RECIPE, weight_scales=scales["other"]) != linear(x, w, RECIPE)).any()


def test_compute_scales():
    """Those of the oracle, for each leaf; layers stacked along a first axis have one each under vmap."""
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


def test_jit_remat_and_vmap():
    x, w, dy = values(3, 8, 64), values(3, 48, 64, seed=1), values(3, 8, 48, seed=2)
    expected = [oracle(*each) for each in zip(x, w, dy, strict=True)]
    expected = [np.stack(each) for each in zip(*expected, strict=True)]
    assert_close(jax.jit(jax.vmap(value_and_grads))(x, w, dy), expected, [np.float32] * 3)

    @jax.checkpoint
    def product(x, w):
        return linear(x, w, RECIPE)

    _, vjp = jax.vjp(product, x[0], w[0])
    assert_close(vjp(dy[0]), [each[0] for each in expected[1:]], [np.float32] * 2)


def test_layers_in_a_scan():
    """Stacked weights with scales from outside the loop give what the layers one after the other give."""
    x, ws = values(8, 64), values(3, 64, 64, seed=1)
    scales = jax.vmap(lambda w: compute_scales(w, RECIPE))(ws)

    def scanned(ws):
        layer = lambda h, layer: (jnp.tanh(linear(h, layer[0], RECIPE, weight_scales=layer[1])), None)  # noqa: E731
        return jnp.sum(jax.lax.scan(layer, x, (ws, scales))[0] ** 2)

    def unrolled(ws):
        return jnp.sum(functools.reduce(lambda h, w: jnp.tanh(linear(h, w, RECIPE)), ws, x) ** 2)

    for got, want in zip(jax.value_and_grad(scanned)(ws), jax.value_and_grad(unrolled)(ws), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_sharded_batch(kind):
    """Weights on every device, the batch cut: the scales are those of the whole batch."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    x, w, dy = values(8, 2, 64), values(48, 64, seed=1), values(8, 2, 48, seed=2)
    cut, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    with jax.set_mesh(mesh):
        args = jax.device_put((x, w, dy), (cut, whole, cut))
        y, dx, dw = jax.jit(value_and_grads)(*args)
    assert_close((y, dx, dw), oracle(x, w, dy), [np.float32] * 3)
    assert dx.sharding.is_equivalent_to(cut, 3)
    assert dw.sharding.is_fully_replicated


def test_shard_map_sums_gradients_of_replicated_weights():
    """JAX types say over which axes x varies and w does not: there the gradient of w is summed."""
    mesh = jax.make_mesh((4, 2), ("data", "other"), axis_types=(AxisType.Auto,) * 2)
    x, w, dy = values(8, 64), values(48, 64, seed=1), values(8, 48, seed=2)
    local = jax.shard_map(
        functools.partial(value_and_grads, axis_name="data"),
        mesh=mesh,
        in_specs=(P("data"), P(), P("data")),
        out_specs=(P("data"), P("data"), P()),
    )
    assert_close(jax.jit(local)(x, w, dy), oracle(x, w, dy), [np.float32] * 3)


def test_forward_alone_makes_no_columnwise_plane():
    text = jax.jit(lambda x, w: linear(x, w, RECIPE)).lower(values(8, 64), values(48, 64)).as_text()
    assert "qshard_cast_tensor" in text
    assert "transpose" not in text


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda x, w: linear(x, w[:, :3], RECIPE), ValueError, r"linear: w \(48, 3\) does not fit x \(8, 64\)"),
        (lambda x, w: linear(x, w[0], RECIPE), ValueError, r"linear: w \(64,\) does not fit"),
        (lambda x, w: linear(x.astype(int), w, RECIPE), TypeError, r"linear: x \(int.*\) is not float32"),
        (lambda x, w: linear(x, w.astype(int), RECIPE), TypeError, r"linear: w \(int.*\) is not float32"),
        (lambda x, w: linear(x, w, "current"), TypeError, r"linear: recipe \('current'\) is not"),
        (lambda x, w: linear(x, w, recipes.MXFP8()), ValueError, r"linear: w \(48, 64\) is not a whole number of"),
        (lambda x, w: linear(x, w, RECIPE, seed="0"), TypeError, r"seed \('0'\) is not an integer"),
        (lambda x, w: compute_scales([w, w.astype(int)], RECIPE), TypeError, r"compute_scales: weight \(int"),
        (lambda x, w: linear(x, w, RECIPE, gather_axis="fsdp"), ValueError, r"'fsdp'\) is not an axis of the mesh"),
    ],
)
def test_errors(call, error, match):
    with pytest.raises(error, match=match):
        call(values(8, 64), values(48, 64))


def test_quantize_has_no_derivative_but_linear_has():
    x, w = values(8, 64), values(48, 64)
    with pytest.raises(TypeError, match=r"has no derivative; differentiate qshard.jax.linear"):
        jax.grad(lambda w: jnp.sum(quantize(w, RECIPE.weight, usage=Usage.BOTH).dequantize()))(w)
    assert jax.grad(lambda w: jnp.sum(linear(x, w, RECIPE)))(w).shape == w.shape
