"""Ops on single tensors, for `support/oracle.py`."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

from qshard import formats, reference
from qshard.formats import E2M1, E4M3, E8M0, ELEMENTS, NVFP4
from qshard.reference._planes import four_over_six
from support.oracle_parts import codes_of, each_matrix, over, rounded, runs, scaled, stored, transposed, wide

ONE = np.float32(1)


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
    powers = reference.decode(np.arange(E8M0.max_code + 1), E8M0)  # Round up: the least power >= |x|.
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


def drawn(shape, grid, seed, offset, *, row_step, col_step, block_rows, block_cols):
    """Return random bytes; each region of blocks has a seed and the index of its first element in the whole tensor."""
    rows, cols = np.indices((math.prod(shape[:-1]), shape[-1]), np.int64)
    matrix = shape[-2]
    grid_rows, grid_cols = grid[-2:]
    grid_row = rows // max(matrix, 1) * grid_rows + rows % max(matrix, 1) // block_rows
    block = grid_row * grid_cols + cols // block_cols
    regions = offset.size // 2
    run = math.prod(grid) // regions if regions else 1
    begin = block // max(run, 1) * run  # The first block of the region of each element.
    begin_row = begin // max(grid_cols, 1)
    begin_row = begin_row // max(grid_rows, 1) * matrix + begin_row % max(grid_rows, 1) * block_rows
    down = (rows - begin_row).astype(np.uint64) * np.uint64(row_step)
    right = (cols - begin % max(grid_cols, 1) * block_cols).astype(np.uint64) * np.uint64(col_step)
    numbers = [np.ascontiguousarray(words).view(np.uint64).reshape(-1) for words in (seed, offset)]
    made = np.zeros(rows.shape, np.uint8)
    seeds, firsts = (each[block // max(run, 1)] if made.size else made for each in numbers)
    for own in np.unique(seeds):
        here = seeds == own
        made[here] = reference.random_bytes(int(own), firsts[here] + down[here] + right[here])
    return made.reshape(shape)


def cast_under(x, scale, random, block_rows, block_cols):
    return reference.pack(reference.encode_stochastic(wide(x) * over(scale, block_rows, block_cols, x.shape), random))


def cast_block_stochastic(x, scale, seed, offset, *, row_step, col_step, **block):
    random = drawn(x.shape, scale.shape, seed, offset, row_step=row_step, col_step=col_step, **block)
    return cast_under(x, scale, random, **block)


def rotated(x):
    return hadamard(x, block_rows=16, block_cols=1)


def amax_hadamard(x, **block):
    return amax_block(x, **block), amax_block(rotated(x), **block)


def hadamard(x, *, block_rows, block_cols):
    if block_rows > 1:
        return transposed(hadamard(transposed(x), block_rows=block_cols, block_cols=block_rows))
    return reference.hadamard_transform(x).astype(ml_dtypes.bfloat16)


def transpose_packed(data, *, outer=0):
    return reference.pack(transposed(reference.unpack(data), outer))


def swizzle_scale(scale_inv, *, rows):
    return each_matrix(lambda scale: reference.swizzle_scale(scale, block_rows=128 // rows), scale_inv)


# --- rows of experts ---


def group_rows(sizes, **options):
    made = reference.group_rows(sizes.view(np.int32), **options)
    return tuple(each.view(sizes.dtype) for each in made)


# --- scales of blocks ---


def scale_e8m0(amax, *, element, rounding, nonfinite):
    shown = reference.amax_or_nan(amax, nonfinite)
    code = reference.e8m0_from_amax(shown, ELEMENTS[element], rounding=rounding)
    return ONE / reference.decode(code, E8M0), code


def global_scale_nvfp4(global_amax, *, scale_max):
    scale = reference.nvfp4_global_scale(global_amax, NVFP4.with_options(scale_max=scale_max))
    return scale, ONE / scale


def scale_nvfp4(amax, global_amax, **options):
    """Call the reference with each block as a row, because it takes one global amax per row of blocks."""
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


def _transposed_planes(data, scale_inv, element, outer=0):
    return stored(transposed(codes_of(data, element), outer), element), transposed(scale_inv, outer)


def _in_rows_and_columns(one, x, *others, block_rows, block_cols, **options):
    first = one(x, *others, block_rows=1, block_cols=block_cols, **options)
    return first, one(x, *others, block_rows=block_rows, block_cols=1, **options)


def quantize_block_t(x, *, element, outer, **options):
    return _transposed_planes(*quantize_block(x, element=element, **options), element, outer)


def quantize_block_both(x, **options):
    first, second = _in_rows_and_columns(quantize_block, x, **options)
    return *first, *second


def quantize_block_both_t(x, *, element, outer, **options):
    first, second = _in_rows_and_columns(quantize_block, x, element=element, **options)
    return *first, *_transposed_planes(*second, element, outer)


def quantize_square_both(x, *, element, outer, **options):
    plane = quantize_block(x, element=element, **options)
    return *plane, *_transposed_planes(*plane, element, outer)


def quantize_nvfp4_t(x, global_amax, *, outer, hadamard=False, **options):
    x = rotated(x) if hadamard else x
    return _transposed_planes(*quantize_nvfp4(x, global_amax, **options), E2M1.name, outer)


def quantize_nvfp4_both(x, *amaxes, outer, hadamard=False, block_rows, block_cols, random=None, **options):
    """Quantize both planes. A matrix has one global amax; if there are several equal ones, the first is used."""
    batch = x.ndim - 2 - outer
    first, second = (
        a[(..., *(0,) * (a.ndim - batch))] if x.size else np.zeros(x.shape[:batch], np.float32) for a in amaxes
    )
    rowwise = quantize_nvfp4(x, first, block_rows=1, block_cols=block_cols, random=random, **options)
    x = rotated(x) if hadamard else x
    columnwise = quantize_nvfp4(x, second, block_rows=block_rows, block_cols=1, random=random, **options)
    return *rowwise, *_transposed_planes(*columnwise, E2M1.name, outer)


def quantize_nvfp4_square_both(x, global_amax, *, outer, **options):
    plane = quantize_nvfp4(x, global_amax, **options)
    return *plane, *_transposed_planes(*plane, E2M1.name, outer)


def _at_random(nearest, x, operands, *, row_step, col_step, block_rows, block_cols, **options):
    *amaxes, seed, offset = operands
    block = {"block_rows": block_rows, "block_cols": block_cols}
    grid = (*x.shape[:-2], x.shape[-2] // block_rows, x.shape[-1] // block_cols)
    random = drawn(x.shape, grid, seed, offset, row_step=row_step, col_step=col_step, **block)
    return nearest(x, *amaxes, random=random, **block, **options)


def quantize_nvfp4_stochastic(x, *operands, **options):
    return _at_random(quantize_nvfp4, x, operands, **options)


def quantize_nvfp4_stochastic_t(x, *operands, **options):
    return _at_random(quantize_nvfp4_t, x, operands, **options)


def quantize_nvfp4_stochastic_both(x, *operands, **options):
    return _at_random(quantize_nvfp4_both, x, operands, **options)


# --- padded rows of experts: the ops above, on the gathered rows of each expert ---


def amax_grouped(x, rows, stops):
    owner, gathered = _of_experts(x, rows, stops)
    return np.array([reference.amax(gathered[owner == e]) for e in range(len(stops))], np.float32)


def cast_grouped(x, rows, stops, scale, **options):
    owner, gathered = _of_experts(x, rows, stops)
    data = np.zeros(gathered.shape, np.uint8)
    for e in range(len(stops)):
        data[owner == e] = cast_tensor(gathered[owner == e], scale[e], **options)
    return data


def cast_transpose_grouped(*operands, **options):
    data = cast_grouped(*operands, **options)
    return data, transposed(data)


def amax_hadamard_grouped(x, rows, stops):
    owner, gathered = _of_strips(x, rows, stops)
    planes, experts = (gathered, rotated(gathered)), range(len(stops))
    return tuple(np.array([reference.amax(y[owner == e]) for e in experts], np.float32) for y in planes)


def quantize_block_rows(x, rows, **options):
    return quantize_block(_gathered(x, rows), **options)


def quantize_block_both_rows(x, rows, **options):
    return quantize_block_both(_gathered(x, rows), **options)


def quantize_block_both_t_rows(x, rows, **options):
    return quantize_block_both_t(_gathered(x, rows), outer=0, **options)


def quantize_square_both_rows(x, rows, **options):
    return quantize_square_both(_gathered(x, rows), outer=0, **options)


def quantize_nvfp4_rows(x, rows, stops, *amaxes, **options):
    return _by_strips(quantize_nvfp4, x, rows, stops, amaxes, None, options)


def quantize_nvfp4_both_rows(x, rows, stops, *amaxes, **options):
    return _by_strips(quantize_nvfp4_both, x, rows, stops, amaxes, None, options | {"outer": 0})


def quantize_nvfp4_stochastic_rows(x, rows, stops, *operands, **options):
    return _by_strips(quantize_nvfp4, x, rows, stops, operands[:-1], operands[-1], options)


def quantize_nvfp4_stochastic_both_rows(x, rows, stops, *operands, **options):
    return _by_strips(quantize_nvfp4_both, x, rows, stops, operands[:-1], operands[-1], options | {"outer": 0})


def _by_strips(quantize, x, rows, stops, amaxes, seeds, options):
    """Quantize each strip of 16 padded rows with the scales and random numbers of its expert."""
    owner, gathered = _of_strips(x, rows, stops)
    first = np.concatenate([[0], stops.view(np.int32)[: len(stops) - 1], [0]]).astype(np.int64)
    amaxes = [np.append(amax, np.float32(0)) for amax in amaxes]
    made = []
    for begin in range(0, max(1, len(rows)), 16):
        own, expert = gathered[begin : begin + 16], owner[begin] if len(rows) else len(stops)
        random = None
        if seeds is not None:
            index = (np.int64(begin) - first[expert]) * np.int64(x.shape[1]) + np.arange(own.size)
            seed = seeds[expert].view(np.uint64)[0] if expert < len(stops) else 0
            random = reference.random_bytes(int(seed), index.view(np.uint64)).reshape(own.shape)
        made.append(quantize(own, *(amax[expert] for amax in amaxes), random=random, **options))
    return tuple(np.concatenate(parts, axis=i // 2) for i, parts in enumerate(zip(*made, strict=True)))


def _of_strips(x, rows, stops):
    """Return the expert of each padded row, that of the first row of its strip, and the rows; zeros for no expert."""
    owner, gathered = _of_experts(x, rows, stops)
    owner = owner[np.arange(len(rows)) // 16 * 16]
    return owner, np.where((owner < len(stops))[:, None], gathered, gathered.dtype.type(0))


def _gathered(x, rows):
    return reference.gather_rows(x, rows.view(np.int32))


def _of_experts(x, rows, stops):
    return reference.expert_of_rows(stops.view(np.int32), len(rows)), _gathered(x, rows)
