"""Whole models: `convert`, `quantized_init`, export of a state dict as codes, preparation for FSDP1.

The layers that `convert` puts in place are in `_nn` and `_losses`.
"""
