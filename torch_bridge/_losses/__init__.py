"""Losses: cross entropy, and the cross entropy of a linear head that never stores all logits.

Rules shared with JAX, such as chunk ranges, are in `_core.losses`.
"""
