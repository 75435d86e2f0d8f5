"""Random initial values of sharded weights that do not depend on the sharding.

Each random value belongs to an element of the whole weight, so any number of ranks initializes the same weight.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qshard._core.placement import Box

if TYPE_CHECKING:
    from qshard.torch_bridge._fsdp.scale_state import ScaleState

aten = torch.ops.aten
_CHUNK = 2**22
RANDOM = {aten.uniform_.default, aten.normal_.default}


def box_of(state: ScaleState, shape: tuple[int, ...]) -> Box | None:
    """Return the position of a shard of this shape in its weight.

    None if the weight is not sharded, or is sharded by anything but FSDP2 and `parallelize_module`.
    """
    if not state.gathers:
        return None if state.part is None else Box(shape, (0,) * len(shape), shape).placed_in(state.part.box)
    if state.part is None and state.whole != state.shape:
        return None
    start: list[int] = []
    first = state.first
    for size in reversed(state.whole[1:]):
        first, index = divmod(first, max(1, size))
        start.insert(0, index)
    box = Box(state.whole, (first, *start), shape)
    return box if state.part is None else box.placed_in(state.part.box)


def fill(func: object, shard: Tensor, box: Box, low: float, high: float, key: str) -> None:
    """Apply `uniform_` (bounds `low` and `high`) or `normal_` (mean and standard deviation) to a shard of a weight.

    Element i of the whole weight takes its random bits from SplitMix64 at position i. The seed is a hash of `key`.
    """
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")
    if not shard.numel():
        return
    if shard.ndim > 2:
        for index, rectangle in box.rectangles():
            fill(func, shard[index].view(rectangle.size), rectangle, low, high, key)
        return
    rows, columns = shard.shape
    first, row_step = box.philox_offset(), box.global_shape[1]
    step = max(1, _CHUNK // columns)
    for row in range(0, rows, step):
        part = shard[row : row + step]
        index = torch.arange(row, row + part.shape[0], device=shard.device)[:, None] * row_step + first
        index = index + torch.arange(columns, device=shard.device)
        uniform = _uniform(index, seed)
        if func is aten.uniform_.default:
            part.copy_(uniform * (high - low) + low)
        else:
            part.copy_(exact_erfinv(2 * uniform - 1) * (math.sqrt(2) * high) + low)


def exact_erfinv(x: Tensor) -> Tensor:
    """Compute `erfinv` in float64.

    On CPUs torch has two float32 forms, and the end of a shard decides which one runs.
    """
    return torch.erfinv(x.double()).to(x.dtype)


def _uniform(index: Tensor, seed: int) -> Tensor:
    """Return float32 values in (0, 1): midpoints of 2^23 equal intervals."""
    z = index * _as_signed(0x9E3779B97F4A7C15) + _as_signed(seed)
    z = (z ^ _shift_right(z, 30)) * _as_signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift_right(z, 27)) * _as_signed(0x94D049BB133111EB)
    z ^= _shift_right(z, 31)
    uniform: Tensor = (_shift_right(z, 41).to(torch.float32) + 0.5) * 2.0**-23
    return uniform


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Shift int64 right as if it were unsigned."""
    shifted: Tensor = (z >> bits) & (2 ** (64 - bits) - 1)
    return shifted


def _as_signed(word: int) -> int:
    return ((word % 2**64) ^ 2**63) - 2**63
