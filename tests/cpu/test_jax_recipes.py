"""`qshard.jax.linear` with every recipe in loops and under FSDP: the results of one device.

test_linear.py holds those to the reference.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from qshard import recipes
from qshard.jax import compute_scales, linear
from support.formats import STATELESS, every_stateless_recipe
from support.hlo import collectives

SEED = 0x0123456789ABCDEF
# Of two things that have two values each, a recipe meets each value, and recipes take turns in which come together.
in_turn = pytest.mark.parametrize(
    ("recipe", "turn"), [(recipe, i % 2) for i, recipe in enumerate(STATELESS.values())], ids=STATELESS.keys()
)
N, K = 64, 128


def values(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def step(x, w, dy, recipe, **options):
    y, vjp = jax.vjp(lambda x, w: linear(x, w, recipe, seed=SEED, **options), x, w)
    return y, *vjp(dy)


def cases(seed=0):
    return values(2, 64, K, seed=seed), values(N, K, seed=seed + 1), values(2, 64, N, seed=seed + 2)


@every_stateless_recipe
def test_scan_and_remat(recipe):
    """Stacked layers give what the layers one after the other give."""
    x, ws = values(128, 64), values(2, 64, 64, seed=1) / 8

    def layer(h, w):
        return jnp.tanh(linear(h, w, recipe, seed=SEED))

    def scanned(ws):
        return jnp.sum(jax.lax.scan(jax.checkpoint(lambda h, w: (layer(h, w), None)), x, ws)[0] ** 2)

    def unrolled(ws):
        return jnp.sum(layer(layer(x, ws[0]), ws[1]) ** 2)

    for got, want in zip(*(jax.jit(jax.value_and_grad(f))(ws) for f in (scanned, unrolled)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@in_turn
def test_fsdp(recipe, turn, kind, request):
    """The step of one device. With 8 shards, 8 rows each, which cut all square blocks. Integers are gathered."""
    if recipe.gradient.block == (128, 128) and kind is AxisType.Auto:
        reason = "XLA gathers the codes of a gradient in square blocks of more columns than it has; bits are right"
        request.applymarker(pytest.mark.xfail(raises=AssertionError, strict=True, reason=reason))
    shards = 8 if turn == (kind is AxisType.Auto) else 2
    x, w, dy = (a.reshape(-1, a.shape[-1]) if a.ndim == 3 else a for a in cases())
    x, dy = np.tile(x, (8, 1)), np.tile(dy, (8, 1))  # whole blocks on each device
    mesh = jax.make_mesh((shards,), ("fsdp",), axis_types=(kind,), devices=jax.devices()[:shards])
    rows = NamedSharding(mesh, P("fsdp"))
    expected = jax.jit(functools.partial(step, recipe=recipe))(x, w, dy)
    program = functools.partial(step, recipe=recipe, weight_spec=P("fsdp", None), gather_axis="fsdp")
    with jax.set_mesh(mesh):
        args = jax.device_put((x, w, dy), (rows, rows, rows))
        compiled = jax.jit(program).lower(*args).compile()
        got = compiled(*args)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())
    assert got[2].sharding.is_equivalent_to(rows, 2)
    gathered = [array for kind, arrays in collectives(compiled) if kind == "all-gather" for array in arrays]
    bits = 8 // recipe.weight.element.codes_per_byte
    codes = [array for array in gathered if array in (f"u8[{N},{K * bits // 8}]", f"u8[{K},{N * bits // 8}]")]
    assert codes
    for array in set(gathered) - set(codes):  # scales, and amaxes of parts of blocks
        size = np.prod([int(n) for n in array[array.index("[") + 1 : -1].split(",")])
        assert size <= N * K // 8, array


@pytest.mark.parametrize("check_vma", [True, False])
@in_turn
def test_fsdp_in_shard_map(recipe, turn, check_vma):
    """With scales that `compute_scales` made, or its own."""
    given = turn == check_vma
    x, w, dy = (a.reshape(-1, a.shape[-1]) if a.ndim == 3 else a for a in cases())
    x, dy = np.tile(x, (8, 1)), np.tile(dy, (8, 1))
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))

    def local(x, w, dy):
        scales = compute_scales([w], recipe, axis_name="fsdp")[0] if given else None
        return step(x, w, dy, recipe, gather_axis="fsdp", weight_scales=scales, axis_name="fsdp")

    program = jax.shard_map(local, mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp"), check_vma=check_vma)
    expected = jax.jit(functools.partial(step, recipe=recipe))(x, w, dy)
    for a, b in zip(jax.jit(program)(x, w, dy), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())


def test_a_seed_is_an_integer_two_words_or_a_key():
    x, w, dy = cases()
    words = jnp.asarray([SEED & 0xFFFFFFFF, SEED >> 32], jnp.uint32)
    number, pair, key = (
        jax.vjp(lambda w, seed=seed: linear(x, w, recipes.NVFP4(), seed=seed), w)[1](dy)[0]
        for seed in (SEED, words, jax.random.key(0))
    )
    np.testing.assert_array_equal(number, pair)
    assert (number != key).any()


@pytest.mark.parametrize(
    ("recipe", "shape", "text"),
    [
        (recipes.NVFP4(), (64, 64), r"linear: NVFP4 rounds stochastically and needs a seed; pass a new one each call"),
        (
            recipes.MXFP8(),
            (64, 48),
            r"x \(64, 48\) is not a whole number of 1x32 blocks of MXFP8_E4M3.nonfinite=nan.; pad the columns",
        ),
    ],
)
def test_errors(recipe, shape, text):
    """When tracing."""
    x, w = values(*shape), values(32, shape[1])
    with pytest.raises(ValueError, match=text):
        jax.grad(lambda w: jnp.sum(linear(x, w, recipe)))(w)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_rows_that_a_mesh_cuts_are_whole_blocks(kind):
    """To gradients alone does it matter. Rows of zeros at their end would have to come from other devices."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    text = r"x \(40, 64\) is not a whole number of 32x1 blocks of MXFP8_E4M3.nonfinite=nan.; pad the rows to 64"
    x, w = jax.device_put(values(40, 64), NamedSharding(mesh, P("data"))), values(32, 64)
    with jax.set_mesh(mesh):
        with pytest.raises(ValueError, match=text):
            jax.grad(lambda w: jnp.sum(linear(x, w, recipes.MXFP8())))(w)
        assert linear(x, w, recipes.MXFP8()).shape == (40, 32)
