"""Ops on lists of flat slices, and their plans: the steps of `flat_shards` and `placement` on torch tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from qshard._core import flat_shards
from qshard._core.flat_shards import FlatSlice, MasterPlan, SliceBatch
from qshard._core.quantize_steps import Scales
from qshard.torch_bridge._ops.bind import ops
from qshard.torch_bridge._ops.uint64 import as_uint64

__all__ = ["FlatPlan", "SliceOps", "adjacent_view", "flat_plan", "xp"]


class SliceOps:
    """The argument `ops` of the steps of `_core.flat_shards`, for one plan on one device. Create it once per plan."""

    def __init__(self, plan: MasterPlan, device: torch.device):
        self.__dict__.update(vars(ops))
        self._plan, self._device = plan, device
        # Keyed by the first weight of a batch: each weight is in one batch.
        self._rows = {b.indices[0]: self._tensor(b.indices) for b in plan.batches if len(plan.batches) > 1}
        # Which value serves each run: an index, because `repeat_interleave` computes one in each call.
        self._of_runs = {
            b.indices[0]: self._tensor([i for i, count in enumerate(b.runs) for _ in range(count)])
            for b in plan.batches
            if any(each != 1 for each in b.runs)
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return SliceOps, (self._plan, self._device)

    def _tensor(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64).to(self._device)

    def zeros(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.float32, device=self._device)

    def concatenate(self, arrays: Sequence[Tensor]) -> Tensor:
        return torch.cat([*arrays])

    def of_batch(self, pairs: Tensor, batch: SliceBatch) -> Tensor:
        rows = self._rows.get(batch.indices[0])
        # Indexed as int32, because CUDA cannot index uint32.
        return pairs if rows is None else pairs.view(torch.int32)[rows].view(pairs.dtype)

    def repeat_values(self, values: Tensor, batch: SliceBatch) -> Tensor:
        index = self._of_runs.get(batch.indices[0])
        return values if index is None else values.view(-1).index_select(0, index)


class FlatPlan:
    """The local slices of some weights on one device, with the steps of `_core.flat_shards` on them.

    FSDP2, ZeRO, weight sync and experts quantize with it: amaxes, which callers reduce over ranks; scales; codes.

    Constant operands are created on first use, because fake tensors do not need them.
    """

    def __init__(self, slices: Sequence[FlatSlice], device: torch.device):
        self._slices, self._device = slices, device
        self.plan: MasterPlan = flat_shards.plan_master(slices)

    @functools.cached_property
    def ops(self) -> SliceOps:
        return SliceOps(self.plan, self._device)

    @functools.cached_property
    def starts(self) -> Tensor:
        return as_uint64("flat_plan", "starts", [s.start for s in self._slices], self._device, len(self._slices))

    def amaxes(self, shards: Sequence[Tensor]) -> Tensor:
        """Compute the contribution of these slices to the amaxes of all weights, fp32 `[plan.amaxes]`."""
        result: Tensor = flat_shards.amaxes(self.ops, self.plan, shards, self.starts)
        return result

    def scales(self, amaxes: Tensor) -> list[Scales]:
        """Compute the scales of the weights of each batch from their reduced amaxes."""
        return flat_shards.scales(self.ops, self.plan, amaxes)

    def split_scales(self, of_batches: Sequence[Scales]) -> list[Scales]:
        """Split the scales of all batches by weight, with fewer torch calls than `SliceBatch.split`."""
        return self.plan.by_weight(map(_split_batch, self.plan.batches, of_batches))

    def join_scales(self, of_weights: Sequence[Tensor]) -> list[Tensor]:
        """Join the encoding scales of weights by batch, without a copy if `split_scales` split them."""
        of_batches = [[of_weights[i] for i in batch.indices] for batch in self.plan.batches]
        return [
            joined if (joined := adjacent_view(each)) is not None else torch.cat([scale.view(-1) for scale in each])
            for each in of_batches
        ]

    def cast(self, data: Sequence[Tensor], shards: Sequence[Tensor], scales: Sequence[Tensor], *, pieces: bool) -> None:
        """Write the codes of the slices into `data`, using `Scales.scale` of each batch."""
        flat_shards.cast(self.ops, self.plan, data, shards, self.starts, scales, pieces=pieces)


def _split_batch(batch: SliceBatch, scales: Scales) -> Iterator[Scales]:
    grids = [where.scale_shape for where in batch.planes]
    parts = [_split(scales.scale, grids), _split(scales.scale_inv, grids)]
    if scales.global_scale_inv is not None:
        parts.append(_split(scales.global_scale_inv, [where.global_scale_shape or () for where in batch.planes]))
    return (Scales(*each) for each in zip(*parts, strict=True))


def _split(numbers: Tensor, shapes: Sequence[tuple[int, ...]]) -> Sequence[Tensor]:
    if not any(shapes):
        return numbers.unbind()
    sizes = [math.prod(shape) for shape in shapes]
    return [part.view(shape) for part, shape in zip(numbers.split(sizes), shapes, strict=True)]


def adjacent_view(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return contiguous tensors as one flat view, if they lie one after the other in one storage; else None."""
    first, last, end, count = tensors[0], tensors[-1], tensors[0].data_ptr(), 0
    if last is not first and first.untyped_storage().data_ptr() != last.untyped_storage().data_ptr():
        return None
    for tensor in tensors:
        if tensor.data_ptr() != end:
            return None
        end += tensor.nbytes
        count += tensor.numel()
    whole: Tensor = first.as_strided((count,), (1,))
    return whole


@functools.lru_cache(maxsize=4096)
def flat_plan(slices: tuple[FlatSlice, ...], device: torch.device) -> FlatPlan:
    """Return the cached plan of slices that recur in each step, which saves planning and a copy from the host."""
    return FlatPlan(slices, device)


def _pad(x: Tensor, sides: Sequence[tuple[int, int]]) -> Tensor:
    """Pad with zeros like `numpy.pad`, by (before, after) of each axis."""
    return torch.nn.functional.pad(x, [size for pair in reversed(sides) for size in pair])


xp = SimpleNamespace(pad=_pad, maximum=torch.maximum, int32=torch.int32)
"""The array functions that steps of `_core.placement` use instead of NumPy's."""
