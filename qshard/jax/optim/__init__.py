"""Optimizers: Adam with states in few bits, masters of primary weights, and masters in slices."""

from qshard.jax.optim.adam import adam, adamw
from qshard.jax.optim.master import cast_master, join_pieces
from qshard.jax.optim.masters import PrimaryOptimizer, PrimaryState, optimizer

__all__ = ["PrimaryOptimizer", "PrimaryState", "adam", "adamw", "cast_master", "join_pieces", "optimizer"]
