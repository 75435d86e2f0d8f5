"""Optimizers: Adam with low-precision states, and casts of master weights to quantized weights.

ZeRO lives in `_zero`; the master of a primary weight lives in `_fsdp`.
"""
