"""Collectives of torch.distributed used by several packages."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # The name before torch 2.13.


Groups = dist.ProcessGroup | Sequence[dist.ProcessGroup] | None
"""A process group; a list with one group per mesh axis; or None for this rank alone."""


def max_over_ranks(amax: Tensor, group: Groups) -> Tensor:
    """Replace fp32 amaxes by their maximum over the ranks of `group`, in place.

    Nonnegative floats order like their bits, with NaN above all. So an integer maximum is exact and keeps NaN, which a
    floating-point collective may drop.
    """
    for each in _others(group):
        dist.all_reduce(amax.view(torch.int32), op=dist.ReduceOp.MAX, group=each)
    return amax


def unlike_ranks(facts: bytes, group: Groups, device: torch.device, *, than: int | None = None) -> list[int]:
    """Return the ranks with other facts than this rank or rank `than`. Collective; the host waits for the device."""
    mine = hashlib.sha256(facts).digest()
    digests = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
    for each in _others(group):
        everyone = [torch.empty_like(digests) for _ in range(dist.get_world_size(each))]
        dist.all_gather(everyone, digests, group=each)
        digests = torch.cat(everyone)
    found = [bytes(each) for each in digests.view(-1, len(mine)).tolist()]
    own = mine if than is None else found[than]
    return [rank for rank, other in enumerate(found) if other != own]


def _others(group: Groups) -> list[dist.ProcessGroup]:
    """Return the groups with more than one rank."""
    groups: Any = group if isinstance(group, list | tuple) else [group]
    return [each for each in groups if each is not None and dist.get_world_size(each) > 1]
