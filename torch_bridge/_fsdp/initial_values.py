"""Random values that do not depend on how a weight is cut: each belongs to an element of the whole."""

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
    """The place of a shard of this shape in its weight.

    None if the weight is whole, or sharded by other means than FSDP2 and `parallelize_module`.
    """
    if not state.gathers:
        return None if state.part is None else Box(shape, (0, 0), shape).placed_in(state.part.box)
    if state.part is None and state.whole != state.shape:
        return None
    box = Box(state.whole, divmod(state.first, max(1, state.whole[1])), shape)
    return box if state.part is None else box.placed_in(state.part.box)


def fill(func: object, shard: Tensor, box: Box, low: float, high: float, key: str) -> None:
    """`uniform_` or `normal_` on a shard `[rows, columns]` of a weight.

    The bits of element i are those of SplitMix64 at position i.

    Args:
      box: where it is in the weight.
      low, high: the bounds, or the mean and the standard deviation.
      key: of which the seed is a hash, the same on all ranks.
    """
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")
    rows, columns = shard.shape
    if not shard.numel():
        return
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
    """By way of float64: on CPUs torch has two forms of it, whose last bits differ, and where a shard ends decides."""
    return torch.erfinv(x.double()).to(x.dtype)


def _uniform(index: Tensor, seed: int) -> Tensor:
    """float32 in (0, 1): the midpoints of 2^23 equal parts."""
    z = index * _as_signed(0x9E3779B97F4A7C15) + _as_signed(seed)
    z = (z ^ _shift_right(z, 30)) * _as_signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift_right(z, 27)) * _as_signed(0x94D049BB133111EB)
    z ^= _shift_right(z, 31)
    uniform: Tensor = (_shift_right(z, 41).to(torch.float32) + 0.5) * 2.0**-23
    return uniform


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """As of unsigned numbers."""
    shifted: Tensor = (z >> bits) & (2 ** (64 - bits) - 1)
    return shifted


def _as_signed(word: int) -> int:
    return ((word % 2**64) ^ 2**63) - 2**63
