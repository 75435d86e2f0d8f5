"""Quantized arrays: casts, gathers of their shards, primary weights, and serialization.

Layers that multiply quantized arrays are in `_nn`, products in `_gemm`, and optimizers of primary weights in `_optim`.
"""
