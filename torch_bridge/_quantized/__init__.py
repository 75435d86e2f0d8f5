"""Quantized tensors: `quantize`, products of two of them, their form in files and checkpoints, moves between devices.

Sharded weights are in `_fsdp`, layers in `_nn`.
"""
