"""Cross entropy, and the cross entropy of a linear head without its logits.

Rules that both front ends share, such as chunk ranges, are in `_core.losses`.
"""
