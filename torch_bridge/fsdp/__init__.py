"""FSDP2: weights that are gathered as codes, and the scales that ranks make of them together."""
