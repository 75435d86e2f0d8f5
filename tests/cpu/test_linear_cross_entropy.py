"""`linear_cross_entropy` of both front ends: losses and gradients are those of a product and `cross_entropy`."""

import numpy as np
import pytest

from support.awkward import DTYPES
from support.pairs import pairs

RULE = {"label_smoothing": 0.1, "z_loss": 1e-3}
ROWS, K, CLASSES = (8, 4), 32, 208


def drawn(dtype):
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(*ROWS, K)).astype(dtype), (rng.normal(size=(CLASSES, K)) / 5).astype(dtype)
    labels = rng.integers(0, CLASSES, ROWS).astype(np.int32)
    labels[0, 0], labels[1, 2] = -100, CLASSES - 1
    return x, w, labels


@pytest.mark.each_value
@pairs(dtype=DTYPES, reduction=["mean", "sum", "none"], chunk=[None, 1, 5, 8, 100])
def test_is_the_two_calls(front, dtype, reduction, chunk):
    x, w, labels = drawn(dtype)
    labels, options = front.array(labels), {"reduction": reduction, **RULE}
    grad = np.full(ROWS if reduction == "none" else (), 0.5, np.float32)
    one = lambda x, w: front.qshard.linear_cross_entropy(x, w, labels, chunk=chunk, **options)  # noqa: E731
    two = lambda x, w: front.qshard.cross_entropy(x @ w.T, labels, **options)  # noqa: E731
    # Products of fewer rows may add in another order, so a logit may be rounded to its neighbour.
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == np.float32 else {"rtol": 2e-2, "atol": 2e-3}
    if dtype == np.float32 and front.device == "cuda":  # XLA multiplies in TF32, of 11 bits, but not a single row.
        close = {"rtol": 1e-2, "atol": 1e-3}
    for got, want in zip(*(front.gradients(call, (x, w), grad, exact=False) for call in (one, two)), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), **close)


def test_float16_takes_a_loss_that_is_scaled_up(front):
    """A gradient of 2^-30 is no float16; times 2^20 it is."""
    x, w = np.ones((1, 1), np.float16), np.array([[20.0], [0.0]], np.float16)
    labels = front.array(np.array([0], np.int32))
    loss = lambda x, w: front.qshard.linear_cross_entropy(x, w, labels)  # noqa: E731
    _, _, of_w = front.gradients(loss, (x, w), np.float32(2.0**20), exact=False)
    assert of_w[1, 0] == pytest.approx(2.0**20 * 2.0611537e-09, rel=2e-3)


def test_no_rows(front):
    x, w, labels = np.zeros((0, K), np.float32), np.ones((4, K), np.float32), front.array(np.zeros(0, np.int32))
    call = lambda x, w: front.qshard.linear_cross_entropy(x, w, labels, reduction="sum")  # noqa: E731
    loss, dx, dw = front.gradients(call, (x, w), np.float32(0.5), exact=False)
    assert (float(loss), dx.shape, dw.any()) == (0, (0, K), False)
