"""Encode and decode single elements by search in the table of all code values."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qshard.formats import E2M1, ElementFormat

Float32 = NDArray[np.float32]
Codes = NDArray[np.uint8]


@functools.cache
def code_values(element: ElementFormat) -> Float32:
    """Return the value of every code, `[2 ** bits]`, computed from the definition of the format."""
    values = [_code_value(code, element) for code in range(2**element.bits)]
    table = np.array(values, np.float32)
    table.flags.writeable = False  # cached: all callers share the array
    return table


def _code_value(code: int, element: ElementFormat) -> float:
    sign, magnitude = divmod(code, 2 ** (element.exponent_bits + element.mantissa_bits))
    exponent, mantissa = divmod(magnitude, 2**element.mantissa_bits)
    fraction = mantissa / 2**element.mantissa_bits
    if magnitude == element.inf_code:
        value = np.inf
    elif magnitude > element.max_code:
        return np.nan
    elif exponent == 0 and element.signed:  # zero and subnormals; E8M0 has neither
        value = 2.0 ** (1 - element.bias) * fraction
    else:
        value = 2.0 ** (exponent - element.bias) * (1 + fraction)
    return -value if sign else value


def decode(codes: ArrayLike, element: ElementFormat) -> Float32:
    """Decode codes, one per uint8. Exact.

    >>> from qshard.formats import E4M3
    >>> decode([0x00, 0x38, 0xFE, 0x7F], E4M3)
    array([   0.,    1., -448.,   nan], dtype=float32)
    """
    return np.asarray(code_values(element)[np.asarray(codes, np.uint8)])


@np.errstate(all="ignore")
def encode(x: ArrayLike, element: ElementFormat) -> Codes:
    """Encode each fp32 `x` to the nearest value, one code per uint8.

    Ties round to the even code. Values beyond `max`, and infinity, saturate to `max`. NaN gives `nan_code`. Zero, and
    values that round to zero, keep their sign.

    >>> from qshard.formats import E2M1
    >>> decode(encode([0.25, 0.75, 2.5, -5.0, 99.0], E2M1), E2M1)
    array([ 0.,  1.,  2., -4.,  6.], dtype=float32)
    """
    x = np.asarray(x, np.float32)
    values = code_values(element)[: element.max_code + 1].astype(np.float64)
    midpoints = (values[:-1] + values[1:]) / 2  # exact in fp64; midpoint i lies between codes i and i + 1
    magnitude = np.abs(x).astype(np.float64)
    code = np.searchsorted(midpoints, magnitude)  # at a midpoint, the lower code
    lower = np.minimum(code, len(midpoints) - 1)
    code += (magnitude == midpoints[lower]) & (lower % 2 == 1)
    return _with_sign(code, x, element)


@np.errstate(all="ignore")
def encode_stochastic(x: ArrayLike, random: ArrayLike) -> Codes:
    """Encode fp32 `x` as E2M1 with stochastic rounding: up with a probability equal to the distance, in 256ths.

    With the step of E2M1 values at `|x|` (0.5 below 2, 1 below 4, else 2) and a random byte `r`:

        t = fl(|x| + step * r / 256);   q = min(floor(t / step) * step, 6), with the sign of x

    NaN gives 0x7. This is the rounding of the `cvt.rs.satfinite.e2m1x4` instruction.

    >>> encode_stochastic([1.25, 1.25], [127, 128])
    array([2, 3], dtype=uint8)
    """
    x, random = np.asarray(x, np.float32), np.asarray(random, np.uint8)
    magnitude = np.abs(x)
    step = np.where(magnitude < 2, np.float32(0.5), np.where(magnitude < 4, np.float32(1), np.float32(2)))
    raised = magnitude + step * (random.astype(np.float32) / np.float32(256))  # the product is exact
    value = np.minimum(np.floor(raised / step) * step, np.float32(E2M1.max))
    return _with_sign(np.searchsorted(code_values(E2M1)[: E2M1.max_code], value), x, E2M1)


def _with_sign(magnitude_code: NDArray[Any], x: Float32, element: ElementFormat) -> Codes:
    signed = magnitude_code + np.signbit(x) * 2 ** (element.bits - 1)
    return np.where(np.isnan(x), element.nan_code, signed).astype(np.uint8)


def pack(codes: Codes) -> Codes:
    """Pack two 4-bit codes per byte along the last axis, the even element in the low nibble.

    >>> pack(np.array([0x1, 0x2, 0x3, 0x4], np.uint8))
    array([33, 67], dtype=uint8)
    """
    return np.asarray(codes[..., 0::2] | codes[..., 1::2] << 4, np.uint8)


def unpack(packed: Codes) -> Codes:
    """Unpack the result of `pack`."""
    return np.stack([packed & 0xF, packed >> 4], axis=-1).reshape(*packed.shape[:-1], 2 * packed.shape[-1])
