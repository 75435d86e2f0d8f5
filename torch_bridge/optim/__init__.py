"""Optimizers: Adam with states in few bits, and master weights that are cast to quantized weights."""

from qshard.torch_bridge.optim.adam import Adam, AdamW
from qshard.torch_bridge.optim.master import CastPlan, cast_master, update_columnwise
from qshard.torch_bridge.optim.slices import QuantizedSlice, gather_slices, join_pieces

__all__ = [
    "Adam",
    "AdamW",
    "CastPlan",
    "QuantizedSlice",
    "cast_master",
    "gather_slices",
    "join_pieces",
    "update_columnwise",
]
