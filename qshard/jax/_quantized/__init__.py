"""Quantized arrays: `quantize`, the gather of their shards, primary weights, and their form in files.

Layers that multiply them are in `_nn`, products in `_gemm`, optimizers of primary weights in `_optim`.
"""
