"""SwiGLU and RMSNorm with the bits of the kernels: fp32, in a fixed order of operations."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qshard.reference._elements import Float32

SUM_LANES, LANES_OF_THREAD, LANES_OF_WARP = 1024, 8, 256
"""Partial sums of a row, and the sizes of the first two groups that are added."""
SUM_ROWS, ROW_LANES = 16, 16  # rows in a part of a sum over rows, and partial sums of parts

ONE = np.float32(1)
_LEAST, _MOST = np.float32(-87), np.float32(80)
_LOG2E, _INTEGER = np.float32(float.fromhex("0x1.715476p+0")), np.float32(3 * 2**22)
_REST = np.float32(float.fromhex("0x1.4ae0cp-26"))  # log2(e) - _LOG2E
_POLYNOMIAL = [
    np.float32(float.fromhex(number))
    for number in ("0x1.5bba14p-10", "0x1.3cea88p-7", "0x1.c6b752p-5", "0x1.ebf9bcp-3", "0x1.62e42ap-1", "0x1p0")
]


def fma(a: Float32 | np.float32, b: Float32 | np.float32, c: Float32 | np.float32) -> Float32:
    """Compute `a * b + c` with one rounding.

    The product is exact in fp64. The fp64 sum is rounded to odd: if it is inexact, its last bit is set, so the final
    rounding to fp32 resolves ties in the direction of the exact sum.

    >>> a, c = np.float32(1 + 2**-12), np.float32(2**-30)
    >>> bool(fma(a, a, c) == a * a), bool(fma(a, a, np.float32(0)) == a * a)
    (False, True)
    """
    product, other = np.asarray(a, np.float64) * np.asarray(b, np.float64), np.asarray(c, np.float64)
    total = product + other
    back = total - product
    rest = (product - (total - back)) + (other - back)
    bits = np.ascontiguousarray(total).view(np.int64)
    # If the sum is inexact and its last bit is 0, step toward the exact sum, which sets the bit.
    step = np.where((rest > 0) == (total > 0), 1, -1)
    odd = bits + np.where((bits & 1 == 0) & (rest != 0) & np.isfinite(total), step, 0)
    result: Float32 = odd.view(np.float64).reshape(total.shape).astype(np.float32)
    return result


def exp_in_parts(y: Float32, *, rest: bool) -> tuple[Float32, NDArray[np.int32]]:
    """Compute e^y as 2^f * 2^n: return 2^f from a polynomial, and n shifted into the exponent field as int32.

    With `rest`, f includes the part of log2(e) that fp32 lacks. Without it, e^y is off by up to 20 ulp.
    """
    shifted = fma(y, _LOG2E, _INTEGER)
    f = fma(y, _LOG2E, -(shifted - _INTEGER))
    if rest:
        f = fma(y, _REST, f)
    p: Float32 = np.broadcast_to(_POLYNOMIAL[0], f.shape)
    for coefficient in _POLYNOMIAL[1:]:
        p = fma(p, f, coefficient)
    return np.ascontiguousarray(p), np.ascontiguousarray(shifted).view(np.int32) << 23


def sigmoid(x: Float32) -> Float32:
    """Compute 1 / (1 + e^-x) with an error of at most 3.31 ulp."""
    y = np.where(x < _LEAST, _LEAST, np.where(x > _MOST, _MOST, x))
    fraction, power = exp_in_parts(-y, rest=True)
    e = (fraction.view(np.int32) + power).view(np.float32)
    result: Float32 = np.where(x < _LEAST, np.float32(0), ONE / (ONE + e.reshape(x.shape)))
    return result


def swiglu(gate: Float32, up: Float32) -> Float32:
    """Compute silu(gate) * up in fp32."""
    result: Float32 = gate * sigmoid(gate) * up
    return result


def swiglu_grad(gate: Float32, up: Float32, grad: Float32) -> tuple[Float32, Float32]:
    """Compute the gradients of gate and up in fp32, given the gradient of `swiglu(gate, up)`."""
    s = sigmoid(gate)
    return grad * up * (s * fma(gate, ONE - s, ONE)), grad * (gate * s)


def row_sum(a: Float32, b: Float32) -> Float32:
    """Sum `a * b` over the last axis of matrices `[M, K]` in the order of the kernels: in lanes, then in halves."""
    rows, columns = a.shape
    lanes = np.zeros((rows, SUM_LANES), np.float32)
    for begin in range(0, columns, SUM_LANES):
        width = min(SUM_LANES, columns - begin)
        lanes[:, :width] = fma(a[:, begin : begin + width], b[:, begin : begin + width], lanes[:, :width])
    warps = lanes.reshape(rows, SUM_LANES // LANES_OF_WARP, LANES_OF_WARP // LANES_OF_THREAD, LANES_OF_THREAD)
    return halves(halves(halves(warps)))


def rms_norm(x: Float32, weight: Float32, eps: float) -> tuple[Float32, Float32]:
    """Compute `x * rstd * weight` per row in fp32, with rstd = 1 / sqrt(mean(x^2) + eps). Returns both."""
    mean = row_sum(x, x) / np.float32(x.shape[1])
    rstd = ONE / np.sqrt(mean + np.float32(eps))
    return x * rstd[:, None] * weight, rstd


def rms_norm_grad(
    x: Float32, weight: Float32, rstd: Float32, grad: Float32
) -> tuple[Float32, Float32, NDArray[np.float32]]:
    """Compute the gradients of x and weight in fp32, and the partial sums of the weight gradient."""
    hat, rows = x * rstd[:, None], x.shape[0]
    along = row_sum(grad * weight, hat) / np.float32(x.shape[1])
    dx = rstd[:, None] * (grad * weight - hat * along[:, None])
    parts = np.zeros((-(-rows // SUM_ROWS), x.shape[1]), np.float32)
    for m in range(rows):
        parts[m // SUM_ROWS] = fma(grad[m], hat[m], parts[m // SUM_ROWS])
    lanes = np.zeros((ROW_LANES, x.shape[1]), np.float32)
    for part, sums in enumerate(np.where(np.isnan(parts), np.float32(np.nan), parts)):
        lanes[part % ROW_LANES] = lanes[part % ROW_LANES] + sums
    return dx, halves(lanes.T), parts


def halves(x: Float32) -> Float32:
    """Sum over the last axis, of a power-of-two length, by repeatedly adding its upper half to its lower half."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    result: Float32 = x[..., 0]
    return result
