"""Mixture-of-experts layers: routing, the permutation of tokens, and the MLP of all experts.

Grouped products and their quantization live in `_experts`. `_convert` recognizes experts of other libraries.
"""
