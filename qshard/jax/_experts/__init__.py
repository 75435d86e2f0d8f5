"""Ragged products of experts: padded rows, their quantization, `ragged_dot`, and the exchange of tokens.

Routing and the MLP of experts live in `_moe`.
"""
