"""Starts and seeds are numbers from 0 up, and both frameworks say so in the same words."""

import pytest

jnp = pytest.importorskip("jax.numpy")
torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402

from qshard import jax as jax_front  # noqa: E402
from qshard import torch_bridge  # noqa: E402
from qshard._core.flat_shards import FlatSlice, plan_master  # noqa: E402
from qshard.formats import FP8_E4M3, NVFP4  # noqa: E402

RANDOM = NVFP4.with_options(rounding="stochastic")


def cast_in_jax(start):
    jax_front.cast_master(None, [jnp.ones(2)], [start], plan=plan_master([FlatSlice((2, 2), FP8_E4M3)]))


def cast_in_torch(start):
    q = torch_bridge.quantize(torch.zeros(2, 2), FP8_E4M3)
    torch_bridge.cast_master([q], [torch.ones(2)], [start], parity="master")


@pytest.mark.parametrize("start", [-1, -(2**33), 2**64])
@pytest.mark.parametrize("cast", [cast_in_jax, cast_in_torch])
def test_starts(cast, start):
    with pytest.raises(ValueError, match=rf"cast_master: starts \({start}\) is not in \[0, 2\*\*64\); pass an integer"):
        cast(start)


def test_a_start_of_numpy():
    with pytest.raises(ValueError, match=r"cast_master: starts \(-3\) is not in"):
        cast_in_jax(np.int64(-3))


@pytest.mark.parametrize(
    "draw",
    [
        lambda seed: jax_front.quantize(jnp.ones((16, 16)), RANDOM, seed=seed),
        lambda seed: torch_bridge.quantize(torch.ones(16, 16), RANDOM, seed=seed),
    ],
    ids=["jax", "torch"],
)
def test_seeds(draw):
    with pytest.raises(ValueError, match=r"quantize: seed \(-1\) is not in \[0, 2\*\*64\); pass an integer"):
        draw(-1)


@pytest.mark.parametrize("number", [np.int64, np.array], ids=["scalar", "array"])
def test_seeds_of_numpy_keep_64_bits(number):
    """JAX has 32-bit integers by default, to which it would cut arrays of NumPy."""
    x = jnp.linspace(-1, 1, 256).reshape(16, 16)
    codes = [jax_front.quantize(x, RANDOM, seed=seed).rowwise.data for seed in (2**40, number(2**40), 0)]
    assert jnp.array_equal(codes[0], codes[1])
    assert not jnp.array_equal(codes[1], codes[2])
