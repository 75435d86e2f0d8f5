"""GEMMs of codes in JAX on every kind of mesh, run on the CPU in place of a GPU with tensor cores.

Results equal those of dequantized values up to the order of sums. Operations are counted in the compiled text.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from qshard.formats import FP8_1x128, FP8_128x128, Usage
from qshard.gemm_dispatch import Gpu
from qshard.jax import linear
from qshard.jax._gemm.product_sharding import PlaneAxes, ProductSharding
from qshard.jax._gemm.target_gpu import Target, trace_for
from qshard.jax._ops.bind import disabled_checks
from qshard.recipes import BlockScaling
from support.hlo import collectives
from support.pairs import turns

RECIPE = BlockScaling()
SIZES = {"B": 8, "S": 256, "K": 256, "N": 512}


@pytest.fixture(autouse=True, scope="module")
def tensor_cores_of_the_cpu():
    with trace_for(Target(Gpu((9, 0), 130000), "cpu")):
        yield


def values_alone(function):
    """Call `function` without tensor cores."""
    with trace_for(Target(None)):
        return function()


def step(x, w, dy, **options):
    """Return y, and the gradients of x and w."""
    y, pull = jax.vjp(lambda x, w: linear(x, w, RECIPE, **options), x, w)
    return (y, *pull(dy))


def operands(dtype=jnp.float32, layout="NK"):
    rng = np.random.default_rng(0)
    b, s, k, n = SIZES.values()
    w = rng.standard_normal((n, k) if layout == "NK" else (k, n), np.float32)
    x, dy = (rng.standard_normal((b, s, size), np.float32) for size in (k, n))
    return tuple(jnp.asarray(t, dtype) for t in (x, w, dy))


def assert_close(got, want):
    """Compare products of the same bfloat16 operands, summed in fp32 in different orders.

    A sum of a thousand terms differs by about 2^-18. Results in bfloat16 are rounded after that, once per partial sum.
    """
    for name, a, b in zip(("y", "dx", "dw"), got, want, strict=True):
        bound = 2.0**-16 if a.dtype == jnp.float32 else 2.0**-7
        assert relative(a, b) < bound, name


def relative(got, want):
    got, want = (np.asarray(t, np.float64) for t in (got, want))
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def calls(compiled):
    """Count the GEMMs of codes and the dequantized matrices of a compiled program."""
    text = compiled.as_text()
    return tuple(
        len(re.findall(f'custom_call_target="qshard_{name}"', text)) for name in ("gemm_block", "dequantize_block")
    )


@pytest.mark.each_value
@pytest.mark.parametrize("layout", ["NK", "KN"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_one_device(dtype, layout):
    device = jax.devices()[0]
    given = [jax.device_put(t, device) for t in operands(dtype, layout)]
    mesh = jax.make_mesh((1,), ("one",), axis_types=(AxisType.Auto,), devices=[device])
    run = functools.partial(step, weight_layout=layout)
    with jax.set_mesh(mesh):
        compiled = jax.jit(run).lower(*given).compile()
        got = compiled(*given)
        want = values_alone(lambda: jax.jit(lambda *a: run(*a))(*given))
    assert calls(compiled) == (3, 0)
    assert [t.dtype for t in got] == [dtype] * 3
    assert_close(got, want)


# Shardings of x, w and dy over a mesh of 4 x 2.
CUTS = {
    "batch": (P("a"), P(), P("a")),
    "batch, sequence": (P("a", "b"), P(), P("a", "b")),
    "column parallel": (P("a"), P("b"), P("a", None, "b")),
    "row parallel": (P("a", None, "b"), P(None, "b"), P("a")),
    "whole": (P(), P(), P()),
    "all rows": (P(("a", "b")), P(), P(("a", "b"))),
}


@turns(1, name=list(CUTS), kind=[AxisType.Auto, AxisType.Explicit])
def test_meshes(name, kind):
    """Every device multiplies its local operands, and products contracted over devices are summed."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind,) * 2)
    given = [jax.device_put(t, NamedSharding(mesh, spec)) for t, spec in zip(operands(), CUTS[name], strict=True)]
    options = {"weight_spec": CUTS[name][1]} if kind is AxisType.Auto else {}
    run = functools.partial(step, **options)
    with jax.set_mesh(mesh):
        if kind is AxisType.Explicit and name == "row parallel":
            run = functools.partial(step, out_sharding=P("a"))
        want = values_alone(lambda: jax.jit(lambda *a: run(*a))(*given))
        compiled = jax.jit(run).lower(*given).compile()
        got = compiled(*given)
    assert calls(compiled) == (3, 0)
    assert_close(got, want)


def test_shard_map():
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    given = operands()
    specs = (P("fsdp"), P("fsdp"), P("fsdp"))
    options = {"weight_spec": P("fsdp"), "gather_axis": "fsdp", "axis_name": "fsdp"}

    def run(*given):
        return jax.shard_map(functools.partial(step, **options), mesh=mesh, in_specs=specs, out_specs=specs)(*given)

    want = values_alone(lambda: jax.jit(lambda *a: run(*a))(*given))
    compiled = jax.jit(run).lower(*given).compile()
    assert_close(compiled(*given), want)
    assert calls(compiled) == (3, 0)


def test_fsdp_on_an_auto_mesh_scatters_gradients():
    """The gradient of w is reduce-scattered to the shards of w."""
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    given = [jax.device_put(t, NamedSharding(mesh, P("fsdp"))) for t in operands()]
    run = functools.partial(step, weight_spec=P("fsdp"), gather_axis="fsdp")
    with jax.set_mesh(mesh):
        want = values_alone(lambda: jax.jit(lambda *a: run(*a))(*given))
        compiled = jax.jit(run).lower(*given).compile()
        got = compiled(*given)
    assert_close(got, want)
    assert got[2].sharding.is_equivalent_to(NamedSharding(mesh, P("fsdp")), 2)
    moved = [kind for kind, _ in collectives(compiled)]
    assert "reduce-scatter" in moved
    assert "all-to-all" not in moved


def test_vmap_multiplies_values():
    x, w, _ = operands()
    xs, ws = jnp.stack([x[0], 2 * x[0]]), jnp.stack([w, w])
    mapped = jax.vmap(lambda x, w: linear(x, w, RECIPE))
    got, want = jax.jit(mapped)(xs, ws), values_alone(lambda: jax.jit(lambda *a: mapped(*a))(xs, ws))
    assert relative(got, want) < 2.0**-16


@pytest.mark.parametrize(
    ("mesh", "specs", "out", "want"),
    [
        ({"a": 4}, (P("a"), P()), P("a"), (P("a"), P(), P("a"), (), ())),
        ({"a": 4}, (P(None, "a"), P(None, "a")), P(), (P(None, "a"), P(None, "a"), P(), (), ("a",))),
        ({"a": 4}, (P(None, "a"), P()), P("a"), (P(None, "a"), P(None, "a"), P("a"), ((0, "a"),), ())),
        ({"a": 4}, (P("a"), P(None, "a")), P(), (P("a"), P(), P("a"), (), ())),
        ({"a": 4}, (P("a"), P("a")), P(), (P("a"), P(), P("a"), (), ())),
        ({"a": 4}, (P("a"), P("a")), P(None, "a"), (P(), P("a"), P(None, "a"), (), ())),  # x along its rows, w along N.
        ({"a": 4}, (P("a"), P()), P(None, "a"), (P("a"), P(), P("a"), (), ())),
        ({"a": 4, "b": 2}, (P("a"), P("b")), P(), (P("a"), P("b"), P("a", "b"), (), ())),
        ({"a": 4, "b": 2}, (P("a", "b"), P(None, "b")), P("a"), (P("a", "b"), P(None, "b"), P("a"), (), ("b",))),
        ({"a": 3}, (P("a"), P()), P(), (P(), P(), P(), (), ())),  # 256 rows do not divide by 3.
        ({"a": 8}, (P(None, "a"), P(None, "a")), P(), (P(), P(), P(), (), ())),  # Splits blocks.
        ({"a": 8}, (P(), P("a")), P(), (P(), P("a"), P(None, "a"), (), ())),
        ({"a": 16}, (P(), P("a")), P(), (P(), P(), P(), (), ())),  # Splits blocks.
    ],
    ids=str,
)
def test_product_sharding(mesh, specs, out, want):
    """Shards of rows, of K and within blocks, for [256, 512] in 1x128 and [1024, 512] in 128x128 blocks."""
    sides = [PlaneAxes(fmt, Usage.ROWWISE, (0,), (1,)) for fmt in (FP8_1x128, FP8_128x128)]
    got = ProductSharding.of(sides, mesh, ((256, 512), (1024, 512)), specs, out)
    assert [padded(spec) for spec in got[:3]] == [padded(spec) for spec in want[:3]]
    assert got[3:] == want[3:]


def padded(spec):
    entries = [(entry,) if isinstance(entry, str) else entry for entry in spec]
    return tuple([*entries, None, None][:2])


def test_remat_scan_and_export():
    """A loop with recomputation uses GEMMs of codes; an export for one device has the same bits."""
    x, w, _ = operands()
    ws = jnp.stack([w[:256], -w[:256]])

    def loss(ws, x):
        layer = jax.checkpoint(lambda h, w: (jax.nn.gelu(linear(h, w, RECIPE)), None))
        return jnp.mean(jax.lax.scan(layer, x, ws)[0] ** 2)

    mesh = jax.make_mesh((1,), ("one",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        given = [jax.device_put(t, jax.devices()[0]) for t in (ws, x)]
        got = jax.jit(jax.grad(loss))(*given)
        want = values_alone(lambda: jax.jit(jax.grad(lambda *a: loss(*a)))(*given))
        assert (
            relative(got, want) < 2.0**-6
        )  # The second layer casts results of the first: some codes round differently.
        exported = jax.export.export(jax.jit(jax.grad(loss)), disabled_checks=disabled_checks())(*given)
        again = jax.export.deserialize(exported.serialize()).call(*given)
    np.testing.assert_array_equal(again, got)


def test_what_is_saved_for_several_devices_multiplies_values():
    """A `custom_partitioning` rule is a Python callback of this process, which an export cannot hold."""
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    given = [jax.device_put(t, NamedSharding(mesh, spec)) for t, spec in zip(operands(), CUTS["batch"], strict=True)]
    with jax.set_mesh(mesh):
        exported = jax.export.export(jax.jit(step), disabled_checks=disabled_checks())(*given)
        again = jax.jit(jax.export.deserialize(exported.serialize()).call)(*given)
        got = jax.jit(step)(*given)
    assert "gemm_block" not in exported.mlir_module()
    assert_close(again, got)


def test_without_a_mesh_of_its_own():
    """Shardings known to `jit` alone, and not while tracing, still give GEMMs of codes."""
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    cuts = [NamedSharding(mesh, spec) for spec in CUTS["batch"]]
    given = [jax.device_put(t, cut) for t, cut in zip(operands(), cuts, strict=True)]
    compiled = jax.jit(step, in_shardings=cuts).lower(*given).compile()
    want = values_alone(lambda: jax.jit(lambda *a: step(*a))(*given))
    assert_close(compiled(*given), want)
    assert "qshard_gemm_block" in compiled.as_text()
