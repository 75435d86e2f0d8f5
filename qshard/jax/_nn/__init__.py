"""Layers and their derivatives: linear, dot_general, einsum, experts, RMSNorm, SwiGLU, and weights of a pytree.

Losses are in `_losses`, conversion of whole models is in `_convert`.
"""
