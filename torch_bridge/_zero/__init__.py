"""ZeRO: masters, gradients and optimizer states in flat parts, weights that are gathered as codes.

The optimizers that run on the parts are in `_optim`.
"""
