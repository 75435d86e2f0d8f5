"""Quantized layers and their autograd nodes: `linear`, RMSNorm and SwiGLU.

Experts are in `_experts`, losses in `_losses`, whole-model conversion is in `_convert`, and sharded weights are in `_fsdp`.
"""
