"""Ops on lists of tensors of `support/oracle.py`, with results in the order of the row."""

from __future__ import annotations

import itertools
import math

import numpy as np

from qshard import reference
from qshard.formats import E2M1, ELEMENTS
from qshard.reference import _adam as adam_reference
from support.oracle_parts import codes_of, over, rounded, scaled, stored, transposed, wide
from support.oracle_products import gemm_grouped, gemm_grouped_block
from support.oracle_tensors import transpose_packed


def _numbers(words):
    return [int(number) for number in np.ascontiguousarray(words).view(np.uint64).reshape(-1)]


def _weights(starts, x, shapes, block_rows, block_cols, rounded_to):
    """For each weight: its shape, block and grid; the slice, rounded, and without what is past the end; its start."""
    for start, part, (rows, cols) in zip(_numbers(starts), x, zip(shapes[::2], shapes[1::2], strict=True), strict=True):
        block = (block_rows, block_cols) if block_rows else (max(rows, 1), max(cols, 1))
        grid = (-(-rows // block[0]), -(-cols // block[1])) if block_rows else (1, 1)
        part = wide(wide(part).astype(rounded_to))
        yield (rows, cols), block, grid, part[: max(0, rows * cols - start)], min(start, rows * cols)


def amax_slices(starts, amax, x, *, whole, **options):
    blocks, wholes = [], []
    for shape, block, grid, part, start in _weights(starts, x, **options):
        flat = np.zeros(math.prod(shape), np.float32)
        flat[start : start + part.size] = part
        matrix = flat.reshape(shape)
        found = reference.block_amax(matrix, block) if matrix.size or grid != (1, 1) else np.zeros(grid, np.float32)
        blocks.append(found.reshape(-1))
        wholes += {"none": [], "tensor": [reference.amax(matrix)], "row": list(reference.amax(matrix, axis=1))}[whole]
    found = np.concatenate([*blocks, np.array(wholes, np.float32)])
    return np.maximum(found.view(np.int32), amax.view(np.int32)).view(np.float32)


def cast_slices(starts, scale, x, data, *, element, pieces, nonfinite="saturate", seeds=None, **options):
    per_byte = ELEMENTS[element].codes_per_byte
    results, begin = [], 0
    for i, (shape, block, grid, part, start) in enumerate(_weights(starts, x, **options)):
        own = scale[begin : begin + math.prod(grid)].reshape(grid)
        begin += own.size
        place = np.arange(start, start + part.size)
        own = over(own, *block, shape).reshape(-1)[place] if part.size else part
        values = scaled(part, own, nonfinite)
        if seeds is None:
            codes = reference.encode(values, ELEMENTS[element])
        else:
            codes = reference.encode_stochastic(values, reference.random_bytes(_numbers(seeds)[i], place))
        result = codes_of(data[i], element).copy()
        first = start // per_byte * per_byte if pieces else 0
        result[place - first] = codes
        results.append(stored(result, element))
    return results


def cast_slices_stochastic(starts, seeds, scale, x, data, **options):
    return cast_slices(starts, scale, x, data, element=E2M1.name, seeds=seeds, **options)


def transpose_each(data, data_t):
    return [
        transposed(a) if a.shape == transposed(b).shape else transpose_packed(a)
        for a, b in zip(data, data_t, strict=True)
    ]


def transpose_stack(data_t, data):
    return [np.stack([transposed(matrix) for matrix in data])]


def gemm_grouped_list(a, a_scale_inv, b_scale_inv, stops, ends, out, workspace, b, **how):
    how |= {"tokens": out.shape[0], "dtype": out.dtype, "workspace": 0}
    return [gemm_grouped(a, a_scale_inv, np.stack(b), b_scale_inv, stops, ends, **how)[0], workspace]


def gemm_grouped_block_list(a, a_scale_inv, b_scale_inv, stops, out, workspace, b, **how):
    how |= {"dtype": out.dtype, "workspace": 0}
    return [gemm_grouped_block(a, a_scale_inv, np.stack(b), b_scale_inv, stops, **how)[0], workspace]


def add_ranks(parts, total, *, fresh, mean):
    made = np.zeros(total.shape, np.float32)
    for rank, part in enumerate(wide(parts)):
        made = part if rank == 0 else made + part
    if mean:
        made = made / np.float32(max(len(parts), 1))
    return rounded(made if fresh else total + made, "float32")


def adam_constants(step, hyper):
    rows = []
    for number in step.reshape(-1):
        lr, *betas, eps, decay, grad_scale = hyper.reshape(-1, 8)[0].astype(np.float64)  # All settings are equal.
        pairs = (betas[0] + betas[1], betas[2] + betas[3])
        rows.append(adam_reference.adam_constants(int(number), lr, pairs, eps, decay, grad_scale))
    return np.array(rows, np.float32).reshape(*step.shape, 10)


def adam(constants, *lists, **options):
    each = [_adam_tensor(*of, **options) for of in itertools.zip_longest(constants, *lists) if of[1] is not None]
    return [part for parts in zip(*each, strict=True) for part in parts if part is not None]


def _adam_tensor(constants, g, p, extra, *states, decay, keeps, update, exp_avg_dtype, exp_avg_sq_dtype):
    if keeps == "remainder":
        exact = adam_reference.join_float32(p, extra)
    else:
        exact = extra if keeps == "master" else wide(0 if p is None else p)

    def in_rows(x):
        return x.reshape(x.shape[0], math.prod(x.shape[1:])) if x.ndim > 1 else x.reshape(1, x.size)

    kinds = [(exp_avg_dtype, False), (exp_avg_sq_dtype, True)]
    before = [
        adam_reference.decode_state(in_rows(data), dtype, scale).reshape(g.shape)
        for data, scale, (dtype, _) in zip(states[::2], states[1::2], kinds, strict=True)
    ]
    step, *after = adam_reference.adam_update(adam_reference.AdamConstants(*constants), exact, wide(g), *before, decay)
    new = exact - step
    stored_states = []
    for x, (dtype, positive) in zip(after, kinds, strict=True):
        data, scale = adam_reference.encode_state(in_rows(x), dtype, positive=positive)
        stored_states += [data.reshape(g.shape), scale]
    new_low = None if keeps == "none" else adam_reference.narrow(new, "float32")
    if keeps == "remainder":
        new_p, new_low = adam_reference.split_float32(new)
    elif not update:
        new_p = adam_reference.narrow(new, str(p.dtype))
    elif keeps == "master":
        new_p = adam_reference.narrow(wide(adam_reference.narrow(new, str(p.dtype))) - wide(p), "float32")
    else:
        new_p = adam_reference.narrow(-step, "float32")
    return new_p, new_low, *stored_states
