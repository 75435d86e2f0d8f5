"""The sigmoid of SwiGLU: within the error bound of NUMERICS.md, and with equal bits in kernels and reference."""

import numpy as np
import pytest

from qshard.reference._activation import sigmoid

MOST = 3.31
"""Units in the last place. Over all fp32 numbers the largest error is 3.3004, at -0x1.0c54cep+4."""
WORST = float.fromhex("-0x1.0c54cep+4")


def dense_points():
    """A million fp32 numbers from -87 to 100, evenly spaced in their bits, and all near the worst one and -87."""
    bits = [np.linspace(0, np.float32(end).view(np.int32), 2**19, dtype=np.int64).astype(np.int32) for end in (100, 87)]
    near = [np.float32(x).view(np.int32) + np.arange(-(2**14), 2**14, dtype=np.int32) for x in (WORST, -86.5)]
    last = np.float32(-87).view(np.int32) - np.arange(2**14, dtype=np.int32)
    return np.concatenate([bits[0], bits[1] | np.int32(-(2**31)), *near, last]).view(np.float32)


def test_the_error_is_within_its_bound():
    x = dense_points()
    with np.errstate(over="ignore"):
        want = 1 / (1 + np.exp(-x.astype(np.float64)))
    off = np.abs(sigmoid(x) - want) / np.ldexp(1.0, np.frexp(want)[1] - 24)
    assert off.max() <= MOST
    assert off.max() > MOST - 0.01  # The bound is tight.


def test_kernels_and_reference_have_equal_bits():
    _ffi = pytest.importorskip("qshard._ffi")
    x = dense_points()
    h, amax = np.empty_like(x), np.empty((), np.float32)
    _ffi.call("swiglu", (x, np.ones_like(x)), (h, amax), {"lead": 0})
    np.testing.assert_array_equal(h.view(np.int32), (x * sigmoid(x)).view(np.int32))
