"""FSDP2 weights: quantized before the all-gather, with scales that all ranks compute from one max-reduction.

Casts of master weights into flat slices live in `_optim` and `_zero`; the rule for flat slices is `_core.flat_shards`.
"""
