"""The random Hadamard transform: exact sums, one rounding."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from qshard import formats, reference
from qshard.formats import Usage
from support.awkward import BFLOAT16, TAME, assert_bits_equal, awkward_values

ROTATED = formats.NVFP4.with_options(hadamard=True)


def rotation():
    """`diag(s) @ H16 / 4` by Sylvester's doubling, with the signs of 0xD7E8 spelled out from bit 0."""
    h = np.ones((1, 1))
    while len(h) < 16:
        h = np.block([[h, h], [h, -h]])
    signs = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
    return np.diag(signs) @ h / 4


def test_unit_vectors_give_the_matrix():
    assert_bits_equal(reference.hadamard_transform(np.eye(16)), rotation().astype(np.float32))


def test_rotation_is_orthogonal():
    np.testing.assert_array_equal(rotation() @ rotation().T, np.eye(16))


@pytest.mark.parametrize("kinds", [TAME, ("wide",), ("subnormal",), ("max",)], ids=str)
def test_is_the_exact_sum_rounded_once(kinds):
    """By fractions: no bfloat16 lies nearer to the exact sum, and of two equally near the even one is taken."""
    x = awkward_values((12, 32), seed=1, dtype=BFLOAT16, kinds=kinds)
    y = reference.hadamard_transform(x.astype(np.float32)).reshape(-1, 16)
    limit = 2.0**128
    for block, rotated in zip(x.astype(np.float64).reshape(-1, 16), y, strict=True):
        for j in range(16):
            terms = zip(block, rotation()[:, j], strict=True)
            exact = sum((Fraction(float(a)) * Fraction(float(b)) for a, b in terms), Fraction())
            assert rotated[j] == rotated[j].astype(ml_dtypes.bfloat16)
            code = rotated[j : j + 1].astype(ml_dtypes.bfloat16).view(np.uint16)[0]
            near = np.add(code, [-1, 0, 1]).astype(np.uint16).view(ml_dtypes.bfloat16).astype(np.float64)
            # Infinity stands for 2**128 here: where the next bfloat16 would be.
            near = [np.copysign(min(abs(v), limit), v) if v == v else limit * 4 for v in near]
            below, at, above = (abs(Fraction(v) - exact) for v in near)
            if exact:
                assert at <= min(below, above)
                assert at < min(below, above) or code % 2 == 0 or at == 0
                assert np.signbit(rotated[j]) == (exact < 0)
            else:
                assert rotated[j : j + 1].view(np.uint32)[0] == 0


def test_infinity_and_nan():
    x = np.zeros((4, 16), np.float32)
    x[0, 3], x[1, 3], x[1, 4], x[2, 0] = np.inf, np.inf, np.inf, np.nan
    y = reference.hadamard_transform(x)
    assert np.isinf(y[0]).all()
    assert np.isnan(y[1]).any()
    assert np.isinf(y[1]).any()
    assert_bits_equal(y[2], np.full(16, np.nan, np.float32))
    assert not y[3].any()


def test_columnwise_plane_is_that_of_the_rotated_transpose():
    x = awkward_values((48, 7), seed=2, dtype=BFLOAT16, kinds=TAME)
    q = reference.quantize(x, ROTATED, Usage.COLUMNWISE).columnwise
    rotated = reference.hadamard_transform(x.T.astype(np.float32))
    expected = reference.quantize(rotated, formats.NVFP4).rowwise
    assert_bits_equal(q.data, expected.data)
    assert_bits_equal(q.scale_inv, expected.scale_inv)
    assert_bits_equal(q.global_scale_inv, expected.global_scale_inv)


def test_rowwise_plane_is_not_rotated():
    x = awkward_values((7, 48), seed=2, kinds=TAME)
    assert_bits_equal(reference.quantize(x, ROTATED).rowwise.data, reference.quantize(x, formats.NVFP4).rowwise.data)
