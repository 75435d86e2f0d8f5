"""Padded rows of experts as tensors: gathered rows, and the values of experts for each of their rows.

`_core/operands.py` needs these for formats that no op quantizes into padded rows.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Gather rows of x `[T, K]` into padded rows `[P, K]`; zeros where `rows` has a number outside of x."""
    if not x.shape[0]:
        return x.new_zeros((rows.shape[0], x.shape[1]))
    is_row = ((rows >= 0) & (rows < x.shape[0]))[:, None]
    return torch.where(is_row, x.index_select(0, rows.clamp(0, x.shape[0] - 1)), 0)


def experts_of_strips(stops: Tensor, strip: int, count: int) -> Tensor:
    """Return the expert of the first row of each strip of `strip` padded rows, int64 `[count]`; E for no expert."""
    first = torch.arange(0, strip * count, strip, dtype=stops.dtype, device=stops.device)
    return torch.searchsorted(stops, first, right=True)


def values_of_strips(values: Tensor, stops: Tensor, strip: int, shape: tuple[int, ...]) -> Tensor:
    """Repeat the value of each expert for its strips, along the last axis of `shape`. Strips of no expert get 0."""
    own = torch.nn.functional.pad(values, (0, 1)).index_select(0, experts_of_strips(stops, strip, shape[-1]))
    return own.expand(shape).contiguous()


def philox_of_rows(seeds: Tensor, stops: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return the Philox key and offset of each padded row, int32 `[rows, 2]`: each expert counts its own elements."""
    expert = experts_of_strips(stops, 1, rows)
    begin = torch.nn.functional.pad(stops, (1, 0)).index_select(0, expert)
    first = (torch.arange(rows, device=stops.device) - begin) * columns
    own = expert.clamp(max=stops.shape[0] - 1)
    return seeds.view(torch.int32).index_select(0, own), first.view(torch.int32).view(-1, 2)
