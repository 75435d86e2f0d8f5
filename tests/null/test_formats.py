"""Formats against ml_dtypes, and the errors for formats that do not exist."""

import dataclasses
import math

import ml_dtypes
import numpy as np
import pytest

from qshard import formats
from qshard.formats import E2M1, E4M3, E8M0, ELEMENTS, FLOAT16_MAX, FORMATS, NVFP4, Format, Usage
from support.formats import NAMED, OPTIONS, option_names


@pytest.mark.parametrize("element", ELEMENTS.values(), ids=str)
def test_element_is_that_of_ml_dtypes(element):
    info = ml_dtypes.finfo(getattr(ml_dtypes, element.name))
    assert float(info.max) == element.max
    assert info.nexp == element.exponent_bits
    assert info.nmant == element.mantissa_bits
    assert math.floor(math.log2(element.max)) == element.max_exponent
    largest = getattr(ml_dtypes, element.name)(element.max)
    assert int(largest.tobytes()[0]) == element.max_code
    assert element.signed == (element is not E8M0)


@pytest.mark.parametrize("element", ELEMENTS.values(), ids=str)
def test_nan_and_infinity_codes(element):
    """NaN has all bits but the sign, which is the largest number if there is no NaN. Codes decode as in ml_dtypes."""
    values = np.arange(2**element.bits, dtype=np.uint8).view(getattr(ml_dtypes, element.name)).astype(np.float32)
    assert element.nan_code == 2 ** (element.bits - element.signed) - 1
    assert np.isnan(values[element.nan_code]) if element.bits == 8 else values[element.nan_code] == element.max
    infinities = np.flatnonzero(values == np.inf).tolist()
    assert infinities == ([] if element.inf_code is None else [element.inf_code])


def test_float16_is_that_of_numpy():
    assert float(np.finfo(np.float16).max) == FLOAT16_MAX


def test_kernels_have_the_same_numbers():
    """core/format.h is a mirror of qshard/formats.py."""
    built = pytest.importorskip("qshard._ffi").formats()
    for name, element in ELEMENTS.items():
        traits = built.pop(name)
        assert traits.pop("infinity") == (element.inf_code is not None), name
        assert traits == {trait: getattr(element, trait) for trait in traits}, name
    assert built.pop("float16") == {"max": FLOAT16_MAX}
    nvfp4 = built.pop("NVFP4")
    assert NVFP4.block == (1, nvfp4["block"])
    assert NVFP4.with_options(scale_max=nvfp4["small_scale_max"]).scaling.scale_max != NVFP4.scaling.scale_max
    assert not built


@pytest.mark.parametrize("name", FORMATS)
def test_format_has_its_name_and_works_as_a_key(name):
    fmt = FORMATS[name]
    assert getattr(formats, name) is fmt
    assert str(fmt) == name
    assert {fmt: 1}[fmt.with_options()] == 1  # Equal formats made apart are one jit cache entry.


def test_changed_options_show():
    fmt = NVFP4.with_options(four_over_six="mse", scale_max=256.0)
    assert str(fmt) == "NVFP4[scale_max=256.0, four_over_six=mse]"
    assert fmt != NVFP4
    assert str(fmt.with_options(four_over_six=None, scale_max=448.0)) == "NVFP4"


@pytest.mark.parametrize(
    ("fmt", "text"),
    [
        (NVFP4, "NVFP4"),
        (NVFP4.with_options(hadamard=True, nonfinite="nan"), "NVFP4.with_options(hadamard=True, nonfinite='nan')"),
        (formats.FP8_1x128.with_options(element=formats.E5M2), "FP8_1x128.with_options(element=E5M2)"),
        (Format(name="own", element=E4M3), "Format(name='own', element=E4M3)"),
        (Format(name="NVFP4", element=E4M3), "Format(name='NVFP4', element=E4M3)"),
        (formats.TwoLevelScaling(), "TwoLevelScaling()"),
        (formats.PowerScaling(scale_rounding="floor"), "PowerScaling(scale_rounding='floor')"),
        (E4M3, "E4M3"),
        (dataclasses.replace(E4M3, max=240.0), None),
        (Usage.BOTH, "Usage.BOTH"),
    ],
)
def test_repr_is_one_short_line_that_evaluates(fmt, text):
    assert text is None or repr(fmt) == text
    assert eval(repr(fmt), vars(formats)) == fmt


@pytest.mark.parametrize(
    ("fmt", "data", "square", "cuts", "rowwise", "columnwise"),
    [
        (formats.FP8_E5M2, "float8_e5m2", True, True, None, None),
        (formats.FP8_1x128, "float8_e4m3fn", False, True, (1, 128), (128, 1)),
        (formats.FP8_128x128, "float8_e4m3fn", True, True, (128, 128), (128, 128)),
        (formats.MXFP8_E5M2, "float8_e5m2", False, False, (1, 32), (32, 1)),
        (NVFP4, "uint8", False, False, (1, 16), (16, 1)),
    ],
    ids=str,
)
def test_properties(fmt, data, square, cuts, rowwise, columnwise):
    assert (fmt.data_dtype, fmt.shares_codes, not fmt.scaling.whole_blocks) == (data, square, cuts)
    assert (fmt.block_of(Usage.ROWWISE), fmt.block_of(Usage.COLUMNWISE)) == (rowwise, columnwise)


@pytest.mark.parametrize(
    ("fmt", "options"),
    [
        (formats.FP8_E4M3, {"block": (0, 128)}),
        (formats.MXFP8_E4M3, {"block": (1, 16)}),
        (NVFP4, {"block": (1, 32)}),
        (formats.FP8_1x128, {"element": E2M1}),
        (NVFP4, {"element": E4M3}),
        (formats.MXFP8_E4M3, {"block": None}),
        (formats.MXFP8_E4M3, {"pow2": True}),
        (formats.MXFP8_E4M3, {"eps": 0.5}),
        (formats.FP8_E4M3, {"eps": -1.0}),
        (formats.FP8_E4M3, {"eps": math.inf}),
        (formats.FP8_E4M3, {"scale_rounding": "floor"}),
        (formats.MXFP8_E4M3, {"scale_rounding": "nearest"}),
        (formats.FP8_E4M3, {"global_scale": "tensor"}),
        (NVFP4, {"global_scale": None}),
        (formats.NVFP4_16x16, {"global_scale": "row"}),
        (NVFP4, {"scale_max": 128.0}),
        (formats.FP8_E4M3, {"scale_max": 256.0}),
        (formats.MXFP8_E4M3, {"four_over_six": "mae"}),
        (NVFP4, {"four_over_six": "max"}),
        (formats.NVFP4_16x16, {"hadamard": True}),
        (formats.FP8_E4M3, {"rounding": "stochastic"}),
        (NVFP4, {"four_over_six": "mae", "rounding": "stochastic"}),
        (NVFP4, {"four_over_six": "mae", "hadamard": True}),
    ],
    ids=lambda value: str(value),
)
def test_impossible_format_is_an_error_that_names_the_option(fmt, options):
    with pytest.raises(ValueError, match=r"Format .* (must be|has no option)") as error:
        fmt.with_options(**options)
    assert any(option in str(error.value) for option in options)


def test_formats_are_keyword_only():
    with pytest.raises(TypeError):
        Format("FP8", E4M3)


@pytest.mark.parametrize("fmt", NAMED, ids=str)
def test_tests_know_every_option(fmt):
    """support/formats.py lists values of each, so that no option goes without tests."""
    assert set(option_names(fmt)) <= OPTIONS.keys()
