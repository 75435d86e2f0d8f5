"""FSDP2: weights that are quantized before the gather, and the scales that ranks compute together.

Flat slices of masters are in `_optim` and `_zero`; the rule of slices is in `_core.flat_shards`.
"""
