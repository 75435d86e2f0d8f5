"""`qshard.jax.quantize` and `dequantize` against the oracle, bit for bit, and what they refuse."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import qshard.jax as qj
from qshard import formats, reference
from qshard.formats import FP8_E4M3, FP8_E5M2, NVFP4, NVFP4_16x16, Usage
from qshard.jax import ops
from qshard.jax.steps import words_plus, words_times
from support.awkward import BFLOAT16, DTYPES, KINDS, SHAPES, TAME, assert_bits_equal, awkward_values, fits, shapes_of

VARIANTS = [
    FP8_E4M3,
    FP8_E5M2,
    FP8_E4M3.with_options(pow2=True),
    FP8_E5M2.with_options(pow2=True),
    FP8_E4M3.with_options(eps=0.5),
]

STOCHASTIC, ROWS = (NVFP4.with_options(**options) for options in ({"rounding": "stochastic"}, {"global_scale": "row"}))
BLOCKS = [
    *(fmt for fmt in formats.FORMATS.values() if fmt.block is not None),
    formats.FP8_1x128.with_options(pow2=False, eps=0.5),
    formats.MXFP8_E4M3.with_options(scale_rounding="floor"),
    NVFP4.with_options(scale_max=256.0, four_over_six="mae"),
    NVFP4.with_options(hadamard=True),
    NVFP4.with_options(hadamard=True, rounding="stochastic"),
    NVFP4_16x16.with_options(four_over_six="mse"),
    NVFP4_16x16.with_options(rounding="stochastic"),
    STOCHASTIC,
    ROWS,
]
SEED = 0x0123456789ABCDEF


def assert_quantized(actual, expected):
    """Both planes, and which of them there are, bit for bit."""
    assert (actual.format, actual.dtype) == (expected.format, expected.dtype)
    assert actual.shape == expected.shape or (actual.rowwise is None and 0 in expected.shape)
    for name in ("rowwise", "columnwise"):
        plane, oracle = getattr(actual, name), getattr(expected, name)
        assert (plane is None) == (oracle is None), name
        if plane is not None:
            assert plane.data.dtype == actual.format.data_dtype
            assert plane.scale_inv.dtype == actual.format.scale_dtype
            assert_bits_equal(plane.data, oracle.data, f"{name}.data")
            assert_bits_equal(plane.scale_inv, oracle.scale_inv, f"{name}.scale_inv")
            assert (plane.global_scale_inv is None) == (oracle.global_scale_inv is None)
            if plane.global_scale_inv is not None:
                assert_bits_equal(plane.global_scale_inv, oracle.global_scale_inv, f"{name}.global_scale_inv")


@pytest.mark.parametrize("shape", [*SHAPES, (0,), (16384,)], ids=str)
def test_shapes(shape):
    """Every shape, as one dtype and usage after the other: codes, scales and decoded values are the oracle's."""
    i = SHAPES.index(shape) if shape in SHAPES else 0
    dtype, usage = DTYPES[i % 3], list(Usage.BOTH)[i % 2] if i % 4 == 0 else Usage.BOTH
    for kinds in (TAME, KINDS):
        x = awkward_values(shape, seed=i, dtype=dtype, kinds=kinds)
        actual, expected = qj.quantize(x, FP8_E4M3, usage=usage), reference.quantize(x, FP8_E4M3, usage)
        assert_quantized(actual, expected)
        assert_bits_equal(actual.dequantize().reshape(shape), expected.dequantize(), "values")


def test_scalar():
    for value in (-3.0, 0.0, np.nan):
        x = np.float32(value)
        actual, expected = qj.quantize(x, FP8_E5M2), reference.quantize(x, FP8_E5M2)
        assert_quantized(actual, expected)
        assert_bits_equal(actual.dequantize(), expected.dequantize())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", VARIANTS, ids=str)
def test_formats(fmt, dtype):
    """Every per-tensor format, dtype and kind of value; decoding to every dtype, from either plane."""
    for kinds in (TAME, KINDS, ("normal",), ("zeros",), ("nan",), ("max",)):
        x = awkward_values((48, 96), seed=3, dtype=dtype, kinds=kinds)
        actual, expected = (quantize(x, fmt, usage=Usage.BOTH) for quantize in (qj.quantize, reference.quantize))
        assert_quantized(actual, expected)
    columnwise = dataclasses.replace(actual, rowwise=None)
    for out in DTYPES:
        assert_bits_equal(actual.dequantize(out), expected.dequantize(out), "rowwise")
        assert_bits_equal(columnwise.dequantize(out), expected.dequantize(out, usage=Usage.COLUMNWISE), "columnwise")


def usages_of(fmt):
    return [usage for usage in (*Usage.BOTH, Usage.BOTH) if fits(fmt, (128, 128), usage)]


@pytest.mark.parametrize("cuttable", [True, False], ids=["8 devices", "1 device"])
@pytest.mark.parametrize("fmt", BLOCKS, ids=str)
def test_blocks(fmt, cuttable, monkeypatch):
    """Every format in blocks, usage, dtype, kind of value and shape; decoding from each plane.

    Shapes, dtypes and kinds take turns. Where only one device is, ops see memory as it is, and not in factors.
    """
    if not cuttable:
        monkeypatch.setattr(jax, "device_count", lambda: 1)
    start, step = BLOCKS.index(fmt), 4 if cuttable else 6
    for j, usage in enumerate(usages_of(fmt)):
        shapes = [*shapes_of(fmt, usage), *([(2, 3, 64)] if fits(fmt, (2, 3, 64), usage) else [])]
        shapes = shapes[(start + j) % step :: step]
        # The cache of jit knows nothing of devices: shapes of one device differ in an axis of length 1.
        for i, shape in enumerate(shapes if cuttable else [(1, *shape) for shape in shapes]):
            dtype, kinds = DTYPES[(i + j) % 3], TAME if i % 2 else KINDS
            x = awkward_values(shape, seed=i, dtype=dtype, kinds=kinds)
            actual = qj.quantize(x, fmt, usage=usage, seed=SEED)
            expected = reference.quantize(x, fmt, usage, seed=SEED)
            assert_quantized(actual, expected)
            for each in usage:
                values = actual.dequantize(DTYPES[i % 3], usage=each).reshape(shape)
                assert_bits_equal(values, expected.dequantize(DTYPES[i % 3], usage=each), f"values, {each}")


@pytest.mark.parametrize("fmt", [*BLOCKS[:6], *BLOCKS[-5:]], ids=str)
def test_blocks_under_vmap(fmt):
    """Each slice is a tensor of its own, twice over; `dequantize` of what comes out of vmap is that of each."""
    x = awkward_values((2, 2, 64, 32), seed=4, kinds=TAME)
    usage = usages_of(fmt)[-1]
    q = jax.vmap(jax.vmap(lambda x: qj.quantize(x, fmt, usage=usage, seed=SEED)))(x)
    assert q.shape == x.shape
    for each in usage:
        values = q.dequantize(usage=each)
        for i in np.ndindex(2, 2):
            whole = reference.quantize(x[i], fmt, usage, seed=SEED)
            assert_quantized(jax.tree.map(lambda leaf, i=i: leaf[i], q), whole)
            assert_bits_equal(values[i], whole.dequantize(usage=each))


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1, 0x89ABCDEF << 32])
def test_seeds_and_large_indices(seed):
    """All 64 bits of a seed count, and of an index too: a shard far into the whole, in words of 32 bits."""
    x = awkward_values((16, 64), kinds=("normal",))
    assert_quantized(qj.quantize(x, STOCHASTIC, seed=seed), reference.quantize(x, STOCHASTIC, seed=seed))
    for number in (3, 0x12345, 0xFFFFFFFF, 2**32, 0x123456789AB):
        a = np.array([0, 1, 0xFFFF, 0x10000, 0xFFFFFFFF], np.uint32)
        low, high = words_plus(words_times(jnp.asarray(a), number), (np.uint32(0xFFFFFFFF), np.uint32(1)))
        want = [(int(i) * number + 0x1FFFFFFFF) % 2**64 for i in a]
        assert [int(high_) << 32 | int(low_) for low_, high_ in zip(low, high, strict=True)] == want


@given(st.integers(0, 2**32 - 1), st.sampled_from([0x7FFFFFFF, 0x3FFFFFFF, 0x7F7FFFFF]))
def test_any_bits(seed, mask):
    """fp32 of random bits: NaNs with payloads, infinities and subnormals with them."""
    bits = np.random.default_rng(seed).integers(0, 2**32, (8, 64), dtype=np.uint32)
    x = (bits & (mask | 0x80000000)).astype(np.uint32).view(np.float32)
    assert_quantized(qj.quantize(x, FP8_E4M3, usage=Usage.BOTH), reference.quantize(x, FP8_E4M3, Usage.BOTH))


def test_one_device(monkeypatch):
    """Where nothing can be cut, ops see the tensor as one run. The shape is one that no other test has traced."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    x = awkward_values((2, 24, 72), kinds=TAME)
    actual, expected = (quantize(x, FP8_E4M3, usage=Usage.BOTH) for quantize in (qj.quantize, reference.quantize))
    assert_quantized(actual, expected)
    assert_bits_equal(actual.dequantize(), expected.dequantize())


@pytest.mark.parametrize("x64", [False, True])
def test_x64_changes_nothing(x64):
    x = awkward_values((16, 64), dtype=BFLOAT16)
    with jax.enable_x64(x64):
        fmt = FP8_E4M3.with_options(eps=0.1, pow2=True)
        actual = qj.quantize(x, fmt, usage=Usage.BOTH)
        assert_quantized(actual, reference.quantize(x, fmt, Usage.BOTH))
        assert_bits_equal(actual.dequantize(), reference.quantize(x, fmt).dequantize())


@pytest.mark.parametrize("usage", list(Usage.BOTH))
def test_given_scales(usage):
    """`scales` are used as they are; saturation is then possible."""
    x = awkward_values((16, 64), kinds=TAME)
    scale = np.float32(7.3)
    actual = qj.quantize(x, FP8_E4M3, usage=usage, scales=(scale, 1 / scale))
    assert_quantized(actual, reference.quantize(x, FP8_E4M3, usage, scale=scale))


@pytest.mark.parametrize("cuts", [[], [24], [3, 4, 4, 17]], ids=["1 part", "2 parts", "5 uneven parts, one empty"])
def test_law(cuts):
    """gather(quantize(shards)) == quantize(whole), for cuts that no JAX sharding has."""
    x = awkward_values((31, 96), seed=5, dtype=BFLOAT16, kinds=TAME)
    parts = np.split(x, cuts)
    amax = np.max([np.asarray(ops.amax_tensor(part, lead=0)).view(np.int32) for part in parts]).view(np.float32)
    scales = ops.scale_from_amax(amax, element=FP8_E4M3.element.name, eps=0.0, pow2=False)
    shards = [qj.quantize(part, FP8_E4M3, usage=Usage.BOTH, scales=scales) for part in parts]
    whole = reference.quantize(x, FP8_E4M3, Usage.BOTH)
    assert_bits_equal(np.concatenate([q.rowwise.data for q in shards]), whole.rowwise.data)
    assert_bits_equal(np.concatenate([q.columnwise.data for q in shards], axis=1), whole.columnwise.data)
    assert_bits_equal(shards[0].rowwise.scale_inv, whole.rowwise.scale_inv)


def test_is_a_pytree():
    """Leaves may be anything: specs, None, new leading axes. The structure carries what is static."""
    q = qj.quantize(np.ones((4, 32), np.float32), FP8_E4M3, usage=Usage.BOTH)
    assert len(jax.tree.leaves(q)) == 4
    assert jax.tree.map(lambda leaf: None, q).rowwise.data is None
    specs = jax.tree.map(lambda leaf: jax.P(), q)
    assert jax.tree.structure(specs) == jax.tree.structure(q)
    assert hash(jax.tree.structure(q)) == hash(jax.tree.structure(specs))
    assert str(q) == str(specs) == "QuantizedArray(FP8_E4M3, float32, rowwise and columnwise)"
    assert q.global_scale_inv is None
    assert jax.tree.structure(q) != jax.tree.structure(qj.quantize(np.ones((4, 32), np.float32), FP8_E5M2))


X = np.ones((4, 32), np.float32)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: qj.quantize(X.astype(int), FP8_E4M3), TypeError, r"quantize: x \(int.*\) is not float32 or bfloat16"),
        (lambda: qj.quantize(jnp.ones(4, "float8_e5m2"), FP8_E4M3), TypeError, r"quantize: x \(float8_e5m2\)"),
        (lambda: qj.quantize(X, "FP8_E4M3"), TypeError, r"quantize: fmt \('FP8_E4M3'\) is not a qshard.formats.Format"),
        (lambda: qj.quantize(X, FP8_E4M3, usage="rowwise"), TypeError, r"quantize: usage \('rowwise'\)"),
        (lambda: qj.quantize(X, FP8_E4M3, usage=Usage(0)), TypeError, r"quantize: usage"),
        (
            lambda: qj.quantize(X, STOCHASTIC),
            ValueError,
            r"quantize: seed \(None\) is not what NVFP4\[rounding=stochastic\]",
        ),
        (lambda: qj.quantize(X, STOCHASTIC, seed=0.5), TypeError, r"quantize: seed \(0.5\) is not an integer, uint32"),
        (lambda: qj.quantize(X, ROWS, usage=Usage.BOTH), ValueError, r"is not what NVFP4\[global_scale=row\] holds"),
        (lambda: qj.quantize(X[:, :31], formats.MXFP8_E4M3), ValueError, r"pad the columns to 32"),
        (lambda: qj.quantize(X, FP8_E4M3).dequantize(int), TypeError, r"dequantize: dtype \(int.*\) is not float32"),
        (lambda: qj.quantize(X, FP8_E4M3).plane(Usage.COLUMNWISE), ValueError, r"plane: usage \(Usage.COLUMNWISE\)"),
        (lambda: ops.cast_tensor(X, X[0], element="float8_e4m3fn"), ValueError, r"scale \(32,\) is not the first axes"),
        (lambda: ops.cast_tensor(X, X[:, 0]), TypeError, r"cast_tensor: attributes \(none\) .* give element"),
        (lambda: ops.cast_tensor(X, X[:, 0].astype("float16"), element="float8_e5m2"), TypeError, r"scale \(float16\)"),
        (lambda: ops.no_such_op, AttributeError, r"no_such_op"),
        (lambda: jax.grad(lambda x: qj.quantize(x, FP8_E4M3).dequantize().sum())(X), TypeError, r"has no derivative"),
    ],
)
@pytest.mark.parametrize("jitted", [False, True])
def test_errors_are_python_errors(call, error, text, jitted):
    """Before anything runs, and the same under jit, where they come when tracing."""
    with pytest.raises(error, match=text):
        jax.jit(call)() if jitted else call()


def test_float64_is_refused():
    with jax.enable_x64(True), pytest.raises(TypeError, match=r"quantize: x \(float64\) is not float32"):
        qj.quantize(np.ones(4), FP8_E4M3)
