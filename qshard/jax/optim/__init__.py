"""Optimizers: Adam with states in few bits, and master weights that are cast to quantized weights."""

from qshard.jax.optim.adam import adam, adamw
from qshard.jax.optim.master import cast_master, join_pieces

__all__ = ["adam", "adamw", "cast_master", "join_pieces"]
