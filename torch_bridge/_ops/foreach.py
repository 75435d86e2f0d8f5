"""The ops of `flat_shards` on torch tensors: those on lists of flat slices, and what a plan needs on its device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qshard._core.flat_shards import Bucket, MasterPlan
from qshard.torch_bridge._ops.bind import ops

__all__ = ["SliceOps"]


class SliceOps:
    """What the steps of `_core.flat_shards` take for `ops`, for one plan on one device. Make it once a plan."""

    def __init__(self, plan: MasterPlan, device: torch.device):
        self.__dict__.update(vars(ops))
        self._plan, self._device = plan, device
        # By the first weight, which is of one bucket.
        self._rows = {b.indices[0]: self._tensor(b.indices) for b in plan.buckets if len(plan.buckets) > 1}
        self._runs = {b.indices[0]: self._tensor(b.runs) for b in plan.buckets if any(each != 1 for each in b.runs)}

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
        runs = self._runs.get(bucket.indices[0])
        return values if runs is None else torch.repeat_interleave(values, runs, output_size=sum(bucket.runs))
