"""Casts of an x that several weights share, and casts that policies of `jax.checkpoint` save.

test_jax_h100.py counts gathers of codes: XLA for CPUs does not schedule collectives.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from qshard.jax import init_delayed, linear, policies
from qshard.recipes import CurrentScaling, as_recipe
from support.awkward import assert_bits_equal

RECIPE = CurrentScaling()
CASTS = ("qshard_cast", "qshard_quantize", "qshard_amax")
ROWS, WIDTH = 1024, 128  # Rows: whole blocks on each of eight devices.


def values(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


X, WS = values(ROWS, WIDTH), [values(WIDTH, WIDTH, seed=seed) / 8 for seed in (1, 2, 3)]


def casts(compiled):
    """Count the calls that read a tensor to cast it."""
    calls = [line for line in compiled.as_text().splitlines() if 'custom_call_target="' in line]
    return sum(f'custom_call_target="{name}' in line for line in calls for name in CASTS)


def on_mesh(kind, *arrays):
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(kind,))
    return mesh, jax.device_put(arrays, NamedSharding(mesh, P("fsdp", None)))


def heads(x, ws, recipe=RECIPE, **options):
    """Return a loss of q, k and v, which share a computed x, and the three."""
    x = jnp.tanh(x)
    q, k, v = (linear(x, w, recipe, weight_spec=P("fsdp", None), gather_axis="fsdp", **options) for w in ws)
    return jnp.sum(q * k * v), (q, k, v)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_weights_that_share_x_cast_it_once(kind):
    """x is cast once for three weights; each of the 7 casts has an amax. Bits are those of each weight alone."""
    mesh, (x, *ws) = on_mesh(kind, X, *WS)
    with jax.set_mesh(mesh):
        grad = jax.jit(jax.grad(heads, argnums=(0, 1), has_aux=True))
        compiled = grad.lower(x, ws).compile()
        _, made = compiled(x, ws)
        alone = jax.jit(lambda x, w: linear(jnp.tanh(x), w, RECIPE, weight_spec=P("fsdp", None), gather_axis="fsdp"))
        for w, y in zip(ws, made, strict=True):
            assert_bits_equal(y, np.asarray(alone(x, w)))
    assert casts(compiled) == 2 * (3 + 1 + 3)


def test_what_one_branch_casts_another_cannot_use():
    """A cast in one branch of `cond`, or in another format, is not reused, although x is the same."""

    def chosen(x, ws, first):
        own = jax.lax.cond(first, lambda: linear(x, ws[0], RECIPE), lambda: linear(x, ws[1], RECIPE))
        return own, linear(x, ws[2], RECIPE), linear(x, ws[2], "MXFP8")

    for first in (True, False):
        own, same, other = jax.jit(chosen)(X, WS, first)
        assert_bits_equal(own, np.asarray(jax.jit(functools.partial(linear, recipe=RECIPE))(X, WS[0 if first else 1])))
        assert_bits_equal(same, np.asarray(jax.jit(functools.partial(linear, recipe=RECIPE))(X, WS[2])))
        assert_bits_equal(other, np.asarray(jax.jit(functools.partial(linear, recipe="MXFP8"))(X, WS[2])))


POLICIES = {"none": None, "codes": policies.codes_saveable, "products": policies.codes_and_products_saveable}


def layered(recipe, policy, x, ws, states):
    """Return the loss of two layers under `jax.checkpoint`; policy "off" is without."""

    def layer(h, w, state):
        given = {"state": state} if recipe.stateful else {"seed": 3}
        return jnp.tanh(linear(h, w, recipe, weight_spec=P("fsdp", None), gather_axis="fsdp", **given))

    if policy != "off":
        layer = jax.checkpoint(layer, policy=POLICIES[policy])
    for w, state in zip(ws, states, strict=True):
        x = layer(x, w, state)
    return jnp.sum(x * x)


@pytest.mark.usefixtures("optimized")  # Without it, XLA sums recomputed products in another order.
@pytest.mark.parametrize(
    "name",
    ["NVFP4", *(pytest.param(name, marks=pytest.mark.slow) for name in ("DelayedScaling", "CurrentScaling", "MXFP8"))],
)
def test_policies_keep_what_was_cast(name):
    """A policy keeps the bits, and casts as often as without `jax.checkpoint`, which alone casts x and w again."""
    recipe = as_recipe(name, "test")
    mesh, (x, *ws) = on_mesh(AxisType.Auto, X, *WS[:2])
    states = [init_delayed(recipe) if recipe.stateful else None] * 2
    made, counted = {}, {}
    with jax.set_mesh(mesh):
        for policy in ("off", *POLICIES):
            wrt = (0, 1, 2) if recipe.stateful else (0, 1)
            step = jax.value_and_grad(functools.partial(layered, recipe, policy), argnums=wrt)
            compiled = jax.jit(step).lower(x, ws, states).compile()
            made[policy], counted[policy] = compiled(x, ws, states), casts(compiled)
    for policy in POLICIES:
        for got, want in zip(*(jax.tree.leaves(made[p]) for p in (policy, "off")), strict=True):
            assert_bits_equal(got, np.asarray(want))
    assert counted["none"] > counted["off"]
    assert counted["codes"] == counted["products"] == counted["off"]


def test_policies_keep_no_more():
    """Policies save codes for backward and for forward, and products, but no other residual."""
    from jax._src.ad_checkpoint import saved_residuals

    def kept(policy):
        layer = jax.checkpoint(lambda x, w: jnp.tanh(linear(x, w, RECIPE)), policy=POLICIES[policy])
        found = [aval for aval, why in saved_residuals(layer, X, WS[0]) if "argument" not in why]
        return sorted((str(aval.dtype), aval.shape) for aval in found if aval.size > 1)

    x, w, y = ("uint8", (WIDTH, ROWS)), ("uint8", (WIDTH, WIDTH)), ("float32", (ROWS, WIDTH))
    assert kept("none") == []
    assert kept("codes") == sorted([x, ("uint8", (ROWS, WIDTH)), w])
    assert kept("products") == sorted([x, w, y])


@pytest.mark.usefixtures("optimized")  # As above.
@pytest.mark.parametrize("recipe", ["CurrentScaling", "MXFP8"])
def test_a_policy_that_saves_everything_keeps_codes(recipe):
    """JAX rounds the floats that a policy saves, and E4M3 above 240 would become NaN."""

    def loss_of(policy, x, w):
        layer = jax.checkpoint(lambda x, w: jnp.tanh(linear(x, w, recipe)), policy=policy)
        return jnp.sum(layer(x, w) ** 2)

    policies_of_jax = jax.checkpoint_policies
    made = [
        jax.jit(jax.value_and_grad(functools.partial(loss_of, policy), argnums=(0, 1)))(X, WS[0])
        for policy in (policies_of_jax.nothing_saveable, policies_of_jax.everything_saveable)
    ]
    for want, got in zip(*map(jax.tree.leaves, made), strict=True):
        assert_bits_equal(got, np.asarray(want))


def test_gradient_in_bfloat16():
    """With `grad_dtype`, an fp32 weight with bfloat16 values has the gradient of that weight in bfloat16, in fp32."""
    w = WS[0].astype(jnp.bfloat16)
    for recipe in (RECIPE, "MXFP8"):
        grad = jax.grad(lambda w, recipe=recipe, **options: jnp.sum(linear(X, w, recipe, **options) ** 2))
        made = grad(w.astype(jnp.float32), grad_dtype="bfloat16")
        assert made.dtype == jnp.float32
        assert_bits_equal(made.astype(jnp.bfloat16), np.asarray(grad(w)))
        exact = grad(w.astype(jnp.float32), grad_dtype=jnp.float32)
        assert_bits_equal(exact, np.asarray(grad(w.astype(jnp.float32))))
        # Read the program: on one device, newer XLA for CPUs skips a rounding that is widened at once.
        for dtype in ("bfloat16", "float32"):
            program = str(jax.make_jaxpr(functools.partial(grad, grad_dtype=dtype))(w.astype(jnp.float32)))
            products = re.findall(r"preferred_element_type=(\w+)", program)
            assert products.count(dtype) == (1 if dtype == "bfloat16" else 3), (recipe, products)


def test_errors():
    with pytest.raises(
        TypeError, match=r"linear: grad_dtype \(float16\) overflows where gradients are summed; pass bfloat16"
    ):
        linear(X, WS[0], RECIPE, grad_dtype=jnp.float16)
    with pytest.raises(TypeError, match=r"linear: grad_dtype \('int8'\) is not float32, bfloat16 or float16"):
        linear(X, WS[0], RECIPE, grad_dtype="int8")
