"""Properties of whole tensors, for every format: planes, shards, special values, and what comes back."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qshard import formats, reference
from qshard.formats import E8M0, ELEMENTS, Usage
from qshard.layout import plane
from support.awkward import DTYPES, KINDS, SHAPES, TAME, assert_bits_equal, awkward_values, fits, shapes_of
from support.formats import COMBINED, VARIANTS, stochastic

# Rotations and random rounding have tests of their own: test_hadamard.py, test_stochastic.py.
ALL = [fmt for fmt in VARIANTS if not fmt.hadamard and not stochastic(fmt)]
every_format = pytest.mark.parametrize("fmt", ALL, ids=str)
every_plane = pytest.mark.parametrize(
    ("fmt", "usage"), [(fmt, usage) for fmt in ALL for usage in Usage if fits(fmt, (96, 96), usage)], ids=str
)
every_kind = pytest.mark.parametrize("kinds", [TAME, KINDS], ids=["tame", "all"])


def both_or_rowwise(fmt):
    return Usage.ROWWISE if fmt.scaling.global_scale == "row" else Usage.BOTH


def planes(q):
    return [p for p in (q.rowwise, q.columnwise) if p is not None]


@every_format
def test_every_shape_has_the_layout_of_its_planes(fmt):
    for shape in shapes_of(fmt):
        for usage in both_or_rowwise(fmt):
            if not fits(fmt, shape, usage):
                continue
            layout = plane(fmt, shape, usage)
            q = reference.quantize(awkward_values(shape), fmt, usage)
            (stored,) = planes(q)
            assert stored.data.shape == layout.data_shape
            assert stored.data.dtype == np.uint8
            assert stored.scale_inv.shape == layout.scale_shape
            assert stored.scale_inv.dtype == (np.float32 if fmt.scale_dtype == "float32" else np.uint8)
            assert (None if stored.global_scale_inv is None else stored.global_scale_inv.shape) == (
                layout.global_scale_shape
            )
            assert q.dequantize().shape == shape


# Not where there is no columnwise plane, nor where a square block sums its errors by rows: its transpose may choose
# another scale.
@pytest.mark.each_value
@pytest.mark.parametrize(
    "fmt",
    [fmt for fmt in ALL if fmt.scaling.global_scale != "row" and not (fmt.scaling.four_over_six and fmt.shares_codes)],
    ids=str,
)
@every_kind
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_columnwise_is_rowwise_of_the_transpose(fmt, kinds, dtype):
    x = awkward_values((64, 96), seed=1, dtype=dtype, kinds=kinds)
    ours = reference.quantize(x, fmt, Usage.COLUMNWISE).columnwise
    other = reference.quantize(np.ascontiguousarray(x.T), fmt).rowwise
    transposed = plane(fmt, x.shape, Usage.COLUMNWISE).transposed
    assert_bits_equal(ours.data, other.data if transposed else other.data.T)
    assert_bits_equal(ours.scale_inv, other.scale_inv if transposed else other.scale_inv.T)


@pytest.mark.parametrize("fmt", [fmt for fmt in ALL if fmt.shares_codes], ids=str)
@every_kind
def test_square_planes_hold_one_set_of_numbers(fmt, kinds):
    q = reference.quantize(awkward_values((64, 96), seed=2, kinds=kinds), fmt, Usage.BOTH)
    unpack = reference.unpack if fmt.element.bits == 4 else np.asarray
    assert_bits_equal(unpack(q.columnwise.data), unpack(q.rowwise.data).T)
    assert_bits_equal(q.columnwise.scale_inv, q.rowwise.scale_inv.T)
    assert_bits_equal(q.dequantize(usage=Usage.COLUMNWISE), q.dequantize(usage=Usage.ROWWISE))


@given(
    seed=st.integers(0, 2**32),
    fmt=st.sampled_from([fmt for fmt in COMBINED if not fmt.hadamard and not stochastic(fmt)]),
    cuts=st.lists(st.integers(0, 4), max_size=3),
    tame=st.booleans(),
)
def test_cast_of_shards_is_shards_of_the_cast(seed, fmt, cuts, tame):
    """Rows cut on block boundaries, some shards empty: the planes of the shards are slices of the whole's planes."""
    unit = 1 if fmt.block is None else max(fmt.block)
    x = awkward_values((4 * unit, 2 * unit), seed, kinds=TAME if tame else KINDS)
    usage = both_or_rowwise(fmt)
    whole = reference.quantize(x, fmt, usage)
    shards = np.split(x, [unit * cut for cut in sorted(cuts)])
    amax = reference.amax(x) if fmt.block is None or fmt.scaling.global_scale == "tensor" else None
    parts = [reference.quantize(shard, fmt, usage, amax=amax) for shard in shards]
    for each in usage:
        transposed = plane(fmt, x.shape, each).transposed
        name = each.name.lower()
        for field in ("data", "scale_inv"):
            pieces = [getattr(getattr(part, name), field) for part in parts]
            expected = getattr(getattr(whole, name), field)
            if expected.ndim:
                assert_bits_equal(np.concatenate(pieces, axis=1 if transposed else 0), expected, f"{name}.{field}")
            else:
                for piece in pieces:
                    assert_bits_equal(piece, expected, f"{name}.{field}")


@every_format
def test_leading_axes_are_rows(fmt):
    x = awkward_values((2, 64, 96), seed=4)
    for usage in both_or_rowwise(fmt):
        (ours,) = planes(reference.quantize(x, fmt, usage))
        (flat,) = planes(reference.quantize(x.reshape(128, 96), fmt, usage))
        assert_bits_equal(ours.data.reshape(flat.data.shape), flat.data)
        assert_bits_equal(ours.scale_inv.reshape(flat.scale_inv.shape), flat.scale_inv)


@every_format
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_narrow_inputs_are_widened_exactly(fmt, dtype):
    x = awkward_values((32, 64), seed=5, dtype=dtype)
    with np.errstate(invalid="ignore"):
        wide = x.astype(np.float32)
    for a, b in zip(*(planes(reference.quantize(v, fmt, both_or_rowwise(fmt))) for v in (x, wide)), strict=True):
        assert_bits_equal(a.data, b.data)
        assert_bits_equal(a.scale_inv, b.scale_inv)


def grid_of(fmt, shape, usage):
    """The block of each element."""
    block = fmt.block_of(usage) or shape
    rows, cols = np.indices(shape)
    return rows // block[0] * 1000 + cols // block[1]


@every_plane
def test_values_are_near(fmt, usage):
    """Dequantized elements lie within half a step of the format at their block's scale. Catches any misplaced scale."""
    x = awkward_values((64, 96), seed=6, kinds=("normal", "outlier"))
    got = reference.quantize(x, fmt, usage).dequantize(usage=usage)
    grid = grid_of(fmt, x.shape, usage)
    largest = np.zeros_like(x)
    for block in np.unique(grid):
        largest[grid == block] = np.abs(x[grid == block]).max()
    half_ulp = 2.0 ** -(fmt.element.mantissa_bits + 1)
    smallest = float(ml_dtypes.finfo(getattr(ml_dtypes, fmt.element.name)).smallest_subnormal)
    # A block's scale lies within a factor 2 of amax / max. OCP's floor and NVFP4's E4M3 scales may saturate elements.
    step = 2 * largest / fmt.element.max * smallest / 2
    saturation = {"floor": 0.25, "up": 0.0}[fmt.scaling.scale_rounding] if fmt.element.bits == 8 else 0.0625 + 0.25
    assert (np.abs(got - x) <= np.maximum(half_ulp * np.abs(x) * 1.001, step) + saturation * np.abs(x)).all()


@every_format
def test_nan_spoils_its_block_alone(fmt):
    """As far as the scale reaches: a NaN block scale makes a block NaN, a NaN amax of the tensor makes its scale 1.

    But an fp32 scale is NaN only with `nonfinite="nan"`, else 1.
    """
    x = awkward_values((64, 96), seed=7, kinds=("normal",))
    x[5, 7] = np.nan
    for usage in both_or_rowwise(fmt):
        got = reference.quantize(x, fmt, usage).dequantize(usage=usage)
        grid = grid_of(fmt, x.shape, usage)
        one = fmt.scale_dtype == "float32" and fmt.nonfinite == "saturate"
        hit = np.isnan(x) if one else grid == grid[5, 7]
        assert_bits_equal(np.isnan(got), hit)
        assert_bits_equal(got[hit], np.full(hit.sum(), np.nan, np.float32))
    if fmt.scaling.global_scale is not None:
        assert_bits_equal(reference.quantize(x, fmt).global_scale_inv.reshape(-1)[:6][-1], np.float32(1))


@every_format
def test_infinity_is_the_largest_code_or_spoils_its_block(fmt):
    x = np.ones((32, 32), np.float32)
    x[1, 2], x[3, 4] = np.inf, -np.inf
    for usage in both_or_rowwise(fmt):
        q = reference.quantize(x, fmt, usage)
        if fmt.nonfinite == "nan":
            grid = grid_of(fmt, x.shape, usage)
            assert_bits_equal(np.isnan(q.dequantize(usage=usage)), (grid == grid[1, 2]) | (grid == grid[3, 4]))
            continue
        (stored,) = planes(q)
        codes = reference.unpack(stored.data) if fmt.element.bits == 4 else stored.data
        codes = codes.T if plane(fmt, x.shape, usage).transposed else codes
        assert codes[1, 2] == fmt.element.max_code
        assert codes[3, 4] == fmt.element.max_code | 1 << fmt.element.bits - 1


@every_format
def test_zeros_keep_their_sign(fmt):
    x = awkward_values((32, 32), seed=8, kinds=("zeros",))
    q = reference.quantize(x, fmt, both_or_rowwise(fmt))
    assert_bits_equal(q.dequantize(), x)
    for stored in planes(q):
        assert (
            stored.scale_inv == (1 if fmt.scale_dtype == "float32" and not fmt.scaling.eps else stored.scale_inv)
        ).all()
        assert fmt.scale_dtype == "float32" or not stored.scale_inv.any()


@pytest.mark.parametrize(
    "fmt",
    [fmt for fmt in ALL if (fmt.scaling.pow2 or fmt.scale_dtype == E8M0.name) and fmt.scaling.scale_rounding == "up"],
    ids=str,
)
@pytest.mark.parametrize("seed", range(3))
def test_quantized_values_are_kept(fmt, seed):
    """Power-of-two scales: what was dequantized quantizes to the same values. Not so for other scales, which round."""
    x = awkward_values((64, 96), seed, kinds=("normal", "outlier", "zeros", "ties"))
    once = reference.quantize(x, fmt).dequantize()
    assert_bits_equal(reference.quantize(once, fmt).dequantize(), once)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", [formats.FP8_E5M2, formats.MXFP8_E4M3, formats.NVFP4], ids=str)
def test_dequantize_is_two_roundings(fmt, dtype):
    """The fp32 product, then one rounding to the output dtype; all by hand."""
    x = awkward_values((32, 64), seed=9)
    q = reference.quantize(x, fmt)
    codes = reference.unpack(q.rowwise.data) if fmt.element.bits == 4 else q.rowwise.data
    scale = q.rowwise.scale_inv
    if fmt.scale_dtype != "float32":
        scale = np.repeat(reference.decode(scale, ELEMENTS[fmt.scale_dtype]), fmt.block[1], axis=1)
    with np.errstate(all="ignore"):
        if q.global_scale_inv is not None:
            scale = scale * q.global_scale_inv
        value = (reference.decode(codes, fmt.element) * scale).astype(dtype)
    value[np.isnan(value)] = np.nan
    assert_bits_equal(q.dequantize(dtype), value)


def test_e8m0_byte_0_and_255_decode():
    x = np.zeros((1, 64), np.float32)
    x[0, 0] = 2.0**-140
    x[0, 32] = np.nan
    q = reference.quantize(x, formats.MXFP8_E4M3)
    assert q.rowwise.scale_inv.tolist() == [[0, 255]]
    assert_bits_equal(reference.decode([0, 254, 255], E8M0), np.array([2.0**-127, 2.0**127, np.nan], np.float32))
    assert q.rowwise.data[0, 32:].tolist() == [0x7F] * 32


def test_delayed_scaling_casts_with_the_scale_it_is_given():
    x = np.array([[1.0, 2.0, 1000.0]], np.float32)
    q = reference.quantize(x, formats.FP8_E4M3, Usage.BOTH, scale=2.0)
    assert_bits_equal(q.rowwise.data, reference.encode([[2.0, 4.0, 448.0]], formats.E4M3))
    assert_bits_equal(q.columnwise.data, q.rowwise.data.T)
    assert_bits_equal(q.rowwise.scale_inv, np.float32(0.5))


def test_row_scaled_rows_are_tensors():
    x = awkward_values((12, 64), seed=10)
    whole = reference.quantize(x, formats.NVFP4.with_options(global_scale="row"))
    for i, row in enumerate(x):
        one = reference.quantize(row, formats.NVFP4)
        assert_bits_equal(whole.rowwise.data[i], one.rowwise.data)
        assert_bits_equal(whole.rowwise.scale_inv[i], one.rowwise.scale_inv)
        assert_bits_equal(whole.global_scale_inv[i], one.global_scale_inv)


@pytest.mark.parametrize(
    ("x", "fmt", "usage", "options", "error"),
    [
        (np.ones(4), formats.FP8_E4M3, Usage.ROWWISE, {}, TypeError),
        (np.ones((4, 4), np.float32), formats.FP8_1x128, Usage.ROWWISE, {"scale": 1.0}, ValueError),
        (np.ones((4, 4), np.float32), formats.FP8_1x128, Usage.ROWWISE, {"amax": 1.0}, ValueError),
        (
            np.ones((16, 16), np.float32),
            formats.NVFP4.with_options(hadamard=True),
            Usage.BOTH,
            {"amax": 1.0},
            ValueError,
        ),
    ],
    ids=["float64", "scale", "amax", "two amaxes"],
)
def test_errors(x, fmt, usage, options, error):
    with pytest.raises(error, match="quantize: "):
        reference.quantize(x, fmt, usage, **options)


def test_missing_plane():
    q = reference.quantize(np.ones((2, 2), np.float32), formats.FP8_E4M3)
    with pytest.raises(ValueError, match="is not a plane of this tensor; quantize with that usage, or with"):
        q.dequantize(usage=Usage.COLUMNWISE)
    assert q.columnwise is None
    assert q.global_scale_inv is None


@settings(max_examples=30)
@given(st.sampled_from(SHAPES), st.integers(0, 1000), st.sampled_from(DTYPES))
def test_awkward_values_are_what_they_say(shape, seed, dtype):
    x = awkward_values(shape, seed, dtype)
    assert x.shape == shape
    assert x.dtype == dtype
    assert_bits_equal(x, awkward_values(shape, seed, dtype))
    assert np.isfinite(awkward_values(shape, seed, dtype, kinds=TAME)).all()
