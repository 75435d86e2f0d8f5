"""Every code decoded, and every input at which an encoder could go wrong, against ml_dtypes and the stated rules."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qshard import reference
from qshard.formats import E2M1, ELEMENTS
from support.awkward import assert_bits_equal, ties_and_neighbours

FLOAT_ELEMENTS = [element for element in ELEMENTS.values() if element.signed]


def all_bfloat16():
    return np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)


@pytest.mark.parametrize("element", ELEMENTS.values(), ids=str)
def test_decode_every_code(element):
    codes = np.arange(2**element.bits, dtype=np.uint8)
    expected = codes.view(getattr(ml_dtypes, element.name)).astype(np.float32)
    expected = np.where(np.isnan(expected), np.float32(np.nan), expected)
    assert_bits_equal(reference.decode(codes, element), expected)


@pytest.mark.parametrize("element", FLOAT_ELEMENTS, ids=str)
@pytest.mark.parametrize("inputs", ["bfloat16", "ties"])
def test_encode_is_nearest_even_and_saturates(element, inputs):
    if inputs == "bfloat16":
        x = all_bfloat16()
    else:
        x = ties_and_neighbours(element.name)
        x = np.concatenate([x, -x])
    # ml_dtypes rounds to nearest even. Where it has no rule in common with ours the input is replaced by the rule.
    clipped = np.clip(np.where(np.isnan(x), 0, x), -element.max, element.max)
    expected = clipped.astype(getattr(ml_dtypes, element.name)).view(np.uint8)
    expected = np.where(np.isnan(x), element.nan_code, expected)
    assert_bits_equal(reference.encode(x, element), expected.astype(np.uint8))


@pytest.mark.parametrize("element", FLOAT_ELEMENTS, ids=str)
def test_encode_midpoints_go_to_the_even_code(element):
    """The rule in another way: the midpoint of codes i and i + 1 goes to the even one, its neighbours to the nearer."""
    i = np.arange(element.max_code)
    values = reference.decode(np.arange(element.max_code + 1), element)
    middle = (values[:-1].astype(np.float64) + values[1:]).astype(np.float32) / np.float32(2)
    assert_bits_equal(reference.encode(middle, element), (i + i % 2).astype(np.uint8))
    assert_bits_equal(reference.encode(np.nextafter(middle, np.float32(0)), element), i.astype(np.uint8))
    assert_bits_equal(reference.encode(np.nextafter(middle, np.float32(np.inf)), element), (i + 1).astype(np.uint8))


def test_encode_e2m1_table():
    """NUMERICS.md's table of ties."""
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    assert reference.decode(reference.encode(ties, E2M1), E2M1).tolist() == [0, 1, 1, 2, 2, 4, 4]


@pytest.mark.parametrize("element", FLOAT_ELEMENTS, ids=str)
def test_encode_special_values(element):
    sign = 2 ** (element.bits - 1)
    tiny = np.finfo(np.float32).smallest_subnormal
    x = np.array([0.0, -0.0, tiny, -tiny, np.inf, -np.inf, 3e38, -3e38, np.nan, -np.nan], np.float32)
    top = element.max_code
    expected = [0, sign, 0, sign, top, top + sign, top, top + sign, element.nan_code, element.nan_code]
    assert reference.encode(x, element).tolist() == expected


@pytest.mark.parametrize("element", FLOAT_ELEMENTS, ids=str)
def test_encode_inverts_decode(element):
    codes = np.array([c for c in range(2**element.bits) if c % 2 ** (element.bits - 1) <= element.max_code], np.uint8)
    assert_bits_equal(reference.encode(reference.decode(codes, element), element), codes)


@given(st.floats(width=32), st.floats(width=32), st.sampled_from(FLOAT_ELEMENTS))
def test_encode_keeps_order(a, b, element):
    a, b = sorted([a, b]) if a == a and b == b else (0.0, 0.0)
    low, high = reference.decode(reference.encode([a, b], element), element)
    assert low <= high


def test_pack_puts_the_even_element_low():
    codes = np.random.default_rng(0).integers(16, size=(3, 8), dtype=np.uint8)
    packed = reference.pack(codes)
    assert packed[1, 2] & 0xF == codes[1, 4]
    assert packed[1, 2] >> 4 == codes[1, 5]
    assert_bits_equal(reference.unpack(packed), codes)
