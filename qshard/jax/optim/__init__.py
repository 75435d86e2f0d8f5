"""Optimizers: Adam with states in few bits, and master weights that are cast to quantized weights."""

from qshard.jax.optim.adam import adam
from qshard.jax.optim.master import cast_master, join_pieces

__all__ = ["adam", "cast_master", "join_pieces"]
