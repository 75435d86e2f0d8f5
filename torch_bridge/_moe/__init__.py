"""Mixture-of-experts layers: routing, the permutation of tokens, and the MLP of all experts.

Grouped products and their quantization live in `_nn`, and models of other libraries are converted in `_convert`.
"""
