"""Saved activations sharded over ranks that have the same x: each rank saves part of the codes for backward.

These are tensor-parallel ranks. Data-parallel ranks have different batches and would gather an x that no rank has. So
ranks compare their codes when a layer splits them for the first time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from qshard._core.quantize_steps import Plane
from qshard.torch_bridge._ops.collectives import all_gather, unlike_ranks

Join = Callable[[Tensor], Tensor]

_PART = "_qshard_part"


class ActivationGroup:
    """Ranks that each save 1/W of the bytes of the codes of x for backward. Layers have one, unless unpickled."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self._agreed = False

    def __deepcopy__(self, memo: dict[int, Any]) -> ActivationGroup:
        return ActivationGroup(self.group)

    def __reduce__(self) -> tuple[Any, ...]:
        return _none, ()

    def split(self, x: Plane) -> tuple[Plane, Join]:
        """Return the plane with this rank's part of the codes, and a collective function that gathers the codes.

        The part is flat uint8, zero-padded to equal length on all ranks. Layers that share x share the part. The first
        split raises ValueError on all ranks if they have different codes.
        """
        codes = x.data
        join = functools.partial(self._join, shape=codes.shape, dtype=codes.dtype)
        return x._replace(data=self._part_of(codes)), join

    def _part_of(self, codes: Tensor) -> Tensor:
        if not self._agreed:
            self._check(codes)
        known: tuple[dist.ProcessGroup, Tensor] | None = codes.__dict__.get(_PART)
        if known is not None and known[0] is self.group:
            return known[1]
        whole = codes.contiguous().view(torch.uint8).view(-1)
        size = self._size(whole.numel())
        part = whole.new_zeros(size)
        mine = whole[size * dist.get_rank(self.group) :][:size]
        part[: mine.numel()].copy_(mine)
        setattr(codes, _PART, (self.group, part))
        return part

    def _join(self, part: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        size = shape.numel() * dtype.itemsize
        whole = part.new_empty(self._size(size) * dist.get_world_size(self.group))
        all_gather(whole, part, group=self.group)
        return whole[:size].view(dtype).view(shape)

    def _size(self, whole: int) -> int:
        return -(-whole // dist.get_world_size(self.group))

    def _check(self, codes: Tensor) -> None:
        text = repr((tuple(codes.shape), codes.dtype)).encode()
        facts = text + codes.contiguous().view(torch.uint8).cpu().numpy().tobytes()
        others = unlike_ranks(facts, self.group, codes.device, to_first=True)
        if others:
            raise ValueError(
                f"Linear: rank {others[0]} has another x (codes of {tuple(codes.shape)}) than the first rank of "
                "activation_group; pass the tensor-parallel ranks, which share x, not the data-parallel ones"
            )
        self._agreed = True


def _none() -> None:
    return None
