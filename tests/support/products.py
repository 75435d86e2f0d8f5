"""Operands of a linear layer that quantize to all kinds of codes, and the bound that its products are held to."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from support.awkward import awkward_values

DTYPES = [np.float32, ml_dtypes.bfloat16, np.float16]


def operands(shape=(6, 31, 20), out=37, dtype=np.float32, seed=0):
    """x [..., K], w [N, K] and the gradient of y [..., N], with values that quantize to all kinds of codes."""
    # A float16 result overflows where a row of ties meets another.
    kinds = ["normal", "zeros"] if dtype == np.float16 else ["normal", "ties", "zeros", "outlier"]
    x = awkward_values(shape, seed, dtype, kinds=kinds)
    w = awkward_values((out, shape[-1]), seed + 1, dtype, kinds=kinds)
    return x, w, awkward_values((*shape[:-1], out), seed + 2, dtype, kinds=kinds)


def assert_is_product(got, a, b, roundings=1, operand_rounding=0.0):
    """`got == a @ b.T`, but for the order of a sum in fp32, up to K roundings, and `roundings` to the result's dtype.

    `operand_rounding` is of each term, where a front end rounds operands before it multiplies them.
    """
    exact, size = a @ b.T, np.abs(a) @ np.abs(b).T
    rounding = {np.float32: 2.0**-24, ml_dtypes.bfloat16: 2.0**-8, np.float16: 2.0**-10}[got.dtype.type]
    # Below the least normal number of float16, roundings are of the least subnormal.
    least = 2.0**-24
    bound = (a.shape[1] * 2.0**-23 + operand_rounding) * size + roundings * rounding * np.abs(exact) + least
    error = np.abs(got.astype(np.float64).reshape(exact.shape) - exact)
    assert (error <= bound).all(), f"{(error / bound).max()} times the bound"
