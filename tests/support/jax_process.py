"""One of several JAX processes, each with two host devices: `python -m support.jax_process ADDRESS COUNT INDEX CHECKS`.

CHECKS, separated by commas, are "law", "numerics", or names of recipes that ZeRO trains with.

Run by tests/dist/test_jax_processes.py. Any assertion that fails ends the process with an error.
"""

import os
import sys

from support.xla_flags import xla_flags

ADDRESS, COUNT, INDEX, CHECKS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = xla_flags(2)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from qshard import reference  # noqa: E402
from qshard.formats import FP8_E4M3, FP8_128x128, MXFP8_32x32, NVFP4_16x16, Usage  # noqa: E402
from qshard.jax import compute_scales, gather, linear, quantize  # noqa: E402
from qshard.numerics import compare, stats  # noqa: E402
from qshard.recipes import MXFP8, CurrentScaling  # noqa: E402
from support import jax_zero  # noqa: E402
from support.awkward import TAME, assert_bits_equal, awkward_values  # noqa: E402
from support.stats import assert_same_stats  # noqa: E402

RECIPE = CurrentScaling()


def spread(mesh, x, spec):
    """Return `x` as a global array; each process has the shards of its devices."""
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: x[index])


def assert_shards(array, whole):
    """Assert that each local shard has the bits of its slice of the whole."""
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
    """Assert that a step of FSDP over all processes matches one device."""
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


def check_exact_step(mesh, mode):
    """Assert the bits of one device, also with gloo's reductions; sums are exact, so their order does not matter."""
    rng = np.random.default_rng(3)  # Small integers, whose products with powers of two float32 adds without rounding.
    x, w, dy = (rng.integers(-4, 5, shape).astype(np.float32) for shape in ((32, 128), (128, 128), (32, 128)))

    def step(x, w, dy, **options):
        return jax.value_and_grad(lambda x, w: jnp.sum(dy * linear(x, w, MXFP8(), **options)), (0, 1))(x, w)

    def sharded(x, w, dy):
        return step(x, w, dy, weight_spec=P("fsdp"), gather_axis="fsdp")

    def manual(x, w, dy):
        loss, grads = step(x, w, dy, gather_axis="fsdp")
        return jax.lax.psum(loss, "fsdp"), grads

    if mode == "shard_map":
        sharded = jax.shard_map(manual, mesh=mesh, in_specs=P("fsdp"), out_specs=(P(), P("fsdp")))
    want_loss, want = jax.jit(step)(x, w, dy)
    loss, got = jax.jit(sharded)(*(spread(mesh, a, P("fsdp")) for a in (x, w, dy)))
    assert float(loss) == float(want_loss) != 0
    for whole, array in zip(want, got, strict=True):
        assert_shards(array, np.asarray(whole))


def check_numerics():
    """Assert that statistics of an array sharded over processes match the whole array."""
    mesh = jax.make_mesh((jax.device_count(),), ("fsdp",))
    whole = awkward_values((64, 96), seed=4, kinds=TAME)
    whole[-1, -1] = 3e4  # on one process
    for spec in (P("fsdp"), P(None, "fsdp"), P()):
        x = spread(mesh, whole, spec)
        for usage in Usage.BOTH.planes:
            for found in compare(x, None, usage, seed=2):
                assert_same_stats(found, stats(whole, found.format, usage, seed=2))
    small = spread(mesh, whole[:8, :32], P("fsdp"))  # Blocks of several processes.
    assert_same_stats(stats(small, FP8_128x128), stats(whole[:8, :32], FP8_128x128))


def check_zero(name, steps=2):
    """Assert that losses and masters have the bits of one device that runs all batches."""
    recipe, world = jax_zero.RECIPES[name], jax.device_count()
    losses, whole = jax_zero.on_one_device(recipe, world, steps, "float32")
    for shard_weights in (False, True):
        plan, step, *training = jax_zero.program(recipe, world, shard_weights)
        training = [*jax.device_get(training), jax_zero.states_of(recipe)]
        for number in range(steps):
            x = np.concatenate([jax_zero.batch_of(number, device) for device in range(world)])
            *training, values = step(*training, x, number)
            assert_shards(values, np.asarray(losses[number], np.float32))
        jax.tree.map(assert_shards, training[0], jax.device_get(plan.shard(whole)))


def check_all():
    for kind in (AxisType.Auto, AxisType.Explicit):
        fsdp = jax.make_mesh((jax.device_count(),), ("fsdp",), axis_types=(kind,))
        with jax.set_mesh(fsdp):
            check_law(fsdp)
            check_law(fsdp, MXFP8_32x32)  # whole blocks a device by columns; cut ones by rows
            check_law(fsdp, NVFP4_16x16, rows=32)
            check_step(fsdp)
            check_exact_step(fsdp, kind)
            if kind is AxisType.Auto:
                check_exact_step(fsdp, "shard_map")


jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(ADDRESS, COUNT, INDEX)
assert jax.device_count() == 2 * COUNT
for check in CHECKS.split(","):
    if check == "law":
        check_all()
    elif check == "numerics":
        check_numerics()
    else:
        check_zero(check)
jax.distributed.shutdown()
print("done")
