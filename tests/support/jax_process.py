"""One of several JAX processes, each with two host devices: `python -m support.jax_process ADDRESS COUNT INDEX`.

Run by tests/dist/test_jax_processes.py. Any assertion that fails ends the process with an error.
"""

import os
import sys

ADDRESS, COUNT, INDEX = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from qshard import reference  # noqa: E402
from qshard.formats import FP8_E4M3, MXFP8_32x32, NVFP4_16x16, Usage  # noqa: E402
from qshard.jax import compute_scales, gather, linear, quantize  # noqa: E402
from qshard.recipes import CurrentScaling  # noqa: E402
from support.awkward import TAME, assert_bits_equal, awkward_values  # noqa: E402

RECIPE = CurrentScaling()


def spread(mesh, x, spec):
    """The whole array, of which each process holds its devices' shards."""
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: x[index])


def assert_shards(array, whole):
    """Every shard that this process holds has the bits of its place in the whole."""
    assert array.shape == whole.shape
    for shard in array.addressable_shards:
        assert_bits_equal(shard.data, np.asarray(whole)[shard.index])


def check_law(mesh, fmt=FP8_E4M3, rows=64):
    w = awkward_values((rows, 512), seed=1, kinds=TAME)
    whole = reference.quantize(w, fmt, Usage.BOTH)
    for spec in (P("fsdp"), P(None, "fsdp")):
        q = jax.jit(lambda w, spec=spec: quantize(w, fmt, usage=Usage.BOTH, spec=spec))(spread(mesh, w, spec))
        together = jax.jit(lambda q, spec=spec: gather(q, "fsdp", spec=spec))(q)
        for planes in (q, together):
            for name in ("rowwise", "columnwise"):
                assert_shards(getattr(planes, name).data, getattr(whole, name).data)
                assert_shards(getattr(planes, name).scale_inv, getattr(whole, name).scale_inv)
        assert together.rowwise.data.is_fully_replicated
        assert not q.rowwise.data.is_fully_replicated


def check_step(mesh):
    """A step of FSDP over all processes is the step of one device."""
    x, w = (
        np.random.default_rng(i).standard_normal(shape).astype(np.float32)
        for i, shape in enumerate([(16, 128), (64, 128)])
    )

    def step(x, w, **options):
        def loss(w):
            return jnp.sum(jnp.sin(linear(x, w, RECIPE, **options)))

        return jax.value_and_grad(loss)(w)

    def sharded(x, w):
        scales = compute_scales(w, RECIPE)
        return step(x, w, weight_spec=P("fsdp"), gather_axis="fsdp", weight_scales=scales)

    want_loss, want_dw = map(np.asarray, jax.jit(step)(x, w))
    loss, dw = jax.jit(sharded)(spread(mesh, x, P("fsdp")), spread(mesh, w, P("fsdp")))
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)  # Here and below: fp32 sums over devices, in another order.
    assert len(dw.addressable_shards) == 2
    for shard in dw.addressable_shards:
        assert shard.data.shape == (w.shape[0] // (2 * COUNT), w.shape[1])
        np.testing.assert_allclose(shard.data, want_dw[shard.index], rtol=1e-5, atol=1e-5 * np.abs(want_dw).max())


jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(ADDRESS, COUNT, INDEX)
assert jax.device_count() == 2 * COUNT
for kind in (AxisType.Auto, AxisType.Explicit):
    fsdp = jax.make_mesh((jax.device_count(),), ("fsdp",), axis_types=(kind,))
    with jax.set_mesh(fsdp):
        check_law(fsdp)
        check_law(fsdp, MXFP8_32x32)  # whole blocks a device by columns; cut ones by rows
        check_law(fsdp, NVFP4_16x16, rows=32)
        check_step(fsdp)
jax.distributed.shutdown()
print("done")
