"""Optimizers: Adam with low-precision states, primary weights with masters, casts of masters, and ZeRO.

The formula of Adam is an op; its settings are in `_core.adam`.
"""
