"""Optimizers: Adam with low-precision states, and master weights that are cast to quantized weights.

ZeRO is in `_zero`.
"""
