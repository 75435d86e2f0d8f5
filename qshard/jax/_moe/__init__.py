"""Mixture-of-experts layers: routing, the permutation of tokens, and the MLP of all experts.

Ragged products and their quantization live in `_experts`.
"""
