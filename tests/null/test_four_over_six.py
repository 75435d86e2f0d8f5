"""Four over six against a loop over scalars, written from NUMERICS.md and sharing nothing with the reference."""

import ml_dtypes
import numpy as np
import pytest

from qshard import formats, reference
from qshard.reference._planes import block_error
from support.awkward import KINDS, TAME, assert_bits_equal, awkward_values

F = np.float32
FLOAT_MAX = np.finfo(F).max


def e4m3(v):
    return F(ml_dtypes.float8_e4m3fn(v))


def e2m1(v):
    return F(ml_dtypes.float4_e2m1fn(min(max(v, F(-6)), F(6))))


def error_of_block(block, d, multiplier, whole, top, rule):
    """Along a row in order, rows with those 8, 4, 2, 1 below."""
    errors = []
    for row in block:
        total = F(0)
        for x in row:
            difference = e2m1(x * multiplier) * d * whole / top - x
            total = total + (abs(difference) if rule == "mae" else difference * difference)
        errors.append(total)
    while len(errors) > 1:
        half = len(errors) // 2
        errors = [errors[i] + errors[i + half] for i in range(half)]
    return errors[0]


def quantize_block(block, whole, scale_max, rule):
    """The stored scale of one block `[rows, 16]`, finite."""
    top = F(6) * F(scale_max)
    s = min(top / whole, FLOAT_MAX) if whole > 0 else F(1)
    base = np.abs(block).max() / F(6) * s
    results = []
    for target in (F(1.5), F(1)):
        d = e4m3(min(base * target, F(448)))
        decode = d * (F(1) / s)
        multiplier = min(F(1) / decode, FLOAT_MAX) if decode else FLOAT_MAX
        results.append((error_of_block(block, d, multiplier, whole, top, rule), d))
    (error4, d4), (error6, d6) = results
    return d4 if error4 < error6 else d6


@pytest.mark.parametrize("fmt", [formats.NVFP4, formats.NVFP4_16x16], ids=str)
@pytest.mark.parametrize("scale_max", [448.0, 256.0])
@pytest.mark.parametrize("rule", ["mae", "mse"])
@pytest.mark.parametrize("kinds", [TAME, ("normal",), ("wide", "max")], ids=["tame", "normal", "wide"])
def test_choice_of_scale(fmt, scale_max, rule, kinds):
    assert set(kinds) <= set(KINDS)
    x = awkward_values((32, 64), seed=11, kinds=kinds)
    fmt = fmt.with_options(scale_max=scale_max, four_over_six=rule)
    q = reference.quantize(x, fmt)
    rows = fmt.block[0]
    with np.errstate(all="ignore"):
        expected = [
            [quantize_block(x[i : i + rows, j : j + 16], np.abs(x).max(), scale_max, rule) for j in range(0, 64, 16)]
            for i in range(0, 32, rows)
        ]
    assert_bits_equal(reference.decode(q.rowwise.scale_inv, formats.E4M3), np.array(expected, F))


@pytest.mark.parametrize("fmt", [formats.NVFP4, formats.NVFP4_16x16], ids=str)
@pytest.mark.parametrize("rule", ["mae", "mse"])
def test_error_of_a_block_is_summed_in_the_stated_order(fmt, rule):
    """Choices hardly ever hang on the order of a sum, so the sums themselves are compared."""
    x = awkward_values((32, 64), seed=12, kinds=("normal",))
    rows, whole, d, multiplier = fmt.block[0], F(6), F(448), F(0.75)
    shape = (32 // rows, 4)
    errors = block_error(
        x,
        fmt.with_options(four_over_six=rule),
        np.full(shape, multiplier),
        reference.encode(np.full(shape, d), formats.E4M3),
        whole,
    )
    expected = [
        [error_of_block(x[i : i + rows, j : j + 16], d, multiplier, whole, F(2688), rule) for j in range(0, 64, 16)]
        for i in range(0, 32, rows)
    ]
    assert_bits_equal(errors, np.array(expected, F))


def test_both_scales_are_taken():
    """4 suits a block whose next largest element is three quarters of the largest; 6 one with exact sixths."""
    fours = np.array([4, 3, 2, 1] * 4, np.float32)
    sixes = np.array([6, 4, 3, 2] * 4, np.float32)
    x = np.stack([fours, sixes])
    q = reference.quantize(x, formats.NVFP4.with_options(four_over_six="mae"))
    assert reference.unpack(q.rowwise.data).max(axis=1).tolist() == [6, 7]  # The codes of 4 and 6.
