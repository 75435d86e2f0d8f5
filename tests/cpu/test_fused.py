"""SwiGLU and RMSNorm of both front ends: results and gradients have the bits of the reference."""

import numpy as np
import pytest

from qshard.reference import _activation as activation
from support import oracle_layers as oracle
from support.awkward import DTYPES, assert_bits_equal, awkward_values
from support.oracle_parts import rounded
from support.pairs import each_value

KINDS = ("normal", "ties", "wide", "max")
EPS = 1e-5


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5, 40), (0, 8), (1030,), (2, 129)])
def test_swiglu(front, shape, dtype):
    gate, up, grad = (awkward_values(shape, seed, dtype, kinds=KINDS) for seed in range(3))
    made = front.gradients(front.qshard.swiglu, (gate, up), grad)
    with np.errstate(all="ignore"):
        want = oracle.swiglu(gate, up, lead=0)[0], *oracle.swiglu_grad(gate, up, grad, lead=0)[:2]
    for name, got, expected in zip(("h", "gradient of gate", "gradient of up"), made, want, strict=True):
        assert_bits_equal(got, expected, name)


@pytest.mark.each_value
@each_value(
    shape=[(3, 5, 40), (2, 9, 40), (0, 8), (129,), (1, 1, 33), (37, 256), (17, 1100), (300, 3)],
    dtype=DTYPES,
    weight_dtype=DTYPES,
)
def test_rms_norm(front, shape, dtype, weight_dtype):
    x, grad = (awkward_values(shape, seed, dtype, kinds=KINDS) for seed in range(2))
    weight = awkward_values(shape[-1:], 2, weight_dtype, kinds=KINDS)
    y, dx, dweight = front.gradients(lambda x, weight: front.qshard.rms_norm(x, weight, EPS), (x, weight), grad)
    rows = (x.size // shape[-1], shape[-1])
    with np.errstate(all="ignore"):
        want, rstd, _ = oracle.rms_norm(x, weight, eps=EPS, lead=0)
        given = (x.reshape(rows), weight, rstd.reshape(-1), grad.reshape(rows))
        of_x, of_weight, _ = oracle.rms_norm_grad(*given, lead=0, rows=activation.SUM_ROWS)
        of_weight = rounded(of_weight, weight.dtype)
    assert_bits_equal(y, want, "y")
    assert_bits_equal(dx, of_x.reshape(shape), "gradient of x")
    # The framework rounds the sum to the dtype of the weight, and has another NaN.
    assert_bits_equal(*(np.where(np.isnan(each), np.nan, each.astype(np.float32)) for each in (dweight, of_weight)))
