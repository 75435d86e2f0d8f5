"""The error catalogue, for mistakes that only JAX has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import qshard.jax as qj
from qshard import formats, numerics, recipes
from qshard._core.flat_shards import FlatSlice, plan_master
from qshard.formats import Usage
from qshard.jax._nn.linear import _jitted_linear
from qshard.jax._quantized.quantize import _program
from support.mistakes import mistakes, said

X = np.ones((64, 64), np.float32)


def on_mesh(call):
    """Call with a weight that is sharded over "fsdp", on that mesh."""
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices("cpu")[:2])
    with jax.set_mesh(mesh):
        return call(jax.device_put(X, NamedSharding(mesh, P("fsdp"))))


def shard_map(call):
    return jax.shard_map(call, in_specs=P("fsdp"), out_specs=P("fsdp"))


NAMES = {
    **{"X": X, "W": X, "STOCHASTIC": "NVFP4[rounding=stochastic]", "STATE": qj.init_delayed("DelayedScaling")},
    **{"np": np, "jax": jax, "jnp": jnp, "torch": torch, "qj": qj, "P": P, "formats": formats, "recipes": recipes},
    **{
        "numerics": numerics,
        "Usage": Usage,
        "FlatSlice": FlatSlice,
        "plan_master": plan_master,
        "on_mesh": on_mesh,
        "shard_map": shard_map,
    },
}
MISTAKES = mistakes("jax")


@pytest.mark.parametrize("wrong", MISTAKES)
def test_mistakes(wrong):
    call, (text,) = MISTAKES[wrong]
    assert said(call, NAMES) == text


def test_a_name_is_the_same_call():
    """A recipe or format given by name, or an equal format, causes no new trace."""

    def programs():
        own = _program(formats.FP8_E5M2, Usage.ROWWISE, (), None)
        return _program.cache_info().currsize, own._cache_size()

    again = formats.FP8_E5M2.with_options(pow2=True).with_options(pow2=False)
    for traced, call, ways in [
        (programs, lambda fmt: qj.quantize(X, fmt), ["FP8_E5M2", formats.FP8_E5M2, again]),
        (_jitted_linear._cache_size, lambda recipe: qj.linear(X, X, recipe), [recipes.MXFP6(), "MXFP6"]),
    ]:
        call(ways[0])
        before = traced()
        for way in ways[1:]:
            call(way)
            assert traced() == before
    assert qj.init_delayed("DelayedScaling").weight.amax_history.shape == (recipes.DelayedScaling().history,)
