"""Quantized tensors: `quantize`, GEMMs on planes, serialization, and moves between devices and dtypes.

Sharded weights are in `_fsdp`, layers are in `_nn`.
"""
