"""Collectives of torch.distributed that several packages use."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # The name before torch 2.13.


def max_over_ranks(amax: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Replaces fp32 amaxes by their maximum over the ranks of `group`, in place.

    Positive floats order as their bits do, and NaN above all of them, so an integer maximum is exact and keeps NaN,
    which a floating-point collective may drop.
    """
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(amax.view(torch.int32), op=dist.ReduceOp.MAX, group=group)
    return amax
