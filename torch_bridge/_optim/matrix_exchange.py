"""All-to-alls of `Muon`: parts of matrices go to the ranks that own them, and results come back.

Shards are boxes of a parameter, or flat slices of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from qshard._core.optimizers.muon_plan import MatrixBucket, UnitPart
from qshard._core.placement import Index

_Messages = Sequence[Sequence[UnitPart]]  # Parts for each rank.


class Sending(NamedTuple):
    """An all-to-all that may still run. `buffer` has the messages of all ranks, in their order."""

    buffer: Tensor
    work: dist.Work | None

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.buffer


class MatrixExchange:
    """The exchange of one bucket on this rank. Values are bfloat16.

    Args:
      bucket: the plan, equal on all ranks.
      group: the ranks; None for this rank alone.
      device: the device of messages and whole matrices.
    """

    def __init__(self, bucket: MatrixBucket, group: dist.ProcessGroup | None, device: torch.device):
        rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        self.bucket, self._group, self._device = bucket, group, device
        self._sent, self._received = bucket.sent_to_owner(rank, ranks), bucket.received_by_owner(rank, ranks)
        self._returned, self._results = bucket.returned_by_owner(rank, ranks), bucket.returned_to(rank, ranks)
        moves = [(part.sends, part.rank != bucket.owners[part.unit]) for part in bucket.parts]
        self._is_sent = any(sends and moved for sends, moved in moves)
        self._is_returned = any(moved for _, moved in moves)

    def send(self, parts: Sequence[Tensor]) -> Sending:
        """Begin to send the local parts, one tensor for each parameter of the bucket, to the owners of its units."""
        position = {parameter: i for i, parameter in enumerate(self.bucket.parameters)}
        local = [
            [_at(parts[position[self.bucket.units[part.unit][0]]], part.local) for part in message]
            for message in self._sent
        ]
        return self._all_to_all(local, self._received, self._is_sent)

    def units(self, sending: Sending) -> dict[int, Tensor]:
        """Return the whole matrices that this rank owns, by unit."""
        units: dict[int, Tensor] = {}
        for part, values in _split(sending.wait(), self._received):
            shape = self.bucket.units[part.unit][1].size
            if part.size == math.prod(shape):
                units[part.unit] = values.view(shape)
                continue
            if part.unit not in units:
                units[part.unit] = values.new_empty(shape)
            _at(units[part.unit], part.whole).copy_(values)
        return units

    def send_back(self, results: dict[int, Tensor]) -> Sending:
        """Begin to send the results of this rank's units to all ranks that have a part."""
        whole = {unit: result.contiguous() for unit, result in results.items()}  # Flat slices need it.
        local = [[_at(whole[part.unit], part.whole) for part in message] for message in self._returned]
        return self._all_to_all(local, self._results, self._is_returned)

    def parts(self, sending: Sending, shapes: Sequence[torch.Size], devices: Sequence[torch.device]) -> list[Tensor]:
        """Return the parts of results that belong to the local shards, one tensor for each parameter of the bucket."""
        position = {parameter: i for i, parameter in enumerate(self.bucket.parameters)}
        found: list[Tensor | None] = [None] * len(shapes)
        for part, values in _split(sending.wait(), self._results):
            i = position[self.bucket.units[part.unit][0]]
            if part.size == shapes[i].numel():
                found[i] = values.view(shapes[i]).to(devices[i])
                continue
            if (result := found[i]) is None:
                result = found[i] = torch.empty(shapes[i], dtype=values.dtype, device=devices[i])
            _at(result, part.local).copy_(values)
        pairs = zip(shapes, devices, strict=True)
        empty = [torch.empty(shape, dtype=torch.bfloat16, device=device) for shape, device in pairs]
        return [other if result is None else result for result, other in zip(found, empty, strict=True)]

    def _all_to_all(self, local: Sequence[Sequence[Tensor]], received: _Messages, moves: bool) -> Sending:
        sent = [sum(part.numel() for part in message) for message in local]
        buffer = torch.empty(sum(sent), dtype=torch.bfloat16, device=self._device)
        start = 0
        for part in (part for message in local for part in message):
            buffer[start : start + part.numel()].view(part.shape).copy_(part)
            start += part.numel()
        if not moves:  # On no rank: each rank only has messages for itself.
            return Sending(buffer, None)
        sizes = [sum(part.size for part in message) for message in received]
        output = buffer.new_empty(sum(sizes))
        work = dist.all_to_all_single(
            output.view(torch.uint8),  # Bytes, for gloo.
            buffer.view(torch.uint8),
            [2 * size for size in sizes],
            [2 * size for size in sent],
            group=self._group,
            async_op=True,
        )
        return Sending(output, work)


def _at(values: Tensor, index: Index) -> Tensor:
    """Return a view of a shard or a unit. An index of one axis is of the flattened tensor."""
    return values[index] if len(index) == values.ndim else values.view(-1)[index]


def _split(buffer: Tensor, messages: _Messages) -> list[tuple[UnitPart, Tensor]]:
    parts = [part for message in messages for part in message]
    values = buffer.split([part.size for part in parts]) if parts else ()
    return [(part, each.view(part.shape)) for part, each in zip(parts, values, strict=True)]
