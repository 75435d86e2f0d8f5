"""GEMMs of two quantized tensors: of per-tensor FP8 codes, of block-scaled codes, and of dequantized values.

Quantization of the operands of a layer, and derivatives, are in `_nn`.
"""
