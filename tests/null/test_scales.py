"""Scales from amax: special values by hand, and the rest against a second transcription of the rules."""

import numpy as np
import pytest

from qshard import formats, reference
from qshard.formats import E4M3, E8M0, FloatScaling, PowerScaling
from support.awkward import assert_bits_equal

FLOAT_MAX = np.finfo(np.float32).max
TINY = np.finfo(np.float32).smallest_subnormal


def every_kind_of_amax():
    """All non-negative bfloat16, and random fp32 patterns up to NaN."""
    bfloat16 = np.arange(2**15, dtype=np.uint32) << 16
    random = np.random.default_rng(0).integers(2**31, size=2**15, dtype=np.uint32)
    return np.concatenate([bfloat16, random, bfloat16[:-1] + 1, bfloat16[1:] - 1]).view(np.float32)


def test_amax_of_patterns():
    assert_bits_equal(reference.amax(np.array([-3.0, 2.0, -0.0], np.float32)), np.float32(3))
    assert_bits_equal(reference.amax(np.zeros((0, 4))), np.float32(0))
    assert_bits_equal(reference.amax(np.zeros((2, 0)), axis=1), np.zeros(2, np.float32))
    assert_bits_equal(reference.amax([-0.0]), np.float32(0))
    assert_bits_equal(reference.amax([1.0, -np.inf]), np.float32(np.inf))
    odd_nan = np.array([0xFFC12345], np.uint32).view(np.float32)
    assert_bits_equal(reference.amax(np.concatenate([odd_nan, [np.float32(np.inf)]])), np.float32(np.nan))


def test_block_amax_of_cut_blocks():
    x = np.array([[1, -2, 3], [4, 5, -6], [7, 8, 9]], np.float32)
    assert_bits_equal(reference.block_amax(x, (2, 2)), np.array([[5, 6], [8, 9]], np.float32))
    assert reference.block_amax(np.zeros((0, 5), np.float32), (1, 2)).shape == (0, 3)


@pytest.mark.parametrize("element", FloatScaling.elements, ids=str)
@pytest.mark.parametrize("pow2", [False, True])
def test_scale_from_amax_special_values(element, pow2):
    scale, scale_inv = reference.scale_from_amax([0.0, np.inf, np.nan, TINY, element.max], element, pow2=pow2)
    largest = np.float32(2.0**127) if pow2 else FLOAT_MAX
    assert_bits_equal(scale, np.array([1, 1, 1, largest, 1], np.float32))
    assert_bits_equal(scale_inv, np.array([1, 1, 1, np.float32(1) / largest, 1], np.float32))
    assert scale_inv[3] > 0  # Subnormal, not flushed.


def test_eps_is_the_least_amax():
    scale, _ = reference.scale_from_amax([0.0, 0.25, 1.0, np.nan], E4M3, eps=0.5)
    assert scale.tolist() == [896, 896, 448, 1]


@pytest.mark.parametrize("element", FloatScaling.elements, ids=str)
def test_pow2_scale_is_the_largest_that_does_not_saturate(element):
    amax = every_kind_of_amax()
    amax = amax[(amax > 1e-30) & (amax < 1e30)]
    scale, scale_inv = reference.scale_from_amax(amax, element, pow2=True)
    exact = amax.astype(np.float64)
    assert (np.frexp(scale)[0] == 0.5).all()
    assert (exact * scale <= element.max).all()
    # fl(max / amax) may round up to a power of two, and only then is twice the scale still too small by that rounding.
    assert (exact * scale * 2 > element.max * (1 - 2.0**-23)).all()
    assert_bits_equal(scale * scale_inv, np.ones_like(scale))


@pytest.mark.parametrize("element", PowerScaling.elements, ids=str)
def test_e8m0_up_is_the_bit_rule(element):
    """NUMERICS.md's rule on the bits of v = fl(amax * fl(1 / max)); the reference searches a table of powers."""
    amax = every_kind_of_amax()
    with np.errstate(invalid="ignore"):  # Signaling NaN.
        v = (amax * (np.float32(1) / np.float32(element.max))).view(np.uint32)
    exponent, mantissa = v >> 23, v & 0x7FFFFF
    up = (mantissa > 0) & (exponent != 254) & ~((exponent == 0) & (mantissa <= 0x400000))
    expected = np.where(np.isnan(amax), 255, np.where(np.isinf(amax), 254, exponent + up)).astype(np.uint8)
    assert_bits_equal(reference.e8m0_from_amax(amax, element), expected)


@pytest.mark.parametrize("element", PowerScaling.elements, ids=str)
def test_e8m0_floor_is_the_bit_rule(element):
    amax = every_kind_of_amax()
    exponent = (amax.view(np.uint32) >> 23).astype(np.int64)
    expected = np.maximum(exponent - element.max_exponent, 0)
    expected = np.where(np.isnan(amax), 255, np.where(np.isinf(amax), 254, expected)).astype(np.uint8)
    assert_bits_equal(reference.e8m0_from_amax(amax, element, rounding="floor"), expected)


@pytest.mark.parametrize("element", PowerScaling.elements, ids=str)
def test_e8m0_up_never_saturates(element):
    amax = every_kind_of_amax()
    amax = amax[np.isfinite(amax)]
    scale_inv = reference.decode(reference.e8m0_from_amax(amax, element), E8M0).astype(np.float64)
    # fl(1 / max) and the product round, so a block may pass max by those roundings, and its amax still encodes to max.
    assert (amax.astype(np.float64) <= element.max * scale_inv * (1 + 2.0**-22)).all()


@pytest.mark.parametrize("scale_max", [448.0, 256.0])
def test_nvfp4_global_scale(scale_max):
    fmt = formats.NVFP4.with_options(scale_max=scale_max)
    amax = np.array([0, np.inf, np.nan, TINY, 6 * scale_max, 1], np.float32)
    expected = np.array([1, 1, 1, FLOAT_MAX, 1, 6 * scale_max], np.float32)
    assert_bits_equal(reference.nvfp4_global_scale(amax, fmt), expected)


def test_nvfp4_block_scale_order_of_operations():
    """fl(block * fl(S * fl(1/6))), by hand, on amaxes where dividing first would give another byte."""
    one, six, whole = np.float32(1), np.float32(6), np.float32(1.5)
    block = np.arange(0x3000, 0x3FC1, dtype=np.uint32)  # The bfloat16 numbers up to 1.5.
    block = (block << 16).view(np.float32)[None]
    scale = np.float32(2688) / whole
    ours = reference.encode(np.minimum(block * (scale * (one / six)), np.float32(448)), E4M3)
    other = reference.encode(np.minimum(block / six * scale, np.float32(448)), E4M3)
    assert (ours != other).any()
    scales = reference.scales_from_amax(reference.Amax(whole, block), formats.NVFP4)
    assert_bits_equal(scales.scale_inv, ours)
    assert_bits_equal(scales.global_scale_inv, one / scale)
    d = reference.decode(ours, E4M3)
    with np.errstate(divide="ignore"):
        assert_bits_equal(scales.multiplier, np.minimum(one / (d * (one / scale)), FLOAT_MAX))


def test_nvfp4_special_blocks():
    block = np.array([[0.0, 1e-30, np.nan, np.inf, 1.0]], np.float32)
    scales = reference.scales_from_amax(reference.Amax(np.float32(1), block), formats.NVFP4)
    assert scales.scale_inv.tolist() == [[0x00, 0x00, 0x7F, 0x7E, 0x7E]]
    assert_bits_equal(scales.multiplier[0, :3], np.array([FLOAT_MAX, FLOAT_MAX, np.nan], np.float32))


def test_merge_of_amaxes():
    a = reference.Amax(np.float32(1), np.array([[1, np.nan]], np.float32))
    b = reference.Amax(np.float32(2), np.array([[0, 5]], np.float32))
    for merged in (a.merge(b), b.merge(a)):
        assert_bits_equal(merged.whole, np.float32(2))
        assert_bits_equal(merged.block, np.array([[1, np.nan]], np.float32))


def delayed_by_loop(amaxes, length, max_value, margin, algorithm):
    """The rule of one tensor with Python lists: the scale after each step."""
    window, scale, scales = [np.float32(0)] * length, np.float32(1), []
    for last in amaxes:
        if last != 0:
            window = [*window, last][-length:]
            a = last if algorithm == "most_recent" else max(window, key=lambda v: np.abs(v).view(np.uint32))
            if np.isfinite(a):
                with np.errstate(over="ignore"):
                    scale = min(np.float32(max_value) * np.float32(2.0**-margin) / a, FLOAT_MAX)
        scales.append(scale)
    return np.array(scales, np.float32), np.array(window, np.float32)


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("margin", [0, 2])
def test_delayed_scale_update(algorithm, length, margin):
    """Two tensors at once, through zero, infinite, NaN and vanishing amaxes."""
    steps = np.array([0, 3, 7, 0, np.inf, 2, 1, np.nan, 5, 4, 1e-44, 8, 0.3, 0.7, 0], np.float32)
    steps = np.stack([steps, steps[::-1]], axis=1)
    scale, history = np.ones(2, np.float32), np.zeros((2, length), np.float32)
    scales = []
    for amax in steps:
        scale, history = reference.delayed_scale_update(scale, history, amax, E4M3, margin=margin, algorithm=algorithm)
        scales.append(scale)
    for tensor in range(2):
        expected, window = delayed_by_loop(steps[:, tensor], length, E4M3.max, margin, algorithm)
        assert_bits_equal(np.array(scales)[:, tensor], expected)
        assert_bits_equal(history[tensor], window)


def test_delayed_scale_stays_in_a_step_without_amax():
    scale, history = reference.delayed_scale_update(5.0, [1.0, 2.0], 0.0, E4M3)
    assert_bits_equal(scale, np.float32(5))
    assert_bits_equal(history, np.array([1, 2], np.float32))
