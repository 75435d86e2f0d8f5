"""Products of two operands: per-tensor FP8, block-scaled codes, and dequantized values.

Quantization of the operands of a layer, and derivatives, are in `_nn`.
"""
