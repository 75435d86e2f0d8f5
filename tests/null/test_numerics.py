"""Statistics of formats: cases done by hand, arrays that break arithmetic, and every format."""

import math

import ml_dtypes
import numpy as np
import pytest

import qshard
from qshard import formats
from qshard.formats import FORMATS, Format, Usage
from qshard.numerics import Note, compare, stats
from qshard.numerics._reductions import SIZE, TILES_OF_A_JOB, split_axis
from support.awkward import DTYPES, awkward_values, shapes_of
from support.formats import VARIANTS
from support.stats import expected_stats

PLANES = [Usage.ROWWISE, Usage.COLUMNWISE]
ROTATED = formats.NVFP4.with_options(hadamard=True, rounding="stochastic")


def block(*values, size=32):
    return np.array([[*values, *[0.0] * (size - len(values))]], np.float32)


def test_exact_numbers_have_no_error():
    s = stats([[1.0, -2.0, 448.0, 0.0]], formats.FP8_E4M3)
    assert (s.sqnr_db, s.mean_relative_error, s.max_relative_error) == (math.inf, 0, 0)
    assert (s.zeros_made, s.saturated, s.subnormal, s.nonfinite_made) == (0, 0, 0, 0)
    assert s.scale_histogram == {0: 1}
    assert s.error_by_exponent == {0: 0, 1: 0, 8: 0}
    assert s.bits_per_element == 8 + 32 / 4
    assert (s.format, s.usage, s.shape) == (formats.FP8_E4M3, Usage.ROWWISE, (1, 4))


def test_errors_by_hand():
    """The scale is 1. 17 lies between 16 and 18 and goes to the even code; 0.0009 is less than half of 2**-9."""
    s = stats([448.0, 17.0, -0.0009, 2.0**-7], formats.FP8_E4M3)
    noise, signal = 1 + float(np.float32(0.0009)) ** 2, 448**2 + 17**2 + float(np.float32(0.0009)) ** 2 + 2.0**-14
    assert s.sqnr_db == pytest.approx(10 * math.log10(signal / noise), rel=1e-12)
    assert s.max_relative_error == 1
    assert s.mean_relative_error == pytest.approx((1 / 17 + 1) / 4, rel=1e-12)
    assert (s.zeros_made, s.subnormal, s.saturated) == (0.25, 0.25, 0)
    assert s.error_by_exponent == {8: 0, 4: pytest.approx(1 / 17), -11: 1, -7: 0}


@pytest.mark.parametrize(
    ("amax", "share"),
    [(448.0, 0), (460.0, 0), (464.0, 0), (465.0, 1 / 32), (511.0, 1 / 32), (512.0, 0)],
)
def test_saturation_of_the_floor_rule(amax, share):
    """OCP's scale of a block with amax in [256, 512) is 1. Up to 464 rounding explains what becomes 448."""
    floor = formats.MXFP8_E4M3.with_options(scale_rounding="floor")
    assert stats(block(amax), floor).saturated == share
    assert stats(block(amax), formats.MXFP8_E4M3).saturated == 0


def test_saturation_by_a_scale_that_was_rounded_down():
    """The first block has d = 448. The second wants 25.2, gets 24, and its 37.8 / 6 is no further off than rounding."""
    x = block(*[448.0 * 6] + [0.0] * 15, 25.2 * 6)
    s = stats(x, formats.NVFP4)
    assert s.saturated == 0
    assert s.scale_histogram == {8: 1, 4: 1}


def test_scale_histogram_counts_blocks():
    """The scale of a block of zeros is the smallest there is."""
    x = np.concatenate([block(448.0), block(896.0), block(500.0), block()], axis=1)
    assert stats(x, formats.MXFP8_E4M3).scale_histogram == {-127: 1, 0: 1, 1: 2}


def test_global_scale_is_in_the_histogram_and_in_the_bits():
    s = stats(np.full((2, 32), 6.0 * 2**-3), formats.NVFP4)
    assert s.scale_histogram == {-3: 4}
    assert s.bits_per_element == 4 + (4 * 8 + 32) / 64
    rows = stats(np.full((2, 32), 6.0), formats.NVFP4.with_options(global_scale="row"))
    assert rows.bits_per_element == 4 + (4 * 8 + 2 * 32) / 64


def test_a_block_scale_of_zero_makes_zeros_and_saturates_nothing():
    """Beside 6 * 448, the scale of a block of 1e-4 is less than half of the smallest E4M3."""
    x = block(*[6.0 * 448] + [0.0] * 15, *[1e-4] * 16)
    s = stats(x, formats.NVFP4)
    assert (s.zeros_made, s.saturated, s.scale_histogram) == (0.5, 0, {8: 1})
    assert s.notes == (Note.SCALES,)


def test_nan_spoils_its_block_alone():
    x = np.concatenate([block(math.nan, 1.0, 2.0), block(1.0)], axis=1)
    s = stats(x, formats.MXFP8_E4M3)
    assert (s.nonfinite_made, s.nonfinite_given, s.counted) == (31 / 64, 1 / 64, 1 / 2)
    assert s.sqnr_db == math.inf
    assert sum(s.scale_histogram.values()) == 1
    assert s.notes == (Note.NONFINITE_GIVEN, Note.NONFINITE_MADE, Note.SCALES)


def test_infinity_saturates():
    s = stats([math.inf, 1.0, -math.inf, 1.0], formats.FP8_E4M3)
    assert (s.saturated, s.nonfinite_made, s.nonfinite_given, s.counted, s.sqnr_db) == (0.5, 0, 0.5, 0.5, math.inf)
    assert s.notes == (Note.NONFINITE_GIVEN,)


def test_where_nothing_is_finite_no_error_is_claimed():
    for value, saturated in {math.inf: 1, math.nan: 0}.items():
        s = stats(np.full((4, 32), value), formats.FP8_E4M3)
        assert (s.saturated, s.counted, s.nonfinite_given) == (saturated, 0, 1)
        assert all(map(math.isnan, (s.sqnr_db, s.max_relative_error, s.mean_relative_error)))
        assert s.notes[0] is Note.NOTHING_COUNTS
    s = stats(block(math.nan, 1.0), formats.MXFP8_E4M3)
    assert (s.counted, s.nonfinite_given, s.nonfinite_made) == (0, 1 / 32, 31 / 32)
    assert math.isnan(s.sqnr_db)
    assert s.notes == (Note.NOTHING_COUNTS, Note.SCALES)


def test_zeros_beside_infinities_are_no_measure():
    s = stats([math.inf, 0.0], formats.FP8_E4M3)
    assert math.isnan(s.sqnr_db)
    assert s.notes == (Note.ZEROS, Note.NONFINITE_GIVEN)


def test_an_infinity_that_becomes_nan_takes_its_block_along():
    x = np.concatenate([block(math.inf, 1.0, 2.0), block(1.5)], axis=1)
    s = stats(x, formats.MXFP8_E4M3.with_options(nonfinite="nan"))
    assert (s.nonfinite_given, s.nonfinite_made, s.counted, s.saturated) == (1 / 64, 31 / 64, 1 / 2, 0)
    assert s.notes == (Note.NONFINITE_GIVEN, Note.NONFINITE_MADE, Note.SCALES)


@pytest.mark.parametrize("fmt", list(formats.FORMATS))
def test_repr_is_one_short_line(fmt):
    found = stats(np.random.default_rng(0).standard_t(3, (128, 128)), fmt)
    assert repr(found) == str(found)
    assert repr(found).startswith(f"Stats(format={fmt}, shape=(128, 128), sqnr_db=")
    assert len(repr(found)) <= 120
    assert "\n" not in repr(found)


def test_repr_names_the_columnwise_plane_and_counts_notes():
    found = stats(np.full((32, 32), np.inf), "MXFP8_E4M3", Usage.COLUMNWISE)
    shown = "format=MXFP8_E4M3, usage=Usage.COLUMNWISE, shape=(32, 32), sqnr_db=nan, mean_relative_error=nan"
    assert repr(found).startswith(f"Stats({shown}")
    assert repr(found).endswith(f"notes={len(found.notes)})")


def test_numbers_without_trouble_have_no_notes():
    assert stats([1.0, 17.0, 0.0], formats.FP8_E4M3).notes == ()


@pytest.mark.parametrize("usage", PLANES)
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_zeros_and_nothing(fmt, usage):
    for x in (np.zeros((128, 128)), np.full((128, 128), -0.0), np.zeros((0, 128)), np.zeros((128, 0))):
        s = stats(x, fmt, usage)
        assert all(map(math.isnan, (s.sqnr_db, s.max_relative_error, s.mean_relative_error)))
        assert s.notes[0] is (Note.ZEROS if x.size else Note.EMPTY)
        assert s.zeros_made == s.saturated == s.subnormal == s.nonfinite_made == 0
        assert s.error_by_exponent == {}
        assert (s.bits_per_element > 0) == (x.size > 0)


def assert_as_expected(x, fmt, usage, seed=0):
    measured = stats(x, fmt, usage, seed=seed)
    for name, value in expected_stats(x, fmt, usage, seed=seed).items():
        if name == "worst_block":
            assert measured.worst_block == value
            continue
        # Sums of float64 in another order; decibels may be near 0, where the sums are not.
        least = 1e-10 if name.endswith("_db") else 0
        assert getattr(measured, name) == pytest.approx(value, rel=1e-12, abs=least, nan_ok=True), name


@pytest.mark.each_value
@pytest.mark.parametrize("usage", PLANES)
@pytest.mark.parametrize("fmt", VARIANTS, ids=str)
def test_formulas_on_awkward_values(fmt, usage):
    if usage is Usage.COLUMNWISE and fmt.scaling.global_scale == "row":
        pytest.skip("has no such plane")
    shapes = shapes_of(fmt, usage)
    assert len(shapes) > 5
    for i, shape in enumerate(shapes):
        assert_as_expected(awkward_values(shape, seed=i, dtype=DTYPES[i % 3]), fmt, usage, seed=2**40 + i)


SHAPES_OF_TILES = [(1, 2 * SIZE + 32), (2 * SIZE + 32, 1), (288, 544), (130, 4400)]
"""A tile and more along either axis, and both, not all a whole number of tiles."""
ODD = Format(name="odd", element=formats.E4M3, block=(3, 700))


@pytest.mark.each_value
@pytest.mark.parametrize("shape", SHAPES_OF_TILES, ids=str)
@pytest.mark.parametrize("fmt", [formats.FP8_E4M3, formats.FP8_1x128, formats.FP8_128x128, ODD], ids=str)
def test_formulas_where_tiles_end(fmt, shape):
    x = np.random.default_rng(0).standard_t(2, shape).astype(np.float32)
    for usage in PLANES:
        assert_as_expected(x, fmt, usage)


@pytest.mark.parametrize(("size", "block", "step"), [(0, 1, 4), (70, 16, 40), (70, 50, 40), (5, 128, 128), (9, 1, 4)])
def test_split_axes_leave_blocks_whole_or_stay_inside_of_one(size, block, step):
    found = split_axis(size, block, step)
    assert [i for cut in found for i in range(cut.start, cut.stop)] == list(range(size))
    for cut in found:
        inside = cut.start // block == (cut.stop - 1) // block
        assert inside or (cut.start % block == 0 and (cut.stop % block == 0 or cut.stop == size))
        assert cut.stop - cut.start <= max(step, 1)


def test_results_do_not_depend_on_the_number_of_threads():
    jobs = 5
    x = np.random.default_rng(0).standard_t(2, (128, jobs * TILES_OF_A_JOB * 256)).astype(np.float32)
    before, found = qshard.num_threads(), []
    try:
        for threads in (1, 2, 3, 8):
            qshard.set_num_threads(threads)
            found.append([stats(x, fmt) for fmt in (formats.FP8_E4M3, formats.NVFP4)])
    finally:
        qshard.set_num_threads(before)
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_columnwise_is_rowwise_of_the_transpose(fmt):
    x = awkward_values((128, 256), seed=2, kinds=("normal", "outlier", "ties"))
    columnwise, rowwise = stats(x, fmt, Usage.COLUMNWISE), stats(x.T, fmt)
    assert columnwise.sqnr_db == pytest.approx(rowwise.sqnr_db, rel=1e-12)  # The sums have another order.
    assert columnwise.scale_histogram == rowwise.scale_histogram
    assert columnwise.subnormal == rowwise.subnormal


def test_a_rotated_plane_is_compared_with_the_rotated_tensor():
    """One outlier in a block costs the others their bits; rotated, it does not."""
    x = np.random.default_rng(0).standard_normal((64, 64))
    x[::16] *= 50
    plain, rotated = (stats(x, fmt, Usage.COLUMNWISE) for fmt in (formats.NVFP4, ROTATED))
    assert plain.zeros_made > 0.3
    assert rotated.zeros_made < 0.2
    assert rotated.mean_relative_error < plain.mean_relative_error
    assert (plain.notes, rotated.notes) == ((), (Note.ROTATED,))


def test_stochastic_rounding_takes_its_seed():
    x = np.random.default_rng(0).standard_normal((16, 64))
    fmt = formats.NVFP4.with_options(rounding="stochastic")
    assert stats(x, fmt, seed=1) == stats(x, fmt, seed=1)
    assert stats(x, fmt, seed=1) != stats(x, fmt, seed=2)


def test_known_error_of_uniform_numbers():
    """In one octave the error of m mantissa bits is uniform in a step of 2**-m, whose variance is 4**-m / 12."""
    x = np.concatenate([[1.75], np.random.default_rng(0).uniform(1, 1.75, 2**16)])  # 1.75 makes a power-of-two scale.
    signal = (1.75**3 - 1) / 3 / 0.75
    for bits, fmt in {3: formats.FP8_E4M3, 2: formats.FP8_E5M2}.items():
        expected = 10 * math.log10(signal / (4.0**-bits / 12))
        assert stats(x, fmt).sqnr_db == pytest.approx(expected, abs=0.1)  # 65536 draws: 0.02 dB of standard deviation


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, np.int8, bool])
def test_dtypes_of_numpy(dtype):
    x = np.ones((4, 32), dtype)
    assert stats(x, formats.MXFP8_E4M3).sqnr_db == math.inf
    assert stats(x.tolist(), formats.MXFP8_E4M3) == stats(x, formats.MXFP8_E4M3)


def test_numbers_beyond_float32_are_infinities_and_zeros():
    s = stats([1e300, 1.0, 1e-300, math.inf], formats.FP8_E4M3)
    assert (s.saturated, s.nonfinite_given, s.zeros_made, s.beyond_float32) == (0.5, 0.5, 0, 0.5)
    assert s.notes == (Note.NONFINITE_GIVEN, Note.BEYOND_FLOAT32)


def test_bytes_in_another_order():
    x = np.arange(64.0)
    for dtype in ("f4", "f2"):
        assert stats(x.astype(f">{dtype}"), formats.MXFP8_E4M3) == stats(x.astype(f"<{dtype}"), formats.MXFP8_E4M3)


def test_strided_and_read_only_arrays():
    x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    expected = stats(x[::2].copy(), formats.NVFP4)
    x.flags.writeable = False
    assert stats(x[::2], formats.NVFP4) == expected


def test_a_dlpack_object_without_more():
    x = np.arange(32, dtype=np.float32)

    class Exported:
        def __dlpack__(self, **options):
            return x.__dlpack__(**options)

        def __dlpack_device__(self):
            return x.__dlpack_device__()

    assert stats(Exported(), formats.MXFP8_E4M3) == stats(x, formats.MXFP8_E4M3)


def test_torch():
    torch = pytest.importorskip("torch")
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.int32):
        x = torch.linspace(-3, 3, 64).to(dtype).requires_grad_(dtype.is_floating_point)
        assert stats(x, formats.NVFP4) == stats(x.detach().float().numpy(), formats.NVFP4)


def test_jax():
    jnp = pytest.importorskip("jax.numpy")
    x = jnp.linspace(-3, 3, 64, dtype=jnp.bfloat16)
    assert stats(x, formats.NVFP4) == stats(np.asarray(x, np.float32), formats.NVFP4)


@pytest.mark.parametrize(("x", "advice"), [("a", "an array of a float"), (1j, "its real and"), (None, "an array of a")])
def test_what_is_no_number_is_refused(x, advice):
    with pytest.raises(TypeError, match=rf"^stats: x \(.*\) is not an array of real numbers; pass {advice}"):
        stats(np.array([x]), formats.FP8_E4M3)


def test_masked_elements_are_refused():
    x = np.ma.masked_greater(np.arange(64.0), 40)
    with pytest.raises(TypeError, match=r"^stats: x \(masked array\) has masked elements, which would count; pass x\."):
        stats(x, formats.NVFP4)
    assert stats(x.filled(0), formats.NVFP4) == stats(np.ma.asarray(x.filled(0)), formats.NVFP4)


def test_usage_is_one_plane():
    for measure in (stats, lambda x, fmt, usage: compare(x, usage=usage)):
        with pytest.raises(ValueError, match=r": usage \(Usage\.BOTH\) selects both planes; pass Usage\.ROWWISE or"):
            measure(np.ones((128, 128)), formats.FP8_E4M3, Usage.BOTH)


def test_formats_that_cannot_hold_x():
    x = np.ones((4, 40))
    assert [s.format for s in compare(x)] == [fmt for fmt in formats.FORMATS.values() if not fmt.scaling.whole_blocks]
    with pytest.raises(
        ValueError, match=r"^compare: x \(4, 40\) is not a whole number of 1x32 blocks of MXFP8_E4M3; pad"
    ):
        compare(x, [formats.MXFP8_E4M3])


def test_formats_by_name():
    x = np.arange(64.0)
    assert stats(x, "NVFP4[global_scale=row]") == stats(x, formats.NVFP4.with_options(global_scale="row"))
    assert compare(x, ["NVFP4", formats.MXFP4]) == compare(x, [formats.NVFP4, formats.MXFP4])
    assert compare(x, "NVFP4") == compare(x, [formats.NVFP4])
    with pytest.raises(ValueError, match=r"^stats: fmt \('nvfp4'\) is not a format name; did you mean 'NVFP4'\?$"):
        stats(x, "nvfp4")


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_seeds_have_64_bits(seed):
    fmt = formats.NVFP4.with_options(rounding="stochastic")
    with pytest.raises(ValueError, match=rf"^stats: seed \({seed}\) is not in \[0, 2\*\*64\); pass an integer"):
        stats(np.ones(16), fmt, seed=seed)


def test_compare_keeps_the_order():
    chosen = [formats.NVFP4, formats.FP8_E4M3, formats.NVFP4]
    assert [s.format for s in compare(np.ones((16, 16)), iter(chosen))] == chosen
