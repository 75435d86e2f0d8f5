"""ZeRO: `ZeroOptimizer`, flat sharded masters, gradients and states, and weights that are gathered as codes.

The Adam step that runs on the shards lives in `_optim`.
"""
