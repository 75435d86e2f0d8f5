"""Cross entropy of logits, and cross entropy of a linear head without whole logits.

Rules that both front ends share, such as chunk ranges, are in `_core.losses`.
"""
