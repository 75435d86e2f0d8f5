"""Random values that do not depend on how a weight is cut: each belongs to an element of the whole."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from qshard.torch_bridge._fsdp.scale_state import ScaleState

aten = torch.ops.aten
_CHUNK = 2**22
RANDOM = {aten.uniform_.default, aten.normal_.default}


def place_of(state: ScaleState, columns: int) -> tuple[int, int] | None:
    """Where in its weight a shard of so many columns begins, and how many the weight has.

    None of one that is whole, or cut by someone else than FSDP2 and `parallelize_module`.
    """
    if state.part is not None:
        return state.part.place(state.first, state.whole[1]) if state.gathers else state.part.place(0, columns)
    return (state.first, state.whole[1]) if state.gathers and state.whole == state.shape else None


def fill(func: object, shard: Tensor, first: int, row_step: int, low: float, high: float, key: str) -> None:
    """`uniform_` or `normal_` on a shard `[rows, columns]` of a weight of `row_step` columns, which begins at `first`.

    The bits of element i are those of SplitMix64 at position i.

    Args:
      low, high: the bounds, or the mean and the standard deviation.
      key: of which the seed is a hash, the same on all ranks.
    """
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")
    rows, columns = shard.shape
    if not shard.numel():
        return
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
    z = index * _signed(0x9E3779B97F4A7C15) + _signed(seed)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    z ^= _shifted(z, 31)
    uniform: Tensor = (_shifted(z, 41).to(torch.float32) + 0.5) * 2.0**-23
    return uniform


def _shifted(z: Tensor, bits: int) -> Tensor:
    """As of unsigned numbers."""
    shifted: Tensor = (z >> bits) & (2 ** (64 - bits) - 1)
    return shifted


def _signed(word: int) -> int:
    return ((word % 2**64) ^ 2**63) - 2**63
