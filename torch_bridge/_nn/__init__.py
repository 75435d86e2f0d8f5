"""Quantized layers and their autograd nodes: `linear`, RMSNorm and SwiGLU.

Experts are in `_experts`, losses in `_losses`, whole-model conversion in `_convert`, and sharded weights in `_fsdp`.
"""
