"""Exchange of tokens between ranks that have different experts (expert parallelism).

    source rows     rows of the tokens of this rank, sorted by the index of their expert among all E experts
    received rows   rows of all ranks for the E / R experts of this rank: rank 0's first, each sorted by expert

Ranks tell each other the number of rows of each expert, and the host waits for these counts once, because the split
sizes of `all_to_all_single` are on the host. Later exchanges of the same tokens reuse them.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Hashable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from qshard._core.validation import quote
from qshard.torch_bridge._ops.collectives import max_over_ranks

ExpertGroup = dist.ProcessGroup | DeviceMesh
"""The ranks that share the experts of a layer: a process group, or a mesh of one axis."""


def expert_group(op: str, ep_group: Any) -> dist.ProcessGroup:
    """Return the process group of `ep_group`: a group, or a DeviceMesh of one axis."""
    if isinstance(ep_group, DeviceMesh) and ep_group.ndim == 1:
        return ep_group.get_group()
    if not isinstance(ep_group, dist.ProcessGroup):
        what = f"a DeviceMesh of {ep_group.ndim} axes" if isinstance(ep_group, DeviceMesh) else quote(ep_group)
        raise TypeError(
            f"{op}: ep_group ({what}) is not a ProcessGroup or a DeviceMesh of one axis; pass the ranks that share the "
            "experts, such as mesh['ep']"
        )
    return ep_group


def expert_mesh(ep_group: ExpertGroup) -> DeviceMesh:
    """Return the mesh of `ep_group`, for DTensors that are sharded over it."""
    if isinstance(ep_group, DeviceMesh):
        return ep_group
    kind = "cuda" if "nccl" in dist.get_backend(ep_group) else "cpu"
    return DeviceMesh.from_group(ep_group, kind, mesh_dim_names=("ep",))


_WORDS = 256
"""Messages with the counts of a pair of ranks are padded to whole multiples of so many int32."""


class TokenExchange:
    """The counts of one exchange, and the order of received rows. Collective: all ranks of the group build it together.

    Args:
      group_sizes: int32 `[E]`, the number of source rows of each expert, on the device of the rows.
      rows: M, the number of source rows. Rows after the last group are not sent.
      group: R ranks. Rank r has experts `r * E / R` to `(r + 1) * E / R`.
      facts: what all ranks must agree on.

    Attributes:
      rows: M.
      received: T, the number of received rows.
      group_sizes: int32 `[E / R]`: received rows of each local expert.
      ends: int32 `[E]`: for each expert, the end of its source rows.
      order: int64 `[T]`: received rows in the order of experts. Rows of an expert keep the order of ranks and tokens.
      position: int64 `[T]`, the inverse.

    Raises:
      ValueError: ranks disagree on the number of experts or on `facts`. All ranks raise, before any rows are sent.
    """

    def __init__(self, group_sizes: Tensor, rows: int, group: dist.ProcessGroup, facts: Hashable):
        self.rows, self._group, self._ranks = rows, group, group.size()
        of_ranks = group_sizes.view(self._ranks, -1)
        own, facts = of_ranks.shape[1], (("experts of each rank", of_ranks.shape[1]), facts)
        # Facts go with the counts, in messages of one size, so that ranks that differ raise instead of waiting.
        sent = group_sizes.new_zeros((self._ranks, -(-(own + 1) // _WORDS) * _WORDS), dtype=torch.int32)
        sent[:, 0], sent[:, 1 : own + 1] = _digest(facts), of_ranks
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        counts = received[:, 1 : own + 1]
        on_host = torch.stack([of_ranks.sum(1), counts.sum(1), received[:, 0].to(torch.int64)])
        self._sent, self._received, digests = on_host.tolist()  # The host waits.
        others = [rank for rank, other in enumerate(digests) if other != digests[group.rank()]]
        if others:
            raise ValueError(
                f"grouped_mlp: rank {others[0]} of ep_group has other experts, recipe, dtype of x or gradients than "
                f"rank {group.rank()}: {quote(facts)}; pass the same on all ranks"
            )
        self.received = sum(self._received)
        self.group_sizes = counts.sum(0, dtype=torch.int32)
        self.ends = group_sizes.cumsum(0, dtype=torch.int32)
        self.position, self.order = _sorted_by_expert(counts, self.received)

    def dispatch(self, rows: Tensor, spare: int = 0) -> Tensor:
        """Send source rows `[M, C]` to the ranks of their experts: `[T + spare, C]`. Spare rows are zeros."""
        received = rows.new_empty((self.received + spare, rows.shape[1]))
        received[self.received :].zero_()
        sent = rows[: sum(self._sent)].contiguous()
        dist.all_to_all_single(received[: self.received], sent, self._received, self._sent, group=self._group)
        return received

    def combine(self, rows: Tensor) -> Tensor:
        """Return received rows `[T, C]` to their source ranks: `[M, C]`. Rows that were not sent are zeros."""
        source = rows.new_empty((self.rows, rows.shape[1]))
        sent = sum(self._sent)
        source[sent:].zero_()
        dist.all_to_all_single(source[:sent], rows.contiguous(), self._sent, self._received, group=self._group)
        return source

    def reduce_max(self, amax: Tensor) -> Tensor:
        """Replace amaxes of all experts by their maxima over the ranks."""
        return max_over_ranks(amax, self._group)

    def own(self, of_experts: Tensor) -> Tensor:
        """Return the part `[E / R]` of a tensor of all experts `[E]` that belongs to the experts of this rank."""
        return of_experts.chunk(self._ranks)[self._group.rank()]


def _sorted_by_expert(counts: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return the position of each received row among rows sorted by expert, and the inverse; `counts` is `[R, E/R]`."""
    by_rank, by_expert = counts.flatten(), counts.t().flatten()
    begins = (by_expert.cumsum(0) - by_expert).view(counts.shape[::-1]).t().flatten()
    ends = by_rank.cumsum(0)
    row = torch.arange(rows, device=counts.device)
    run = torch.searchsorted(ends, row, right=True)
    position = row + (begins - (ends - by_rank)).index_select(0, run)
    return position, torch.empty_like(row).scatter_(0, position, row)


@functools.lru_cache(maxsize=64)
def _digest(facts: Hashable) -> int:
    return int.from_bytes(hashlib.sha256(repr(facts).encode()).digest()[:4], "little", signed=True)
