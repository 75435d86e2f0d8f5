"""Bounds of products on a GPU against fp64, with their reasons."""

import torch

ROUNDING = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}


def assert_is_product_of_codes(got, x, y, *, fast=False):
    """Assert that `got` is x @ y.T, of fp64 values `[M, K]` and `[N, K]`.

    Hopper's FP8 tensor cores add 32 products at a time in 14 bits, and move that to fp32 every 128 unless `fast`. So
    each product may lose 2^-13 of the largest; each sum before it is moved, 2^-13 of the sum of sizes; then blocks add
    up in fp32, and the result is rounded once, to its dtype.
    """
    k = x.shape[1]
    exact, size = x @ y.T, x.abs() @ y.abs().T
    largest = x.abs().amax(1)[:, None] * y.abs().amax(1)
    sums = max(1, k // 32) if fast else 4
    bound = 2.0**-13 * (k * largest + sums * size) + k * 2.0**-23 * size + ROUNDING[got.dtype] * exact.abs() + 2.0**-24
    error = (got.double() - exact).abs()
    assert (error <= bound).all(), float((error / bound).max())
    # Operands or scales that lie wrongly are off by as much as the result is.
    assert float(error.norm() / exact.norm()) < 2.0**-7


def assert_is_product_of_values(got, a, b):
    """Assert that `got` is a @ b.T, of floats `[M, K]` and `[N, K]`.

    fp32 sums, in any order, also where a long one is split: K roundings of each, and one to the result's dtype. Tensor
    cores keep at least 24 bits of sums of 16-bit products, but cut what they keep: twice a rounding.
    """
    x, y = a.double(), b.double()
    exact, size = x @ y.T, x.abs() @ y.abs().T
    bound = (a.shape[1] + 1) * 2.0**-22 * size + ROUNDING[got.dtype] * exact.abs() + 2.0**-24
    error = (got.double() - exact).abs()
    assert (error <= bound).all(), float((error / bound).max())
