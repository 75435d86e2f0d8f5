"""Functions on whole models: `convert`, `quantized_init`, export as codes, and preparation for FSDP1.

The layers that `convert` creates are in `_nn` and `_losses`.
"""
