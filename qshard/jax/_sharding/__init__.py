"""Shardings of arrays: shard specs, partial blocks, partitioned row functions, and rows under `vmap`.

The collectives of a quantized weight are in `_quantized`. The collectives of a product are in `_nn` and `_gemm`.
"""
