"""`qshard.numerics` of JAX arrays over eight host devices: statistics are those of the whole array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from qshard.formats import NVFP4, Usage
from qshard.numerics import compare, report, stats
from support.awkward import TAME, awkward_values
from support.stats import assert_same_stats


@pytest.mark.parametrize(
    ("mesh", "shape", "spec"),
    [
        ((8,), (128, 96), P("a")),
        ((8,), (64, 256), P(None, "a")),
        ((8,), (32, 64), P("a")),
        ((4, 2), (96, 128), P("a", "b")),
        ((4, 2), (64, 64), P(("b", "a"))),
        ((4, 2), (64, 64), P("b")),
        ((4, 2), (2, 64, 64), P("b", "a")),
        ((8,), (32, 32), P()),
    ],
)
def test_of_sharded_arrays(mesh, shape, spec):
    """Shards along and within blocks, over several axes, and replicas."""
    whole = awkward_values(shape, 1, kinds=TAME)
    names = ("a", "b")[: len(mesh)]
    sharding = NamedSharding(jax.make_mesh(mesh, names), spec)
    x = jax.device_put(whole, sharding)
    for usage in Usage.BOTH.planes:
        for s in compare(x, None, usage, seed=7):
            assert_same_stats(s, stats(whole, s.format, usage, seed=7))
    stochastic = NVFP4.with_options(rounding="stochastic")
    assert_same_stats(stats(x, stochastic, seed=9), stats(whole, stochastic, seed=9))


def test_of_bfloat16_and_integers():
    sharding = NamedSharding(jax.make_mesh((8,), ("a",)), P("a"))
    for dtype in (jnp.bfloat16, jnp.int32):
        x = jax.device_put(jnp.arange(64 * 32).reshape(64, 32).astype(dtype), sharding)
        assert_same_stats(stats(x, "MXFP4"), stats(np.asarray(x), "MXFP4"))
        assert report(x, ["MXFP4"]).title == f"64 x 32, {jnp.dtype(dtype)}"


def test_a_traced_array_is_refused():
    with pytest.raises(TypeError, match=r"stats: x \(float32\[4,4\]\) is traced and has no values; call stats"):
        jax.jit(lambda x: stats(x, "FP8_E4M3").sqnr_db)(jnp.ones((4, 4)))
