"""ZeRO: masters, gradients and optimizer states in flat parts, weights that are gathered as codes."""

from qshard.torch_bridge.zero.optimizer import ZeroOptimizer

__all__ = ["ZeroOptimizer"]
