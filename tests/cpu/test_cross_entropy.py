"""Cross entropy in both front ends: on a CPU the bits of the reference, on a GPU nearly its values."""

import math

import numpy as np
import pytest

from support import oracle_layers as oracle
from support.awkward import DTYPES, assert_bits_equal, assert_near, awkward_values

RULES = {"plain": {}, "all": {"label_smoothing": 0.1, "z_loss": 1e-2, "ignore_index": 3}}
SHAPES = [((2, 3), 7), ((5,), 1030), ((), 9), ((0, 2), 4), ((3,), 1)]


def drawn(rows, classes, dtype):
    shape = (*rows, classes)
    logits = awkward_values((math.prod(rows), classes), 0, dtype, kinds=("normal", "ties", "wide")).reshape(shape)
    labels = np.random.default_rng(classes).integers(0, classes, rows, np.int32)
    grad = awkward_values((math.prod(rows),), 1, "float32", kinds=("normal",)).reshape(rows)
    return logits, np.asarray(labels), grad


def expected(logits, labels, grad, *, ignore_index=-100, label_smoothing=0.0, z_loss=0.0):
    """Return the loss of each row, and the gradient of logits."""
    rule = {"ignore_index": ignore_index, "smoothing": label_smoothing, "z_loss": z_loss, "classes": logits.shape[-1]}
    with np.errstate(all="ignore"):
        stats = oracle.cross_entropy_stats(logits, labels, first=0, total=label_smoothing > 0)
        loss, lse = oracle.cross_entropy(stats[..., None, :], labels, **rule)
        return loss, oracle.cross_entropy_grad(logits, labels, lse, grad, first=0, **rule)


def step(front, logits, labels, grad, **options):
    """Return the loss, and the gradient of logits."""
    labels = front.array(labels)
    return front.gradients(lambda x: front.qshard.cross_entropy(x, labels, **options), [logits], grad)


def assert_as_expected(front, actual, wanted, *, grad):
    """Bits on a CPU. Exponentials of a GPU are off by up to 2^-22 + 87 * 2^-23, and lse by a unit in its last place."""
    for mine, want in zip(actual, wanted, strict=True):
        if front.device == "cpu":
            assert_bits_equal(mine, want)
        else:
            assert_near(mine, want, rtol=2.0**-16, atol=2.0**-16 * float(np.abs(grad).max(initial=1)))


@pytest.mark.each_value
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_is_the_reference(front, dtype, rule):
    for rows, classes in SHAPES:
        arrays = drawn(rows, classes, dtype)
        actual = step(front, *arrays, reduction="none", **rule)
        assert_as_expected(front, actual, expected(*arrays, **rule), grad=arrays[-1])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_every_row_has_the_gradient_of_the_loss(front, reduction):
    """Gradients have the bits of the reference; the framework sums the losses."""
    logits, labels, _ = drawn((4, 8), 1030, "bfloat16")
    logits = (logits.astype(np.float32) / 1024).astype(logits.dtype)  # The sum of the losses is finite.
    labels[1, 2:5] = -100
    grad = np.float32(0.37)
    loss, d = step(front, logits, labels, grad, reduction=reduction)
    count = np.float32(29 if reduction == "mean" else 1)
    losses, want = expected(logits, labels, np.full(labels.shape, grad / count, np.float32))
    assert_as_expected(front, [d], [want], grad=grad)
    np.testing.assert_allclose(loss, losses.sum(dtype=np.float64) / count, rtol=1e-6)


def test_rows_that_are_all_ignored(front):
    logits, labels, _ = drawn((3,), 7, "float32")
    loss, d = step(front, logits, np.full_like(labels, -100), np.float32(1), reduction="mean")
    assert np.isnan(loss)  # 0 / 0, as in PyTorch.
    assert not np.nan_to_num(d).any()
