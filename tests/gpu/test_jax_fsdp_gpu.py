"""FSDP in JAX over the GPUs that there are. What it compiles to for eight is in tests/cpu/test_jax_h100.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from qshard import reference
from qshard.formats import FP8_E4M3, Usage
from qshard.jax import compute_scales, gather, linear, quantize
from qshard.recipes import CurrentScaling
from support.awkward import TAME, assert_bits_equal, awkward_values
from support.hlo import collectives

RECIPE = CurrentScaling()


def gpus():
    return jax.devices("cuda")


def values(*shape, seed, dtype):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def value_and_grads(x, w, dy, recipe, **options):
    y, vjp = jax.vjp(lambda x, w: linear(x, w, recipe, **options), x, w)
    return y, *vjp(dy)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_fsdp(kind):
    """The law, and a step as on one GPU, over all of them."""
    devices = gpus()
    if len(devices) < 2:
        pytest.skip("needs two GPUs")
    mesh = jax.make_mesh((len(devices),), ("fsdp",), axis_types=(kind,), devices=devices)
    rows = NamedSharding(mesh, P("fsdp"))
    w = awkward_values((64 * len(devices), 512), seed=1, kinds=TAME)
    whole = reference.quantize(w, FP8_E4M3, Usage.BOTH)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(w, rows)
        compiled = jax.jit(lambda w: gather(quantize(w, FP8_E4M3, usage=Usage.BOTH), "fsdp")).lower(sharded).compile()
        q = compiled(sharded)
    for plane, oracle in ((q.rowwise, whole.rowwise), (q.columnwise, whole.columnwise)):
        assert_bits_equal(plane.data, oracle.data)
        assert_bits_equal(plane.scale_inv, oracle.scale_inv)
    gathered = [array for kind, arrays in collectives(compiled) if kind == "all-gather" for array in arrays]
    assert len(gathered) == 2
    assert all(array.startswith("u8[") for array in gathered)

    n, k, m = 64 * len(devices), 512, 32 * len(devices)
    x, dy = values(m, k, seed=0, dtype="bfloat16"), values(m, n, seed=2, dtype="bfloat16")
    w = values(n, k, seed=1, dtype="float32")

    def step(x, w, dy):
        scales = compute_scales(w, RECIPE)
        return value_and_grads(x, w, dy, RECIPE, weight_spec=P("fsdp"), gather_axis="fsdp", weight_scales=scales)

    with jax.default_device(devices[0]):
        want = jax.jit(functools.partial(value_and_grads, recipe=RECIPE))(x, w, dy)
    with jax.set_mesh(mesh):
        got = jax.jit(step)(*jax.device_put((x, w, dy), (rows, rows, rows)))
    for result, one in zip(got, want, strict=True):
        one = np.asarray(one, np.float64)
        # y and dx are bfloat16, rounded before and after the scales: twice 2^-9; fp32 sums have another order.
        np.testing.assert_allclose(np.asarray(result, np.float64), one, rtol=2**-6, atol=2**-7 * np.abs(one).max())
