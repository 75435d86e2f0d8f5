"""gather(quantize(shards)) == quantize(whole) for random shapes, shardings and meshes (support/jax_cuts.py).

Each example once failed: uneven grids of scales, blocks split by columns, one-axis tensors, one-device meshes, several
mesh axes.
"""

import functools

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from qshard import reference
from qshard.formats import FP8_E4M3, MXFP4, NVFP4, FP8_1x128, FP8_128x128, MXFP8_32x32, NVFP4_16x16, Usage
from qshard.jax import compute_scales, gather, gathered_weight, linear, quantize
from qshard.recipes import Recipe, as_recipe
from support.awkward import TAME, assert_bits_equal, awkward_values
from support.hlo import collectives
from support.jax_cuts import KINDS, Case, check_linear, check_tensor, tensors, weights

AUTO, LOCAL = (functools.partial(Case, kind=kind) for kind in ("Auto", "shard_map"))
BOTH, ROWS, COLUMNS = (("a",), ("b",)), (("a",), ()), ((), ("a",))
drawn = settings(deadline=None, suppress_health_check=list(HealthCheck))


def examples(test):
    cases = [
        *(Case(kind=kind, sizes=(2, 2), entries=BOTH, shape=(64, 32), fmt=MXFP8_32x32, gathers=BOTH) for kind in KINDS),
        *(
            Case(kind=kind, sizes=(2, 2), entries=BOTH, shape=(4, 128), fmt=FP8_1x128, gathers=(("b", "a"),))
            for kind in KINDS
        ),
        AUTO(sizes=(8,), entries=(("a",),), shape=(512,), fmt=FP8_128x128, gathers=(("a",),)),
        AUTO(sizes=(8,), entries=(("a",),), shape=(64,), fmt=FP8_E4M3, usage=Usage.COLUMNWISE, gathers=(("a",),)),
        Case(kind="Explicit", sizes=(1,), entries=COLUMNS, shape=(32, 64), fmt=NVFP4, gathers=(("a",),)),
        # Rows that are not adjacent; two mesh axes along one axis, gathered in turn.
        LOCAL(sizes=(4,), entries=((), ("a",), ()), shape=(2, 8, 64), fmt=MXFP4, gathers=(("a",),)),
        LOCAL(sizes=(2, 4), entries=(("a", "b"), ()), shape=(64, 64), fmt=MXFP8_32x32, gathers=(("b",), ("a",))),
    ]
    return functools.reduce(lambda test, case: example(case)(test), cases, test)


@examples
@settings(drawn, max_examples=20, derandomize=True)
@given(tensors())
def test_gather(case):
    check_tensor(case)


@example((LOCAL(sizes=(8,), entries=COLUMNS, shape=(32, 256), fmt=FP8_E4M3, gathers=(("a",),)), "CurrentScaling"))
@example((LOCAL(sizes=(2, 2), entries=BOTH, shape=(64, 32), fmt=MXFP8_32x32, gathers=(("b", "a"),)), "MXFP8"))
@example(
    (
        AUTO(sizes=(2, 2), entries=(("b", "a"), ()), shape=(64, 32), fmt=FP8_E4M3, gathers=(("a", "b"),)),
        "DelayedScaling",
    )
)
@settings(drawn, max_examples=2, derandomize=True)
@given(weights())
def test_linear(weight):
    check_linear(*weight)


@pytest.mark.parametrize("platform", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", ["Auto", "shard_map"])
def test_nvfp4_over_two_axes(kind, platform):
    """Codes, block scales and the scale of the whole, sharded along both axes, are those of one device."""
    if len(jax.devices(platform)) < 4:
        pytest.skip("needs four GPUs")
    given = {"sizes": (2, 2), "entries": BOTH, "shape": (128, 256), "gathers": (("a",), ("b",)), "platform": platform}
    check_tensor(Case(kind=kind, fmt=NVFP4_16x16, usage=Usage.BOTH, **given))


@pytest.mark.slow
@pytest.mark.timeout(900)  # It takes 110 s on two idle cores, and beside other work more than 300.
@settings(drawn, max_examples=2000)
@given(tensors())
def test_gather_at_length(case):
    check_tensor(case)


@pytest.mark.slow
@settings(drawn, max_examples=300)
@given(weights())
def test_linear_at_length(weight):
    check_linear(*weight)


def mesh_of(kind=AxisType.Auto):
    return jax.make_mesh((2, 4), ("a", "b"), axis_types=(kind,) * 2)


def test_zeros_stay_zeros():
    """Zeros have E8M0 scales of byte 0, which is 2^-127 if XLA sums them."""
    mesh, spec = mesh_of(), P("a", "b")
    with jax.set_mesh(mesh):
        w = jax.device_put(np.zeros((64, 32), np.float32), NamedSharding(mesh, spec))
        q = jax.jit(lambda w: gather(quantize(w, MXFP8_32x32, spec=spec), "a", spec=spec))(w)
        y = jax.jit(lambda x, w: linear(x, w, "MXFP8", weight_spec=spec, gather_axis="a"))(np.ones((32, 32)), w)
    assert not np.asarray(q.rowwise.scale_inv).view(np.uint8).any()
    assert_bits_equal(y, np.zeros((32, 64), np.float32))


@pytest.mark.each_value
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize("fmt", [FP8_E4M3, FP8_128x128, MXFP8_32x32, NVFP4_16x16, FP8_1x128], ids=str)
@pytest.mark.parametrize("spec", [P(None, ("b", "a")), P("a", "b")], ids=str)
def test_no_value_travels(fmt, spec, kind):
    """Shards of 64 columns, half of XLA's shortest run: only codes, scales and amaxes of partial blocks are sent."""
    mesh, shape = mesh_of(kind), (128, 64 * (8 if spec[0] is None else 4))
    axes = tuple(name for entry in spec if entry for name in ([entry] if isinstance(entry, str) else entry))
    with jax.set_mesh(mesh):
        w = jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, spec))
        compiled = jax.jit(lambda w: gather(quantize(w, fmt, spec=spec), axes, spec=spec)).lower(w).compile()
    moved = collectives(compiled)
    assert {kind for kind, _ in moved} <= {"all-gather", "all-reduce"}
    for array in (array for _, arrays in moved for array in arrays):
        size = np.prod([int(n) for n in array[array.index("[") + 1 : -1].split(",") if n])
        assert array.startswith(("u8[", "s8[", "u32[", "s32[", "f32[")), array
        assert array.startswith(("u8[", "s8[")) or size <= shape[0] * shape[1] // 32, array


@pytest.mark.parametrize("recipe", ["CurrentScaling", "BlockScaling", "NVFP4"])
def test_tensor_parallel_weights_in_shard_map(recipe):
    """The spec names both mesh axes: gathering along one gives a part of the whole weight, with its scales."""
    spec, w = P("b", "a"), awkward_values((256, 128), seed=3, kinds=TAME)

    def local(w):
        q = gathered_weight(w, recipe, weight_spec=spec, gather_axis="a", seed=0)
        return q.rowwise.data

    data = jax.shard_map(local, mesh=mesh_of(), in_specs=spec, out_specs=P("b"), check_vma=False)(w)
    assert_bits_equal(data, reference.quantize(w, as_recipe(recipe, "test").weight).rowwise.data)


def test_scales_of_cut_blocks_are_those_of_quantize():
    """Rows split blocks, columns do not: each device has the scales of all blocks that it shares."""
    mesh, spec, axes = mesh_of(), P("b", "a"), ("b", "a")
    w = awkward_values((96, 128), seed=3, kinds=TAME)
    recipe = Recipe(weight=MXFP8_32x32, activation=MXFP8_32x32, gradient=MXFP8_32x32)

    def local(w):
        given = compute_scales(w, recipe, axis_name=axes, spec=spec)
        own, q = (quantize(w, MXFP8_32x32, axis_name=axes, spec=spec, scales=scales) for scales in (None, given))
        assert own.rowwise.scale_inv.shape == q.rowwise.scale_inv.shape == (3, 2)
        return own.rowwise.scale_inv, q.rowwise.scale_inv

    own, given = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=P(None, "a"))(w)
    assert_bits_equal(own, given)
