"""Optimizers: Adam with low-precision states, primary weights with masters, casts of masters, and ZeRO.

The formula of Adam is an op. The checks of its settings are in `_core.optimizers`.
"""
