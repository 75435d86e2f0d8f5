"""Ops of `ffi/ops.def` as `torch.ops.qshard.<op>`, and the ways to run several of them in one call into C++.

Nothing here knows of quantized tensors or layers; those are in `_quantized` and `_nn`.
"""
