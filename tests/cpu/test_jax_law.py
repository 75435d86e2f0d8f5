"""gather(quantize(shards)) == quantize(whole) for every format and mode of JAX, also where shards split blocks.

Eight host devices (conftest.py). Collectives are read from the compiled HLO: codes and scales are sent as integers.
"""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from qshard import reference
from qshard.formats import NVFP4, MXFP8_32x32, NVFP4_16x16, Usage
from qshard.jax import compute_scales, gather, quantize
from qshard.recipes import Recipe
from support.awkward import TAME, awkward_values
from support.formats import NAMED, SQUARES, VARIANTS
from support.hlo import collectives
from support.jax_cuts import assert_planes
from support.pairs import each_value, turns

SEED = 0x0123456789ABCDEF
CUT = [*(fmt for fmt in NAMED if fmt.block), NVFP4.with_options(rounding="stochastic")]
# Only options that change what is reduced or which random numbers are drawn.
WHOLE = [
    *NAMED,
    *(
        fmt
        for fmt in VARIANTS
        if fmt.scaling.global_scale == "row" or fmt.scaling.four_over_six == "mse" or fmt.hadamard
    ),
]
pytestmark = pytest.mark.usefixtures("optimized")


def mesh_of(kind, shards=8):
    return jax.make_mesh((shards,), ("fsdp",), axis_types=(kind,), devices=jax.devices()[:shards])


def usage_of(fmt):
    return Usage.ROWWISE if fmt.scaling.global_scale == "row" else Usage.BOTH


def assert_integers_travel(compiled, limit=0):
    """Check that gathers send integers, except amaxes of partial blocks: up to `limit` elements."""
    for kind, arrays in collectives(compiled):
        for array in arrays if kind == "all-gather" else ():
            size = np.prod([int(n) for n in array[array.index("[") + 1 : -1].split(",")])
            assert array.startswith(("u8[", "u32[")) or (array.startswith(("f32[", "s32[")) and size <= limit), array


@each_value(fmt=WHOLE, spec={"rows": P("fsdp"), "columns": P(None, "fsdp")}, kind=[AxisType.Auto, AxisType.Explicit])
def test_whole_blocks(fmt, spec, kind):
    """With whole blocks, only tensor and row amaxes are reduced, and nothing is sent before the gather."""
    size = 8 * max(128 if spec != P("fsdp") else 16, *(fmt.block or (16, 16)))
    shape = (size, 128) if spec == P("fsdp") else (128, size)
    w = awkward_values(shape, seed=1, kinds=TAME)
    mesh, usage = mesh_of(kind), usage_of(fmt)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(w, NamedSharding(mesh, spec))
        cast = jax.jit(lambda w: quantize(w, fmt, usage=usage, seed=SEED)).lower(sharded).compile()
        q = cast(sharded)
        together = jax.jit(lambda q: gather(q, "fsdp", spec=spec)).lower(q).compile()
        whole = reference.quantize(w, fmt, usage, seed=SEED)
        assert_planes(q, whole)
        gathered = together(q)
        assert_planes(gathered, whole)
        for part in jax.tree.leaves(gathered):
            assert part.sharding.is_fully_replicated
        for plane in (q.rowwise, q.columnwise):
            if plane is not None:
                assert not plane.data.sharding.is_fully_replicated
    assert {kind for kind, _ in collectives(cast)} <= {"all-reduce"}, collectives(cast)
    for _, arrays in collectives(cast):
        assert set(arrays) == {f"s32[{shape[0]}]" if fmt.scaling.global_scale == "row" else "s32[]"}
    assert {kind for kind, _ in collectives(together)} == {"all-gather"}
    assert_integers_travel(together)


@turns(1, fmt=CUT, kind=[AxisType.Auto, AxisType.Explicit])
def test_cut_blocks(fmt, kind):
    """With 8 shards of less than a block, or of one and a part, only amaxes of partial blocks precede the gather."""
    mesh, usage = mesh_of(kind), usage_of(fmt)
    for shape, spec in (((8 * 24, 128), P("fsdp")), ((64, 8 * 24), P(None, "fsdp")), ((64, 256), P("fsdp"))):
        if any(size % unit for size, unit in zip(shape, (32, 32), strict=True)):
            continue
        if kind is AxisType.Auto and spec != P("fsdp"):
            usage = Usage.ROWWISE  # Auto meshes do not show the other sharding; XLA gathers first.
        w = awkward_values(shape, seed=1, kinds=TAME)
        with jax.set_mesh(mesh):
            sharded = jax.device_put(w, NamedSharding(mesh, spec))
            program = jax.jit(
                lambda w, spec=spec, usage=usage: gather(
                    quantize(w, fmt, usage=usage, spec=spec, seed=SEED), "fsdp", spec=spec
                )
            )
            compiled = program.lower(sharded).compile()
            assert_planes(compiled(sharded), reference.quantize(w, fmt, usage, seed=SEED))
        assert_integers_travel(compiled, w.size // 8)


@pytest.mark.each_value
@pytest.mark.parametrize("fmt", [fmt for fmt in SQUARES if fmt.block], ids=str)
@pytest.mark.parametrize("check_vma", [True, False])
def test_one_reduction_for_all_weights(fmt, check_vma):
    """One all-reduce for block and tensor amaxes of all weights, also where shards split blocks."""
    mesh, shards = mesh_of(AxisType.Auto), 8
    weights = {
        "a": awkward_values((shards * 24, 128), seed=1, kinds=TAME),
        "b": awkward_values((128, 64), seed=2, kinds=TAME),
    }
    weights["a"] = weights["a"] if not fmt.scaling.whole_blocks or 24 * shards % 32 == 0 else weights["a"][:128]
    recipe = Recipe(weight=fmt, activation=fmt, gradient=fmt)

    def local(weights):
        scales = compute_scales(weights, recipe, axis_name="fsdp")
        return {
            name: jax.tree.map(
                lambda leaf: leaf[None],
                gather(quantize(w, fmt, axis_name="fsdp", scales=scales[name]), "fsdp"),
            )
            for name, w in weights.items()
        }

    program = jax.shard_map(local, mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp"), check_vma=check_vma)
    compiled = jax.jit(program).lower(weights).compile()
    for name, q in compiled(weights).items():
        assert_planes(q, reference.quantize(weights[name], fmt), 5)
    assert len([kind for kind, _ in collectives(compiled) if kind == "all-reduce"]) == 1


@pytest.mark.parametrize(
    ("fmt", "rows", "text"),
    [
        (NVFP4_16x16.with_options(four_over_six="mae"), 24, r"quantize: x \(24, 64\) in 2 x 1 shards splits blocks of"),
        (NVFP4.with_options(hadamard=True), 24, "the rotation mixes all elements of a block; shard it on block"),
        (
            MXFP8_32x32,
            4,
            r"quantize: x \(4, 64\) is not a whole number of 32x32 blocks of MXFP8_32x32; pad the rows to 32",
        ),
        (
            NVFP4_16x16.with_options(rounding="stochastic"),
            24,
            r"quantize: NVFP4_16x16\[rounding=stochastic\] uses stochastic rounding and",
        ),
    ],
    ids=str,
)
def test_cuts_that_a_format_cannot_take(fmt, rows, text):
    """The error is raised while tracing, so on all devices.

    It concerns the whole tensor, unless blocks must be whole.
    """
    shards = 1 if rows < 8 else 2
    mesh = mesh_of(AxisType.Auto, shards)
    w = np.ones((rows * shards, 64), np.float32)
    with pytest.raises(ValueError, match=text):
        jax.shard_map(
            lambda w: quantize(w, fmt, usage=Usage.BOTH, axis_name="fsdp").dequantize(),
            mesh=mesh,
            in_specs=P("fsdp"),
            out_specs=P("fsdp"),
        )(w)
