"""SwiGLU, RMSNorm, sums of rows and cross entropy of `support/oracle.py`."""

from __future__ import annotations

import math

import numpy as np

from qshard.reference import _activation as activation
from qshard.reference import _cross_entropy as cross_entropy_reference
from qshard.reference import _rows as rows_reference
from support.oracle_parts import rounded, transposed, wide
from support.oracle_tensors import amax_tensor, cast_tensor


def swiglu(gate, up, *, lead):
    h = rounded(activation.swiglu(wide(gate), wide(up)), gate.dtype)
    return h, amax_tensor(h, lead=lead)


def swiglu_cast_t(gate, up, scale, *, element):
    return transposed(cast_tensor(swiglu(gate, up, lead=0)[0], scale, element=element))


def swiglu_grad(gate, up, grad, *, lead):
    both = [rounded(x, gate.dtype) for x in activation.swiglu_grad(wide(gate), wide(up), wide(grad))]
    return *both, *(amax_tensor(x, lead=lead) for x in both)


def swiglu_gate_up(gate_up, *, lead):
    return swiglu(gate_up[..., 0, :], gate_up[..., 1, :], lead=lead)


def swiglu_gate_up_grad(gate_up, grad, *, lead):
    both = swiglu_grad(gate_up[..., 0, :], gate_up[..., 1, :], grad, lead=lead)[:2]
    made = np.stack(both, axis=-2)
    return made, amax_tensor(made, lead=lead)


def combine_rows(y, positions, weights):
    return rounded(rows_reference.combine_rows(wide(y), positions.view(np.int32), weights), y.dtype)


def combine_rows_grad(y, tokens, weights, grad):
    dy, dweights = rows_reference.combine_rows_grad(wide(y), tokens.view(np.int32), weights, wide(grad))
    dy = rounded(dy, y.dtype)
    return dy, rounded(dweights, "float32"), amax_tensor(dy, lead=1)


def rms_norm(x, weight, *, eps, lead):
    def one(x, weight):
        return activation.rms_norm(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), weight, eps)

    made = [one(wide(x)[i], wide(weight)[i]) for i in np.ndindex(x.shape[:lead])]
    y = rounded(np.array([y for y, _ in made], np.float32).reshape(x.shape), x.dtype)
    rstd = np.array([rstd for _, rstd in made], np.float32).reshape(x.shape[:-1])
    return y, rounded(rstd, "float32"), amax_tensor(y, lead=lead)


def rms_norm_grad(x, weight, rstd, grad, *, lead, rows):
    assert rows == activation.SUM_ROWS
    each_lead = np.ndindex(x.shape[:lead])
    made = [activation.rms_norm_grad(wide(x)[i], wide(weight)[i], rstd[i], wide(grad)[i]) for i in each_lead]
    shapes = [x.shape, weight.shape, (*x.shape[:lead], -(-x.shape[-2] // rows), x.shape[-1])]
    dtypes = [x.dtype, "float32", "float32"]
    each = [[result[k] for result in made] for k in range(len(shapes))]
    return tuple(
        rounded(np.array(of, np.float32).reshape(shape), dtype)
        for of, shape, dtype in zip(each, shapes, dtypes, strict=True)
    )


# --- cross entropy ---


def cross_entropy_stats(logits, labels, *, first, total):
    x, labels = wide(logits).reshape(labels.size, logits.shape[-1]), labels.reshape(-1).view(np.int32)
    found = cross_entropy_reference.row_stats(x, total=total)
    columns = labels.astype(np.int64) - first
    here = (columns >= 0) & (columns < x.shape[1])
    logit = np.zeros(len(x), np.float32)
    logit[here] = x[here, columns[here]]
    stats = np.stack([found[0], found[1], logit, found[2]], axis=-1)
    return rounded(stats.reshape(*logits.shape[:-1], 4), "float32")


def cross_entropy(stats, labels, **rule):
    stats, shape = stats.reshape(labels.size, stats.shape[-2], 4), labels.shape
    found, logit = cross_entropy_reference.no_logits(len(stats)), np.zeros(len(stats), np.float32)
    for part in range(stats.shape[1]):
        each = stats[:, part]
        found = cross_entropy_reference.merge(found, (each[:, 0], each[:, 1], each[:, 3]))
        logit = logit + each[:, 2]
    made = cross_entropy_reference.losses(found, logit, labels.reshape(-1).view(np.int32), **rule)
    return tuple(rounded(each, "float32").reshape(shape) for each in made)


def cross_entropy_grad(logits, labels, lse, grad, **rule):
    x = wide(logits).reshape(labels.size, logits.shape[-1])
    rows = (labels.reshape(-1).view(np.int32), lse.reshape(-1), grad.reshape(-1))
    return rounded(cross_entropy_reference.gradients(x, *rows, **rule).reshape(logits.shape), logits.dtype)


def cross_entropy_with_grad(logits, labels, grad, **rule):
    stats = cross_entropy_stats(logits, labels, first=0, total=rule["smoothing"] > 0)
    loss, lse = cross_entropy(stats[..., None, :], labels, **rule)
    return loss, cross_entropy_grad(logits, labels, lse, grad, first=0, **rule)
