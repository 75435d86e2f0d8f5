"""Layers and their derivatives: linear, dot_general, einsum, RMSNorm, SwiGLU, and `Policy` for pytrees.

Experts are in `_experts`, losses in `_losses`, conversion of whole models is in `_convert`.
"""
