"""Collectives of torch.distributed used by several packages."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # The name before torch 2.13.
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

_gather_coalesced = (
    getattr(dist.ProcessGroup, "all_gather_single_coalesced", None) or dist.ProcessGroup.allgather_into_tensor_coalesced
)

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


def begin_max(amax: Tensor, group: dist.ProcessGroup | None) -> dist.Work | None:
    """Begin `max_over_ranks` over one group. None: there is nothing to wait for."""
    if not _others(group):
        return None
    work: dist.Work = dist.all_reduce(amax.view(torch.int32), op=dist.ReduceOp.MAX, group=group, async_op=True)
    return work


class PendingGather(NamedTuple):
    """An all-gather of several arrays with one call, which may still run.

    Attributes:
      arrays: the arrays of this rank.
      outputs: bytes of the arrays of all ranks.
      work: None if there is one rank.
    """

    arrays: Sequence[Tensor]
    outputs: Sequence[Tensor]
    work: dist.Work | None

    @classmethod
    def begin(cls, arrays: Sequence[Tensor], group: dist.ProcessGroup | None) -> PendingGather:
        """Begin to gather arrays, which have equal shapes on all ranks. Collective."""
        if group is None or not arrays or (ranks := dist.get_world_size(group)) == 1:
            return cls(arrays, arrays, None)
        # As bytes: gloo copies all arrays of a call through one buffer of one dtype.
        sent = [
            each.contiguous() if _is_flat(each) else each.contiguous().view(-1).view(torch.uint8) for each in arrays
        ]
        outputs = [each.new_empty(ranks * each.numel()) for each in sent]
        return cls(arrays, outputs, _gather_coalesced(group, outputs, sent))

    def wait(self) -> list[Tensor]:
        """Return the gathered arrays, rank after rank along the first axis; the current stream waits for them."""
        if self.work is None:
            return [*self.arrays]
        self.work.wait()
        pairs = zip(self.outputs, self.arrays, strict=True)
        return [each if _is_flat(own) else each.view(own.dtype).view(-1, *own.shape[1:]) for each, own in pairs]


def _is_flat(array: Tensor) -> bool:
    """Return whether an array is a list of bytes, as codes and their scales are."""
    return array.ndim == 1 and array.dtype == torch.uint8


def join_scalars(tensors: Sequence[Tensor], axes: int = 0) -> Tensor:
    """Concatenate numbers of tensors `[]` and of experts `[E]` to `[n]`. Each number may be an array of `axes` axes."""
    if all([tensor.ndim == axes for tensor in tensors]):  # noqa: C419, called in every step.
        return torch.stack([*tensors])
    return torch.cat([tensor if tensor.ndim > axes else tensor[None] for tensor in tensors])


def split_scalars(joined: Tensor, like: Sequence[Tensor], axes: int = 0) -> Sequence[Tensor]:
    """Split the result of `join_scalars` into parts of the shapes of `like`."""
    if all([tensor.ndim == axes for tensor in like]):  # noqa: C419
        return joined.unbind()
    parts = joined.split([math.prod(tensor.shape[: tensor.ndim - axes]) for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def unlike_ranks(facts: bytes, group: Groups, device: torch.device, *, to_first: bool = False) -> list[int]:
    """Compare facts over ranks. Return the global ranks that differ from this rank, or from the first if `to_first`.

    Collective. The host waits for the device.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    mine = hashlib.sha256(facts).digest()
    messages = torch.frombuffer(bytearray(mine + rank.to_bytes(8, "little")), dtype=torch.uint8).to(device)
    size = messages.numel()
    for each in _others(group):
        everyone = [torch.empty_like(messages) for _ in range(dist.get_world_size(each))]
        dist.all_gather(everyone, messages, group=each)
        messages = torch.cat(everyone)
    received = [bytes(each) for each in messages.view(-1, size).tolist()]
    digests = {int.from_bytes(each[len(mine) :], "little"): each[: len(mine)] for each in received}
    own = next(iter(digests.values())) if to_first else mine
    return [rank for rank, digest in digests.items() if digest != own]


def _others(group: Groups) -> list[dist.ProcessGroup]:
    """Return the groups with more than one rank."""
    groups: Any = group if isinstance(group, list | tuple) else [group]
    return [each for each in groups if each is not None and dist.get_world_size(each) > 1]
