"""Statistics of formats: cases done by hand, arrays that break arithmetic, and every format."""

import math
import sys
import warnings

import ml_dtypes
import numpy as np
import pytest

from qshard import formats, reference
from qshard.formats import FORMATS, Usage
from qshard.numerics import compare, report, stats
from support.awkward import awkward_values, shapes_of
from support.formats import VARIANTS

PLANES = [Usage.ROWWISE, Usage.COLUMNWISE]
FLOOR = formats.MXFP8_E4M3.with_options(scale_rounding="floor")
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


def test_nan_spoils_its_block_alone():
    x = np.concatenate([block(math.nan, 1.0, 2.0), block(1.0)], axis=1)
    s = stats(x, formats.MXFP8_E4M3)
    assert s.nonfinite_made == 31 / 64
    assert s.sqnr_db == math.inf
    assert sum(s.scale_histogram.values()) == 1


def test_infinity_saturates():
    s = stats([math.inf, 1.0, -math.inf, 1.0], formats.FP8_E4M3)
    assert (s.saturated, s.nonfinite_made, s.sqnr_db) == (0.5, 0, math.inf)


@pytest.mark.parametrize("usage", PLANES)
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_zeros_and_nothing(fmt, usage):
    for x in (np.zeros((128, 128)), np.full((128, 128), -0.0), np.zeros((0, 128)), np.zeros((128, 0))):
        s = stats(x, fmt, usage)
        assert s.sqnr_db == math.inf
        assert s.max_relative_error == s.mean_relative_error == 0
        assert s.zeros_made == s.saturated == s.subnormal == s.nonfinite_made == 0
        assert s.error_by_exponent == {}
        assert (s.bits_per_element > 0) == (x.size > 0)


@pytest.mark.parametrize("usage", PLANES)
@pytest.mark.parametrize("fmt", VARIANTS, ids=str)
def test_every_format_on_awkward_values(fmt, usage):
    """The statistics are numbers, and say of the reference's values what NumPy says of them."""
    if usage is Usage.COLUMNWISE and fmt.scaling.global_scale == "row":
        pytest.skip("has no such plane")
    for shape in shapes_of(fmt, usage):
        x = awkward_values(shape, seed=1)
        s = stats(x, fmt, usage)
        shares = [s.zeros_made, s.saturated, s.subnormal, s.nonfinite_made]
        assert all(0 <= share <= 1 for share in shares)
        assert not math.isnan(s.sqnr_db)
        assert all(error >= 0 for error in [s.mean_relative_error, s.max_relative_error - s.mean_relative_error])
        if fmt.hadamard and usage is Usage.COLUMNWISE:
            continue
        value = reference.quantize(x, fmt, usage).dequantize(np.float32)
        assert s.zeros_made * x.size == pytest.approx(np.sum((x != 0) & (value == 0)))
        assert s.nonfinite_made * x.size == pytest.approx(np.sum(np.isfinite(x) & ~np.isfinite(value)))


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


def test_numbers_beyond_float32_are_infinities():
    assert stats([1e300, 1.0], formats.FP8_E4M3).saturated == 0.5


def test_a_dlpack_object_without_more():
    x = np.arange(32, dtype=np.float32)
    exported = type(
        "Exported", (), {name: staticmethod(getattr(x, name)) for name in ("__dlpack__", "__dlpack_device__")}
    )
    assert stats(exported(), formats.MXFP8_E4M3) == stats(x, formats.MXFP8_E4M3)


def test_torch():
    torch = pytest.importorskip("torch")
    x = torch.linspace(-3, 3, 64, dtype=torch.bfloat16, requires_grad=True)
    assert stats(x, formats.NVFP4) == stats(x.detach().float().numpy(), formats.NVFP4)


def test_jax():
    jnp = pytest.importorskip("jax.numpy")
    x = jnp.linspace(-3, 3, 64, dtype=jnp.bfloat16)
    assert stats(x, formats.NVFP4) == stats(np.asarray(x, np.float32), formats.NVFP4)


@pytest.mark.parametrize("x", [["a"], [1j], [None]])
def test_what_is_no_number_is_refused(x):
    with pytest.raises(TypeError, match=r"^stats: x \(.*\) is not an array of real numbers; take its parts$"):
        stats(np.array(x), formats.FP8_E4M3)


def test_usage_is_one_plane():
    for measure in (stats, lambda x, fmt, usage: compare(x, usage=usage)):
        with pytest.raises(ValueError, match=r"is not one plane; ask for Usage.ROWWISE or Usage"):
            measure(np.ones((128, 128)), formats.FP8_E4M3, Usage.BOTH)


def test_formats_that_cannot_hold_x():
    x = np.ones((4, 40))
    assert [s.format.name for s in compare(x)] == ["FP8_E4M3", "FP8_E5M2", "FP8_1x128", "FP8_128x128"]
    with pytest.raises(
        ValueError, match=r"^stats: x \(4, 40\) is not a whole number of 1x32 blocks of MXFP8_E4M3; pad"
    ):
        compare(x, [formats.MXFP8_E4M3])


def test_compare_keeps_the_order():
    chosen = [formats.NVFP4, formats.FP8_E4M3, formats.NVFP4]
    assert [s.format for s in compare(np.ones((16, 16)), iter(chosen))] == chosen


def test_report_as_text():
    pytest.importorskip("rich")
    text = str(report(awkward_values((32, 64), kinds=("normal",)), [formats.FP8_E4M3, FLOOR], title="bell"))
    lines = text.splitlines()
    assert lines[0].strip() == "bell"
    assert "SQNR dB" in text
    assert "MXFP8_E4M3[scale_rounding=floor]" in text
    assert all(line == line.rstrip() for line in lines)


def test_report_says_what_is_left_out():
    pytest.importorskip("rich")
    shown = report(np.ones((32, 48), np.float16))
    assert list(shown.left_out) == [
        name for name, fmt in formats.FORMATS.items() if fmt.scale_dtype == formats.E8M0.name
    ]
    assert "left out: MXFP8_E4M3: x (32, 48) is not" in str(shown)
    assert "32 x 48, float16" in str(shown)
    assert "non-finite" not in str(shown)
    assert "non-finite" in str(report(block(math.nan, 1.0)))


@pytest.mark.parametrize(
    "x", [np.random.default_rng(0).standard_t(3, (128, 128)), np.zeros((16, 16)), np.ones((0, 32))]
)
def test_report_in_a_notebook(x):
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        html = report(x)._repr_html_()
    assert html.startswith("<pre")
    assert "NVFP4_16x16" in html
    assert html.count("data:image/png;base64,iVBOR") == 1


@pytest.mark.parametrize("missing", ["rich", "matplotlib"])
def test_a_missing_package_is_named_with_the_extra(missing, monkeypatch):
    if missing == "matplotlib":
        pytest.importorskip("rich")
    for name in [name for name in sys.modules if name.split(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=rf"^report: {missing} is not installed; pip install 'qshard\[notebooks\]'$"):
        report(np.ones(16), [formats.FP8_E4M3]).figure()
