"""`qshard.jax.linear` of rows that are no whole blocks, which zeros make whole, where devices hold shards of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import qshard.jax
from qshard import formats, recipes
from qshard.formats import NVFP4
from qshard.recipes import Recipe
from support.awkward import assert_bits_equal

SEED = 0x0123456789ABCDEF
UNIT = formats.FP8_E4M3.with_options(pow2=True)  # Holds an identity matrix as it is.
STOCHASTIC = NVFP4.with_options(rounding="stochastic")


def exact(*shape, seed=0):
    """Numbers whose largest is 2688: the global scale of NVFP4 is 1, and bfloat16 holds all values of it."""
    x = 400 * np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    x.flat[0] = 2688
    return x


def jax_step(x, w, dy, recipe, **options):
    y, vjp = jax.vjp(lambda x, w: qshard.jax.linear(x, w, recipe, seed=SEED, **options), x, w)
    return y, *vjp(dy)


def test_shards_with_rows_of_zeros_draw_what_the_whole_draws():
    """Eight shards of 5 rows, each made 16 for its own dw, are 40 rows all the same."""
    x, dy, one = exact(40, 32), exact(40, 32, seed=1), np.eye(32, dtype=np.float32)
    recipe = Recipe(weight=UNIT, activation=NVFP4, gradient=STOCHASTIC)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def local(x, dy):
        return jax_step(x, one, dy, recipe, axis_name="data")[:2]

    program = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
    for got, want in zip(program(x, dy), jax_step(x, one, dy, recipe), strict=False):
        assert_bits_equal(np.asarray(got), np.asarray(want))


@pytest.mark.parametrize("out", [None, P(None, None, "model")], ids=str)
def test_rows_that_an_explicit_mesh_does_not_cut(out):
    """The type says so: zeros need nothing of other devices, whatever cuts K and N."""
    x, w, dy = exact(3, 7, 64), exact(32, 64, seed=1), exact(3, 7, 32, seed=2)
    want = jax_step(x, w, dy, recipes.MXFP8())
    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        cut = P("model" if out else None, None)
        args = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in ((x, P()), (w, cut), (dy, out or P()))]
        got = jax.jit(lambda *args: jax_step(*args, recipes.MXFP8(), out_sharding=out))(*args)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(jnp.abs(b).max()))
