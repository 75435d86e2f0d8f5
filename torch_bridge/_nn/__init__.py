"""Layers and their derivatives: linear, experts, RMSNorm, SwiGLU, and tensors saved for backward.

Losses are in `_losses`, functions of whole models in `_convert`, sharded weights in `_fsdp`.
"""
