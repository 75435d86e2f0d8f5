"""Quantized layers and their autograd nodes: `linear`, expert layers, RMSNorm and SwiGLU.

Losses are in `_losses`, whole-model conversion is in `_convert`, and sharded weights are in `_fsdp`.
"""
