"""The ops of `qshard.master` on torch tensors: those on lists of flat slices, and what a plan needs on its device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qshard.master import Bucket, MasterPlan
from qshard.torch_bridge.ops import ops

__all__ = ["SliceOps"]


class SliceOps:
    """What the steps of `qshard.master` take for `ops`, for one plan on one device. Make it once a plan."""

    def __init__(self, plan: MasterPlan, device: torch.device):
        self.__dict__.update(vars(ops))
        self._plan, self._device = plan, device
        # By the first weight, which is of one bucket.
        self._rows = {b.indices[0]: self._tensor(b.indices) for b in plan.buckets if len(plan.buckets) > 1}
        self._repeats = {
            b.indices[0]: self._tensor([each for count, each in b.repeats for _ in range(count)])
            for b in plan.buckets
            if any(count > 1 for count, _ in b.repeats)
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return SliceOps, (self._plan, self._device)

    def _tensor(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64).to(self._device)

    def zeros(self, count: int) -> Tensor:
        return torch.zeros(count, device=self._device)

    def joined(self, arrays: Sequence[Tensor]) -> Tensor:
        return torch.cat([*arrays])

    def of_bucket(self, pairs: Tensor, bucket: Bucket) -> Tensor:
        rows = self._rows.get(bucket.indices[0])
        # Indexed as int32: CUDA does not index uint32.
        return pairs if rows is None else pairs.view(torch.int32)[rows].view(pairs.dtype)

    def repeated(self, values: Tensor, bucket: Bucket) -> Tensor:
        if (repeats := self._repeats.get(bucket.indices[0])) is not None:
            return torch.repeat_interleave(values, repeats, output_size=bucket.blocks)
        # repeat_interleave has one warp for each value, which is slow where values are few and blocks many.
        each = zip(values.split(1), bucket.grids, strict=True)
        return torch.cat([value.expand(blocks) for value, blocks in each])
