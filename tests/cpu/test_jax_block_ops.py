"""Ops on blocks as JAX functions: the bits of the kernels, cut along rows and columns at blocks, and nothing moves."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from qshard.jax import ops
from support.awkward import BFLOAT16, TAME, assert_bits_equal, awkward_values
from support.hlo import collectives
from support.op_calls import call

X = awkward_values((256, 512), seed=1, kinds=TAME)
SQUARE, ROW = {"block_rows": 32, "block_cols": 32}, {"block_rows": 1, "block_cols": 16}
E4M3, E2M1, E8M0 = "float8_e4m3fn", "float4_e2m1fn", "float8_e8m0fnu"
AMAX = call("amax_block", X, **SQUARE)
SCALE, SCALE_INV = call("scale_e8m0", AMAX, element=E4M3, rounding="up")
CODES = call("cast_block", X, SCALE, element=E4M3, **SQUARE)
PACKED = call("cast_block", X, SCALE, element=E2M1, **SQUARE)
GLOBAL = np.full(AMAX.shape, np.max(np.abs(X)), np.float32)
# Op, operands, options, dtype of values.
CALLS = {
    "amax_block": ("amax_block", (X,), SQUARE, None),
    "amax_block of rows": ("amax_block", (X,), ROW, None),
    "cast_block": ("cast_block", (X, SCALE), {"element": E4M3, **SQUARE}, None),
    "cast_block, packed": ("cast_block", (X, SCALE), {"element": E2M1, **SQUARE}, None),
    "dequantize_block": (
        "dequantize_block",
        (CODES, SCALE_INV),
        {"element": E4M3, "scale_dtype": E8M0, **SQUARE},
        BFLOAT16,
    ),
    "hadamard": ("hadamard", (X,), {"block_rows": 16, "block_cols": 1}, None),
    "scale_e8m0": ("scale_e8m0", (AMAX,), {"element": E4M3, "rounding": "up"}, None),
    "scale_from_amax": ("scale_from_amax", (AMAX,), {"element": E4M3, "eps": 0.0, "pow2": True}, None),
    "scale_nvfp4": ("scale_nvfp4", (AMAX, GLOBAL), {"scale_max": 448.0}, None),
    "transpose_packed": ("transpose_packed", (PACKED,), {}, None),
}
SPECS = [P(), P("a"), P(None, "b"), P("a", "b"), P("b", "a"), P(("a", "b"))]


def run(name, *operands):
    op, _, options, dtype = CALLS[name]
    made = getattr(ops, op)(*operands, **options, **({} if dtype is None else {"dtype": dtype.name}))
    return made if isinstance(made, tuple) else (made,)


def expected(name):
    op, operands, options, dtype = CALLS[name]
    made = call(op, *operands, dtype=dtype, **options)
    return made if isinstance(made, list) else [made]


def assert_expected(results, name, index=()):
    for got, want in zip(results, expected(name), strict=True):
        assert_bits_equal(np.asarray(got)[index], want, name)


def mesh_of(kind):
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind,) * 2)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", CALLS)
def test_cut_at_blocks(name, kind):
    mesh = mesh_of(kind)
    for spec in SPECS:
        operands = [jax.device_put(a, NamedSharding(mesh, spec)) for a in CALLS[name][1]]
        compiled = jax.jit(lambda *operands: run(name, *operands)).lower(*operands).compile()
        results = compiled(*operands)
        assert_expected(results, name)
        assert collectives(compiled) == [], spec
        rows, cols = (*spec, None, None)[:2]
        cut = NamedSharding(mesh, P(cols, rows) if name == "transpose_packed" else spec)
        for result in results:
            assert result.sharding.is_equivalent_to(cut, 2)
            if kind is AxisType.Explicit:
                assert jax.typeof(result).sharding.spec == P(*(*cut.spec, None, None)[:2])


@pytest.mark.parametrize("name", CALLS)
def test_vmap_and_shard_map(name):
    """In shard_map, and where there is one device, an op sees memory as it is."""
    operands = CALLS[name][1]
    stacked = [np.stack([a, a]) for a in operands]
    assert_expected(jax.vmap(lambda *operands: run(name, *operands))(*stacked), name, 1)
    out = P("b", "a") if name == "transpose_packed" else P("a", "b")
    local = jax.shard_map(
        lambda *operands: run(name, *operands), mesh=mesh_of(AxisType.Auto), in_specs=P("a", "b"), out_specs=out
    )
    assert_expected(jax.jit(local)(*operands), name)


def test_explicit_mesh_that_cuts_blocks():
    """An error that says where to cut: XLA could only gather."""
    x = jax.device_put(X[:96, :64], NamedSharding(mesh_of(AxisType.Explicit), P("a")))
    with pytest.raises(ValueError, match=r"x \(96, 64\) has an axis of 96 cut into 4 shards, .* whole blocks of 32"):
        ops.amax_block(x, **SQUARE)


def test_layouts_keep_the_memory():
    """Logical order is blocks first; the layouts say that memory is the row-major matrix."""
    text = jax.jit(lambda x: ops.amax_block(x, **SQUARE)).lower(X).as_text()
    assert "operand_layouts = [dense<[3, 1, 2, 0]> : tensor<4xindex>]" in text
    assert 'num_batch_dims = "2"' in text
    assert "split = true" in text
