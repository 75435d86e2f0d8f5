"""Ops of `ffi/ops.def` as `torch.ops.qshard.<op>`, and recorded programs that run several of them in one call into C++.

Nothing here depends on quantized tensors or layers, which are in `_quantized` and `_nn`.
"""
