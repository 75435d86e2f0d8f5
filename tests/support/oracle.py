"""What each op of `ffi/ops.def` gives, by `qshard.reference`: `oracle(call)` for a call of `support/draws.py`.

Functions have the names of the ops and take their operands and options.
"""

from __future__ import annotations

import itertools
import math

import ml_dtypes
import numpy as np

from qshard import formats, reference
from qshard.formats import E2M1, E4M3, E8M0, ELEMENTS, NVFP4
from qshard.reference import _activation as activation
from qshard.reference import _adam as adam_reference
from qshard.reference import _cross_entropy as cross_entropy_reference
from qshard.reference._planes import four_over_six
from support.draws import Call

ONE = np.float32(1)


def oracle(call: Call) -> list[np.ndarray]:
    """The results in order, those of lists one after the other. Operands stay as they are."""
    with np.errstate(all="ignore"):
        # What a call says of its operands changes nothing.
        options = {name: value for name, value in call.options.items() if name not in ("shared", "turned")}
        made = globals()[call.spec.name](*call.operands, **options)
    return list(made) if isinstance(made, tuple | list) else [made]


# --- parts ---


def wide(x):
    return np.asarray(x, np.float32)


def runs(values, x):
    """One value for each contiguous run of `x`, of whose axes `values` has the first."""
    return values.reshape(values.shape + (1,) * (x.ndim - values.ndim))


def over(values, block_rows, block_cols, shape):
    """The value of its block for each element."""
    each = np.repeat(np.repeat(values, block_rows, axis=-2), block_cols, axis=-1)
    return each[..., : shape[-2], : shape[-1]]


def each_matrix(function, *arrays):
    """A function of matrices, over leading axes."""
    lead = arrays[0].shape[:-2]
    if not lead:
        return function(*arrays)
    if 0 in lead:
        one = np.asarray(function(*(np.zeros(a.shape[-2:], a.dtype) for a in arrays)))
        return np.zeros((*lead, *one.shape), one.dtype)
    made = np.stack([function(*(a[i] for a in arrays)) for i in np.ndindex(lead)])
    return made.reshape(*lead, *made.shape[1:])


def stored(codes, element):
    return reference.pack(codes) if ELEMENTS[element].codes_per_byte > 1 else codes


def codes_of(data, element):
    return reference.unpack(data) if ELEMENTS[element].codes_per_byte > 1 else data


def rounded(values, dtype):
    """fp32 in another dtype, with the one NaN."""
    return np.where(np.isnan(values), np.array(np.nan, dtype), values.astype(dtype))


def turned(x, outer=0):
    """Matrices transposed, whose rows have `outer` more axes."""
    return np.ascontiguousarray(np.moveaxis(x, -1, -2 - outer))


def scaled(x, scale, nonfinite="saturate"):
    """Under a given scale, an option shows infinities: fl(fl(x * scale) + fl(x * 0)), as NUMERICS.md has it."""
    return wide(x) * scale + wide(x) * 0 if nonfinite == "nan" else wide(x) * scale


# --- between products ---


def swiglu(gate, up, *, lead):
    h = rounded(activation.swiglu(wide(gate), wide(up)), gate.dtype)
    return h, amax_tensor(h, lead=lead)


def swiglu_cast_t(gate, up, scale, *, element):
    return turned(cast_tensor(swiglu(gate, up, lead=0)[0], scale, element=element))


def swiglu_grad(gate, up, grad, *, lead):
    both = [rounded(x, gate.dtype) for x in activation.swiglu_grad(wide(gate), wide(up), wide(grad))]
    return *both, *(amax_tensor(x, lead=lead) for x in both)


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


# --- tensors with one scale, and single elements ---


def amax_tensor(x, *, lead):
    return reference.amax(x, axis=tuple(range(lead, x.ndim)))


def scale_from_amax(amax, *, element, **options):
    return reference.scale_from_amax(amax, ELEMENTS[element], **options)


def cast_tensor(x, scale, *, element, nonfinite="saturate"):
    return reference.encode(scaled(x, runs(scale, x), nonfinite), ELEMENTS[element])


def transpose(data, *, batch, outer=0):
    rows = range(batch, batch + outer + 1)
    return np.ascontiguousarray(np.moveaxis(data, rows, range(-len(rows), 0)))


def cast_transpose(x, scale, *, batch, outer, **options):
    data = cast_tensor(x, scale, **options)
    return data, transpose(data, batch=batch, outer=outer)


def delayed_scale(amax, scale, *, element, margin):
    scale = reference.delayed_scale(scale, amax, ELEMENTS[element], margin=margin)
    return scale, rounded(ONE / scale, "float32")


def cast_delayed(x, scale, *, element, lead, margin, nonfinite="saturate"):
    amax = amax_tensor(x, lead=lead)
    scale, scale_inv = delayed_scale(amax, scale, element=element, margin=margin)
    return cast_tensor(x, scale, element=element, nonfinite=nonfinite), amax, scale_inv


def cast_transpose_delayed(x, scale, *, batch, **options):
    data, amax, scale_inv = cast_delayed(x, scale, lead=batch, **options)
    return data, transpose(data, batch=batch), amax, scale_inv


def dequantize(data, scale_inv, *, element, dtype):
    return rounded(reference.decode(data, ELEMENTS[element]) * runs(scale_inv, data), dtype)


def encode(x, *, element):
    if element != E8M0.name:
        return reference.encode(wide(x), ELEMENTS[element])
    powers = reference.decode(np.arange(E8M0.max_code + 1), E8M0)  # The least that is not below |x|.
    code = np.searchsorted(powers, np.minimum(np.abs(wide(x)), powers[-1]))
    return np.where(np.isnan(wide(x)), E8M0.nan_code, code).astype(np.uint8)


def decode(codes, *, element):
    return reference.decode(codes, ELEMENTS[element])


def update_delayed_scale(amax, history, scale, *, element, margin, most_recent):
    rule = {"margin": margin, "algorithm": "most_recent" if most_recent else "max"}
    scale, history = reference.delayed_scale_update(scale, history, amax, ELEMENTS[element], **rule)
    return history, scale, rounded(ONE / scale, "float32")


# --- blocks ---


def amax_block(x, *, block_rows, block_cols):
    return each_matrix(lambda matrix: reference.block_amax(matrix, (block_rows, block_cols)), x)


def cast_block(x, scale, *, element, **block):
    return stored(reference.encode(wide(x) * over(scale, **block, shape=x.shape), ELEMENTS[element]), element)


def dequantize_block(data, scale_inv, *, element, scale_dtype, dtype, **block):
    codes = codes_of(data, element)
    scale = scale_inv if scale_dtype == "float32" else reference.decode(scale_inv, ELEMENTS[scale_dtype])
    return rounded(reference.decode(codes, ELEMENTS[element]) * over(scale, **block, shape=codes.shape), dtype)


def dequantize_nvfp4(data, scale_inv, global_scale_inv, *, dtype, **block):
    scale = reference.decode(scale_inv, E4M3) * runs(global_scale_inv, scale_inv)
    return dequantize_block(data, scale, element=E2M1.name, scale_dtype="float32", dtype=dtype, **block)


def drawn(shape, grid, seed, first, *, row_step, col_step, block_rows, block_cols):
    """Random bytes: each region of blocks has a seed, and the index of its first element in the whole tensor."""
    rows, cols = np.indices((math.prod(shape[:-1]), shape[-1]), np.int64)
    matrix = shape[-2]
    grid_rows, grid_cols = grid[-2:]
    grid_row = rows // max(matrix, 1) * grid_rows + rows % max(matrix, 1) // block_rows
    block = grid_row * grid_cols + cols // block_cols
    regions = first.size // 2
    run = math.prod(grid) // regions if regions else 1
    begin = block // max(run, 1) * run  # The first block of the region of each element.
    begin_row = begin // max(grid_cols, 1)
    begin_row = begin_row // max(grid_rows, 1) * matrix + begin_row % max(grid_rows, 1) * block_rows
    down = (rows - begin_row).astype(np.uint64) * np.uint64(row_step)
    right = (cols - begin % max(grid_cols, 1) * block_cols).astype(np.uint64) * np.uint64(col_step)
    numbers = [np.ascontiguousarray(words).view(np.uint64).reshape(-1) for words in (seed, first)]
    made = np.zeros(rows.shape, np.uint8)
    seeds, firsts = (each[block // max(run, 1)] if made.size else made for each in numbers)
    for own in np.unique(seeds):
        here = seeds == own
        made[here] = reference.random_bytes(int(own), firsts[here] + down[here] + right[here])
    return made.reshape(shape)


def cast_under(x, scale, random, block_rows, block_cols):
    return reference.pack(reference.encode_stochastic(wide(x) * over(scale, block_rows, block_cols, x.shape), random))


def cast_block_stochastic(x, scale, seed, first, *, row_step, col_step, **block):
    random = drawn(x.shape, scale.shape, seed, first, row_step=row_step, col_step=col_step, **block)
    return cast_under(x, scale, random, **block)


def rotated(x):
    return hadamard(x, block_rows=16, block_cols=1)


def amax_hadamard(x, **block):
    return amax_block(x, **block), amax_block(rotated(x), **block)


def hadamard(x, *, block_rows, block_cols):
    if block_rows > 1:
        return turned(hadamard(turned(x), block_rows=block_cols, block_cols=block_rows))
    return reference.hadamard_transform(x).astype(ml_dtypes.bfloat16)


def transpose_packed(data, *, outer=0):
    return reference.pack(turned(reference.unpack(data), outer))


def swizzle_scale(scale_inv, *, rows):
    return each_matrix(lambda scale: reference.swizzle_scale(scale, block_rows=128 // rows), scale_inv)


# --- scales of blocks ---


def scale_e8m0(amax, *, element, rounding, nonfinite):
    shown = reference.shown_amax(amax, nonfinite)
    code = reference.e8m0_from_amax(shown, ELEMENTS[element], rounding=rounding)
    return ONE / reference.decode(code, E8M0), code


def global_scale_nvfp4(global_amax, *, scale_max):
    scale = reference.nvfp4_global_scale(global_amax, NVFP4.with_options(scale_max=scale_max))
    return scale, ONE / scale


def scale_nvfp4(amax, global_amax, **options):
    """The reference has one global amax a row of blocks; here each block is a row."""
    whole = np.broadcast_to(runs(global_amax, amax), amax.shape)
    scales = reference.scales_from_amax(reference.Amax(whole, amax[..., None]), NVFP4.with_options(**options))
    return scales.multiplier[..., 0], scales.scale_inv[..., 0]


def scale_four_over_six(x, amax, global_amax, *, block_rows, block_cols, error, **options):
    fmt = (NVFP4 if block_rows == 1 else formats.NVFP4_16x16).with_options(four_over_six=error, **options)
    whole, grid = np.broadcast_to(runs(global_amax, amax), amax.shape), amax.shape
    blocks = wide(x).reshape(*amax.shape[:-1], block_rows, amax.shape[-1], block_cols).swapaxes(-2, -3)
    blocks, whole, amax = blocks.reshape(amax.size, block_rows, block_cols), whole.reshape(-1), amax.reshape(-1, 1)
    if block_rows == 1:  # All at once: a block is a row with a global amax of its own.
        made = [four_over_six(blocks[:, 0], fmt, reference.Amax(whole, amax))]
    else:
        made = [
            four_over_six(block, fmt, reference.Amax(*of))
            for block, *of in zip(blocks, whole, amax[:, None], strict=True)
        ]
    scale, scale_inv = (np.concatenate([np.zeros((0, 1), d), *(m[i] for m in made)]) for i, d in enumerate("fB"))
    return scale.reshape(grid), scale_inv.reshape(grid)


# --- products ---


def gemm(a, a_scale_inv, b, b_scale_inv, *, a_element, b_element, fast, workspace, dtype):
    values = reference.decode(a, ELEMENTS[a_element]), reference.decode(b, ELEMENTS[b_element])
    return _product(*values, dtype, workspace, scales=(a_scale_inv, b_scale_inv))


def gemm_block(a, a_scale_inv, b, b_scale_inv, *, a_element, b_element, scale_dtype, dtype, workspace, **rows):
    values = [reference.decode(codes_of(x, e), ELEMENTS[e]) for x, e in ((a, a_element), (b, b_element))]
    blocks = [s if scale_dtype == "float32" else reference.decode(s, E8M0) for s in (a_scale_inv, b_scale_inv)]
    return _product(*values, dtype, workspace, blocks=blocks, **rows)


def gemm_nvfp4(
    a, a_scale_inv, a_global_scale_inv, b, b_scale_inv, b_global_scale_inv, *, workspace, dtype, cols=16, **rows
):
    values = [reference.decode(reference.unpack(x), E2M1) for x in (a, b)]
    blocks = [reference.decode(scale, E4M3) for scale in (a_scale_inv, b_scale_inv)]
    scales = a_global_scale_inv, b_global_scale_inv
    return _product(*values, dtype, workspace, blocks=blocks, scales=scales, cols=cols, **rows)


def gemm_values_nt(a, b, *, workspace, dtype):
    return _product(wide(a), wide(b), dtype, workspace)


def gemm_values_nn(a, b, **options):
    return gemm_values_nt(a, b.T, **options)


def gemm_values_tn(a, b, **options):
    return gemm_values_nt(a.T, b.T, **options)


def gemm_values_tt(a, b, **options):
    return gemm_values_nt(a.T, b, **options)


def _product(a, b, dtype, workspace, *, blocks=None, a_rows=1, b_rows=1, cols=None, scales=(ONE, ONE)):
    if blocks is not None:
        each = zip(blocks, (a_rows, b_rows), (a, b), strict=True)
        blocks = [np.repeat(scale, rows, axis=0)[: len(x)] for scale, rows, x in each]
    return rounded(reference.gemm(a, b, blocks, cols, scales), dtype), np.zeros(workspace, np.uint8)


# --- one read of x ---


def quantize_block(x, *, element, eps, pow2, rounding, scale_dtype, nonfinite, **block):
    amax = amax_block(x, **block)
    if scale_dtype == "float32":
        scale, scale_inv = scale_from_amax(amax, element=element, eps=eps, pow2=pow2, nonfinite=nonfinite)
    else:
        scale, scale_inv = scale_e8m0(amax, element=element, rounding=rounding, nonfinite=nonfinite)
    return cast_block(x, scale, element=element, **block), scale_inv


def quantize_nvfp4(x, global_amax, *, nonfinite, scale_max, random=None, **block):
    amax = amax_block(x, **block)
    scale, scale_inv = scale_nvfp4(amax, global_amax, nonfinite=nonfinite, scale_max=scale_max)
    if random is not None:
        return cast_under(x, scale, random, **block), scale_inv
    return cast_block(x, scale, element=E2M1.name, **block), scale_inv


def _turned_planes(data, scale_inv, element, outer=0):
    return stored(turned(codes_of(data, element), outer), element), turned(scale_inv, outer)


def _in_rows_and_columns(one, x, *others, block_rows, block_cols, **options):
    first = one(x, *others, block_rows=1, block_cols=block_cols, **options)
    return first, one(x, *others, block_rows=block_rows, block_cols=1, **options)


def quantize_block_t(x, *, element, outer, **options):
    return _turned_planes(*quantize_block(x, element=element, **options), element, outer)


def quantize_block_both(x, **options):
    first, second = _in_rows_and_columns(quantize_block, x, **options)
    return *first, *second


def quantize_block_both_t(x, *, element, outer, **options):
    first, second = _in_rows_and_columns(quantize_block, x, element=element, **options)
    return *first, *_turned_planes(*second, element, outer)


def quantize_square_both(x, *, element, outer, **options):
    plane = quantize_block(x, element=element, **options)
    return *plane, *_turned_planes(*plane, element, outer)


def quantize_nvfp4_t(x, global_amax, *, outer, hadamard=False, **options):
    x = rotated(x) if hadamard else x
    return _turned_planes(*quantize_nvfp4(x, global_amax, **options), E2M1.name, outer)


def quantize_nvfp4_both(x, *amaxes, outer, hadamard=False, block_rows, block_cols, random=None, **options):
    """A matrix has one global amax: if there are several, all are the same, and the first is read."""
    batch = x.ndim - 2 - outer
    first, second = (
        a[(..., *(0,) * (a.ndim - batch))] if x.size else np.zeros(x.shape[:batch], np.float32) for a in amaxes
    )
    rowwise = quantize_nvfp4(x, first, block_rows=1, block_cols=block_cols, random=random, **options)
    x = rotated(x) if hadamard else x
    columnwise = quantize_nvfp4(x, second, block_rows=block_rows, block_cols=1, random=random, **options)
    return *rowwise, *_turned_planes(*columnwise, E2M1.name, outer)


def quantize_nvfp4_square_both(x, global_amax, *, outer, **options):
    plane = quantize_nvfp4(x, global_amax, **options)
    return *plane, *_turned_planes(*plane, E2M1.name, outer)


def _at_random(nearest, x, operands, *, row_step, col_step, block_rows, block_cols, **options):
    *amaxes, seed, first = operands
    block = {"block_rows": block_rows, "block_cols": block_cols}
    grid = (*x.shape[:-2], x.shape[-2] // block_rows, x.shape[-1] // block_cols)
    random = drawn(x.shape, grid, seed, first, row_step=row_step, col_step=col_step, **block)
    return nearest(x, *amaxes, random=random, **block, **options)


def quantize_nvfp4_stochastic(x, *operands, **options):
    return _at_random(quantize_nvfp4, x, operands, **options)


def quantize_nvfp4_stochastic_t(x, *operands, **options):
    return _at_random(quantize_nvfp4_t, x, operands, **options)


def quantize_nvfp4_stochastic_both(x, *operands, **options):
    return _at_random(quantize_nvfp4_both, x, operands, **options)


# --- lists: what they write, in the order of the results ---


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
    return [turned(a) if a.shape == turned(b).shape else transpose_packed(a) for a, b in zip(data, data_t, strict=True)]


def add_ranks(parts, total, *, fresh):
    made = np.zeros(total.shape, np.float32)
    for rank, part in enumerate(wide(parts)):
        made = part if rank == 0 else made + part
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
