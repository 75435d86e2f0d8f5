"""Collectives of torch.distributed that several packages use."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # The name before torch 2.13.


Groups = dist.ProcessGroup | Sequence[dist.ProcessGroup] | None
"""Ranks of one group; or those along all axes of a mesh, a group for each; or this one alone."""


def max_over_ranks(amax: Tensor, group: Groups) -> Tensor:
    """Replaces fp32 amaxes by their maximum over the ranks of `group`, in place.

    Positive floats order as their bits do, and NaN above all of them, so an integer maximum is exact and keeps NaN,
    which a floating-point collective may drop.
    """
    for each in _others(group):
        dist.all_reduce(amax.view(torch.int32), op=dist.ReduceOp.MAX, group=each)
    return amax


def unlike_ranks(facts: bytes, group: Groups, device: torch.device, *, than: int | None = None) -> list[int]:
    """The ranks of `group` that have other facts than this one, or than rank `than`.

    Collective: an all-gather of 32 bytes a rank, whatever a rank has, and a wait for the device.
    """
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
    """The groups that have other ranks than this one."""
    groups: Any = group if isinstance(group, list | tuple) else [group]
    return [each for each in groups if each is not None and dist.get_world_size(each) > 1]
