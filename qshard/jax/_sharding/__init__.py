"""Shardings of arrays: the box of the whole that a device holds, partial blocks, mesh axes of rows, rows under vmap.

The collectives of a quantized weight are in `_quantized`; those of a product are in `_nn` and `_gemm`.
"""
