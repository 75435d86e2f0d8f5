"""Newton-Schulz of Muon in float64, and a bound on the errors of bfloat16 and FP8."""

import numpy as np

COEFFICIENTS = (3.4445, -4.775, 2.0315)
STEPS = 5


def draw_matrices(shape):
    """Return standard normal float32 values that are bfloat16."""
    values = np.random.default_rng(0).standard_normal(shape, np.float32)
    return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def assert_near_float64(found, x, fp8_steps):
    """Check the relative error of orthogonalized matrices `[N, K]` or `[E, N, K]` in the Frobenius norm.

    In bfloat16 each of 5 steps rounds three results by at most 2^-9. A step in FP8 computes a X + B X, and only B X has
    operands in E4M3, each rounded by at most 2^-4. So it adds 2 * 2^-4 |B X| / |a X + B X|: little in the first steps,
    where B X is small, and much in the last ones.
    """
    a, b, c = COEFFICIENTS
    y = x.astype(np.float64)
    y = y.mT if (is_tall := y.shape[-2] > y.shape[-1]) else y
    y = y / np.linalg.norm(y, axis=(-2, -1), keepdims=True)
    bound = 3 * STEPS * 2**-9
    for step in range(STEPS):
        gram = y @ y.mT
        change = (b * gram + c * gram @ gram) @ y
        y = a * y + change
        if step < fp8_steps:
            bound += 2 * 2**-4 * np.linalg.norm(change) / np.linalg.norm(y)
    y = y.mT if is_tall else y
    error = np.linalg.norm(found.astype(np.float64) - y) / np.linalg.norm(y)
    assert error < bound
    return error
