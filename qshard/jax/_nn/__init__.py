"""Layers and their derivatives: linear, dot_general, einsum, experts, RMSNorm, SwiGLU, and `Policy` for pytrees.

Losses are in `_losses`, conversion of whole models is in `_convert`.
"""
