"""Products, for `support/oracle.py`."""

from __future__ import annotations

import numpy as np

from qshard import reference
from qshard.formats import E2M1, E4M3, E8M0, ELEMENTS
from support.oracle_parts import codes_of, rounded, wide

ONE = np.float32(1)


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


# --- grouped products ---


def gemm_grouped(a, a_scale_inv, b, b_scale_inv, stops, ends, *, a_element, b_element, fast, **how):
    values = reference.decode(a, ELEMENTS[a_element]), reference.decode(b, ELEMENTS[b_element])
    how |= {"scales": (a_scale_inv, b_scale_inv), "ends": ends.view(np.int32)}
    return _grouped(reference.gemm_grouped, *values, stops, **how)


def gemm_grouped_k(a, a_scale_inv, b, b_scale_inv, stops, *, a_element, b_element, fast, **how):
    values = reference.decode(a, ELEMENTS[a_element]), reference.decode(b, ELEMENTS[b_element])
    return _grouped(reference.gemm_grouped_k, *values, stops, scales=(a_scale_inv, b_scale_inv), **how)


def gemm_grouped_block(a, a_scale_inv, b, b_scale_inv, stops, *, b_rows, **how):
    return _grouped_blocks(reference.gemm_grouped, a, a_scale_inv, b, b_scale_inv, stops, b_rows=b_rows, **how)


def gemm_grouped_block_k(a, a_scale_inv, b, b_scale_inv, stops, **how):
    return _grouped_blocks(reference.gemm_grouped_k, a, a_scale_inv, b, b_scale_inv, stops, b_rows=1, **how)


def gemm_grouped_mxfp8_tn(a, a_scale_inv, b, b_scale_inv, stops, **how):
    transposed = [x.T for x in (a, a_scale_inv, b, b_scale_inv)]
    return gemm_grouped_block_k(*transposed, stops, cols=32, scale_dtype=E8M0.name, **how)


def gemm_grouped_nvfp4(*operands, b_rows, **how):
    return _grouped_nvfp4(reference.gemm_grouped, *operands, b_rows=b_rows, **how)


def gemm_grouped_nvfp4_k(*operands, **how):
    return _grouped_nvfp4(reference.gemm_grouped_k, *operands, b_rows=1, **how)


def gemm_grouped_values_nt(a, b, stops, **how):
    return _grouped(reference.gemm_grouped, wide(a), wide(b), stops, **how)


def gemm_grouped_values_nn(a, b, stops, **how):
    return gemm_grouped_values_nt(a, b.swapaxes(1, 2), stops, **how)


def gemm_grouped_values_tn(a, b, stops, **how):
    return _grouped(reference.gemm_grouped_k, wide(a.T), wide(b.T), stops, **how)


def _grouped_blocks(
    product, a, a_scale_inv, b, b_scale_inv, stops, *, a_element, b_element, scale_dtype, b_rows, cols, **how
):
    values = [reference.decode(codes_of(x, e), ELEMENTS[e]) for x, e in ((a, a_element), (b, b_element))]
    blocks = [s if scale_dtype == "float32" else reference.decode(s, E8M0) for s in (a_scale_inv, b_scale_inv)]
    blocks[1] = np.repeat(blocks[1], b_rows, axis=-2)[..., : b.shape[-2], :]
    return _grouped(product, *values, stops, blocks=blocks, cols=cols, **how)


def _grouped_nvfp4(product, a, a_scale_inv, a_global, b, b_scale_inv, b_global, stops, *, b_rows, **how):
    values = [reference.decode(reference.unpack(x), E2M1) for x in (a, b)]
    blocks = [reference.decode(scale, E4M3) for scale in (a_scale_inv, b_scale_inv)]
    blocks[1] = np.repeat(blocks[1], b_rows, axis=-2)
    return _grouped(product, *values, stops, blocks=blocks, cols=16, scales=(a_global, b_global), **how)


def _grouped(product, a, b, stops, *, dtype, workspace, **scales):
    return rounded(product(a, b, stops.view(np.int32), **scales), dtype), np.zeros(workspace, np.uint8)
