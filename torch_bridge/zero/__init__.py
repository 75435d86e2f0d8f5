"""ZeRO: masters, gradients and optimizer states in flat parts, weights that are gathered as codes."""
