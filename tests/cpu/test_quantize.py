"""`quantize` and `dequantize` of both front ends: the reference's bits, and what they refuse."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qshard import reference
from qshard.formats import FP8_E4M3, MXFP8_E4M3, NVFP4, MXFP8_32x32, Usage
from qshard.layout import whole_units
from support.awkward import DTYPES, KINDS, TAME, assert_bits_equal, awkward_values, shapes_of
from support.formats import COMBINED, NAMED, VARIANTS, every_plane, stochastic, usages_of
from support.fronts import assert_quantized, some

SEED = 0xFEDCBA9876543210
STOCHASTIC = [fmt for fmt in VARIANTS if stochastic(fmt)]
FINITE = st.sampled_from([0x7FFFFFFF, 0x3FFFFFFF, 0x7F7FFFFF])


def assert_both_ways(front, x, fmt, usage, dtypes=(None,), seed=SEED):
    """Codes, scales, and the values of each plane in each dtype, to which they are rounded once."""
    seed = seed if stochastic(fmt) else None
    actual, expected = front.quantize(x, fmt, usage=usage, seed=seed), reference.quantize(x, fmt, usage, seed=seed)
    assert_quantized(front, actual, expected)
    for dtype in dtypes:
        for each in usage:
            values = front.dequantize(actual, dtype, usage=each).reshape(x.shape)
            assert_bits_equal(values, expected.dequantize(dtype, usage=each), f"values, {each}")


@pytest.mark.each_value
@every_plane
def test_shapes_dtypes_and_values(front, fmt, usage):
    cases = [(shape, dtype, kinds) for shape in shapes_of(fmt, usage) for dtype in DTYPES for kinds in (TAME, KINDS)]
    for i, (shape, dtype, kinds) in enumerate(some(front, cases, f"{fmt} {usage}")):
        x = awkward_values(shape, i, dtype, kinds=kinds)
        # Each case has one dtype of values, in turn: torch has all four for a plane, JAX for several formats together.
        assert_both_ways(front, x, fmt, usage, [(None, *DTYPES)[(i + len(str(fmt))) % 4]])


@pytest.mark.parametrize("value", [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 3.4e38])
def test_a_tensor_of_one_value(front, value):
    """Of one shape for each unit of blocks, so that JAX compiles each format once."""
    for fmt in NAMED if front.name == "jax" else VARIANTS:
        x = np.full((3, 5) if not fmt.scaling.whole_blocks else (32, 32), value, np.float32)
        assert_both_ways(front, x, fmt, usages_of(fmt)[-1])


def test_scalars_and_vectors(front):
    for fmt in (fmt for fmt in NAMED if fmt.block is None):
        for shape in ((), (0,), (5,), (16384,)):
            x = awkward_values(shape or (1,), 3, kinds=TAME).reshape(shape)
            assert_both_ways(front, x, fmt, Usage.ROWWISE)


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1, 0x89ABCDEF << 32])
def test_all_64_bits_of_a_seed_count(front, seed):
    for fmt in STOCHASTIC:
        assert_both_ways(front, awkward_values((16, 64), kinds=("normal",)), fmt, Usage.ROWWISE, seed=seed)


@pytest.mark.parametrize("factor", [1, pytest.param(30, marks=pytest.mark.slow)])
def test_any_shape_of_any_format(front, factor):
    """Drawn from the product of all there is: formats with all their options, planes, shapes, dtypes and values."""

    @settings(max_examples=factor * (12 if front.name == "jax" else 120))
    @given(st.data())
    def check(data):
        fmt = data.draw(st.sampled_from(COMBINED))
        usage = data.draw(st.sampled_from(usages_of(fmt)))
        units = [
            1 if not fmt.scaling.whole_blocks else max(whole_units(fmt, each)[axis] for each in usage.planes)
            for axis in (0, 1)
        ]
        rows, columns = (unit * data.draw(st.integers(0, 3 if unit > 1 else 40)) for unit in units)
        lead = data.draw(st.sampled_from([(), (1,), (3,), (2, 2)])) if rows else ()
        x = awkward_values(
            (*lead, rows, columns),
            data.draw(st.integers(0, 2**32 - 1)),
            data.draw(st.sampled_from(DTYPES)),
            kinds=data.draw(st.sampled_from([TAME, KINDS, *((kind,) for kind in KINDS)])),
        )
        assert_both_ways(
            front, x, fmt, usage, [data.draw(st.sampled_from(DTYPES))], data.draw(st.integers(0, 2**64 - 1))
        )

    check()


@pytest.mark.each_value
@pytest.mark.parametrize("fmt", NAMED, ids=str)
def test_any_bits(front, fmt):
    """fp32 of random bits: NaNs with payloads, infinities and subnormals with them."""

    @settings(max_examples=20)
    @given(st.integers(0, 2**32 - 1), FINITE)
    def check(seed, mask):
        bits = np.random.default_rng(seed).integers(0, 2**32, (32, 64), dtype=np.uint32)
        x = (bits & (mask | 0x80000000)).astype(np.uint32).view(np.float32)
        assert_both_ways(front, x, fmt, Usage.BOTH)

    check()


@pytest.mark.parametrize(
    ("shape", "fmt", "options", "error", "text"),
    [
        ((4, 33), MXFP8_E4M3, {}, ValueError, r"x \(4, 33\) is not a whole number of 1x32 blocks of MXFP8_E4M3; pad"),
        ((33, 32), MXFP8_32x32, {}, ValueError, r"whole number of 32x32 blocks of MXFP8_32x32; pad the rows to 64"),
        ((8, 32), MXFP8_E4M3, {"usage": Usage.BOTH}, ValueError, "32x1 blocks of MXFP8_E4M3; pad the rows to 32"),
        ((16, 24), NVFP4, {}, ValueError, "pad the columns to 32"),
        ((16, 16), NVFP4.with_options(global_scale="row"), {"usage": Usage.BOTH}, ValueError, r"global_scale=row"),
        *(((16, 16), fmt, {}, ValueError, r"quantize: .*seed") for fmt in STOCHASTIC),
    ],
    ids=str,
)
def test_what_a_format_refuses(front, shape, fmt, options, error, text):
    with pytest.raises(error, match=text):
        front.quantize(np.ones(shape, np.float32), fmt, **options)


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, "float8_e5m2"])
def test_dtypes_that_are_no_values(front, dtype):
    for fmt in NAMED:
        with pytest.raises(TypeError, match=r"x \(\w+\) is not float32, bfloat16 or float16"):
            front.quantize(np.ones((32, 32)).astype(np.dtype(dtype)), fmt)


def test_a_plane_that_is_not_there_cannot_be_read(front):
    q = front.quantize(np.ones((4, 6), np.float32), FP8_E4M3)
    with pytest.raises(ValueError, match=r"dequantize: usage \(Usage\.COLUMNWISE\) is not a plane of this tensor"):
        q.dequantize(usage=Usage.COLUMNWISE)
