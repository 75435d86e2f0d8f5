"""Whole models: `convert` for flax nnx.

The modules that replace a layer, `qshard.jax.nnx` and `qshard.jax.linen`, are public and stand outside.
"""
