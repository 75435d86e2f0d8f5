"""Sequence parallelism: products of x or y with rows sharded over the ranks that shard the weight.

    whole    all rows of `[*lead, S, *rest, C]`, as a matrix
    run      adjacent rows of the whole on one rank: a shard of S, for one index of `lead`
    own      the local rows: one run for each index of `lead`
    by rank  the rows of the whole in another order: all rows of rank 0, then all rows of rank 1, ...

Ranks exchange codes of x and of the gradient of y. Own rows are quantized, with the scale of the whole if there is one,
and gathered: the codes are bit for bit the codes of one device. Partial sums of y and of the gradient of x are
exchanged as values, and each rank adds the sums of its own rows in rank order.

Products are computed run by run, own rows first. With `overlap`, ranks send codes while other codes are multiplied, and
partial sums while others are computed. GPUs with peer access use their copy engines (PyTorch's symmetric memory),
others send messages. Without `overlap` all communication comes before or after the products. The runs are the same, and
so are the bits.

Each thread caches its last gathered plane until the own rows are freed, so q, k and v share it.
"""

from __future__ import annotations

import math
import socket
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from qshard._core.quantize_steps import Plane, plane_rows
from qshard.formats import Usage
from qshard.layout import block_alignment, is_transposed
from qshard.recipes import Recipe, Role
from qshard.torch_bridge._ops.collectives import all_gather
from qshard.torch_bridge._ops.eager import is_capturing, is_compiling, may_reuse
from qshard.torch_bridge._quantized.gemm import Operand, matmul, matmul_into
from qshard.torch_bridge._torch_internals import functional_collectives as funcol
from qshard.torch_bridge._torch_internals import pipelined_all_gather, pipelined_all_to_all


class Rows(NamedTuple):
    """Shards of the rows of a tensor: each rank of `group` has a run of `run` rows for each of `lead` indices.

    `overlap` tells whether to communicate and multiply at the same time.
    """

    group: dist.ProcessGroup
    lead: int
    run: int
    overlap: bool

    @property
    def ranks(self) -> int:
        return self.group.size()

    def gather(self, own: Operand) -> Callable[[], Operand]:
        """Start to gather a columnwise plane. The returned function waits and returns the whole plane, in row order."""
        known = _recall(own)
        if known is not None:
            return lambda: own._replace(parts=known)
        axis = 1 if is_transposed(own.format, own.usage) else 0
        gathers = [self._start_gather(part) for part in self._sharded_tensors(own)]

        def finish() -> Operand:
            parts = [self._reorder(wait(), axis) for wait in gathers]
            whole = own.parts._replace(**dict(zip(_sharded_fields(own), parts, strict=True)))
            _remember(own, whole)
            return own._replace(parts=whole)

        return finish

    def gather_matmul(self, own: Operand, w: Operand, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
        """Return `x @ w.T` of the whole x, from a rowwise plane of the own rows and the local shard of the weight."""
        x, ranks, runs = own.parts.data, self.ranks, range(self.lead)
        known = _recall(own)
        whole = known or own.parts._replace(
            **{
                name: part.new_empty((ranks * part.shape[0], *part.shape[1:]))
                for name, part in zip(_sharded_fields(own), self._sharded_tensors(own), strict=True)
            }
        )
        if is_compiling():
            parts = [self._start_gather(part)().flatten(0, 1) for part in self._sharded_tensors(own)]
            by_rank = own._replace(parts=own.parts._replace(**dict(zip(_sharded_fields(own), parts, strict=True))))
            order = [rank * self.lead + i for i in runs for rank in range(ranks)]
            return torch.cat([matmul(self._run(by_rank, at), w, dtype, fast=fast) for at in order])
        y: Tensor = x.new_empty((x.shape[0] * ranks, w.rows), dtype=dtype)
        by_rank = own._replace(parts=whole)

        def multiply(rank: int, operand: Operand, first: int) -> None:
            for i in runs:
                at = (i * ranks + rank) * self.run
                matmul_into(self._run(operand, first + i), w, y[at : at + self.run], fast=fast)

        rank = self.group.rank()
        if known is not None:
            for other in _ranks_from(rank, ranks):
                multiply(other, by_rank, other * self.lead)
            return y
        sent, received = self._sharded_tensors(own), self._sharded_tensors(by_rank)
        if not self.overlap:
            for part, there in zip(sent, received, strict=True):
                all_gather(there, part, group=self.group)
            for other in _ranks_from(rank, ranks):
                multiply(other, by_rank, other * self.lead)
        else:
            _gather_each(
                sent,
                received,
                self.group,
                lambda r: multiply(r, *((own, 0) if r == rank else (by_rank, r * self.lead))),
            )
        _remember(own, whole)
        return y

    def matmul_scatter(self, x: Operand, w: Operand, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
        """Return the own rows of the sum over ranks of `x @ w.T`, rounded once; x has all rows of its local columns."""
        ranks, size = self.ranks, self.lead * self.run
        if is_compiling():
            order = [i * ranks + rank for rank in range(ranks) for i in range(self.lead)]
            sent = torch.cat([matmul(self._run(x, at), w, dtype, fast=fast) for at in order])
            exchanged: Tensor = funcol.wait_tensor(funcol.all_to_all_single(sent, None, None, self.group))
            return exchanged.view(ranks, size, -1).sum(0)

        def multiply(rank: int, into: Tensor) -> None:
            for i in range(self.lead):
                run = into[i * self.run : (i + 1) * self.run]
                matmul_into(self._run(x, i * ranks + rank), w, run, fast=fast)

        received: Tensor = x.parts.data.new_empty((ranks, size, w.rows), dtype=dtype)
        if self.overlap:
            _exchange(multiply, received, self.group)
        else:
            sent = torch.empty_like(received)
            for rank in range(ranks):
                multiply(rank, sent[rank])
            dist.all_to_all_single(received, sent, group=self.group)
        return received.sum(0)

    def _run(self, operand: Operand, at: int) -> Operand:
        rows = at * self.run, (at + 1) * self.run
        return operand._replace(parts=plane_rows(operand.parts, operand.format, operand.usage, *rows))

    def _sharded_tensors(self, operand: Operand) -> list[Tensor]:
        return [getattr(operand.parts, name) for name in _sharded_fields(operand)]

    def _start_gather(self, part: Tensor) -> Callable[[], Tensor]:
        """Start to gather a tensor from all ranks. The returned function waits and returns `[ranks, *part]`."""
        if is_compiling():
            whole = funcol.all_gather_tensor(part, 0, self.group)
            return lambda: funcol.wait_tensor(whole).view(self.ranks, *part.shape)
        received = part.new_empty((self.ranks, *part.shape))
        work = all_gather(received.flatten(0, 1), part, group=self.group, async_op=True)

        def wait() -> Tensor:
            work.wait()
            return received

        return wait

    def _reorder(self, received: Tensor, axis: int) -> Tensor:
        """Bring gathered rows, along `axis` of each rank's tensor, into the order of the whole."""
        reordered: Tensor = received.unflatten(axis + 1, (self.lead, -1)).movedim(0, axis + 1)
        return reordered.flatten(axis, axis + 2).contiguous()


def rows_of(
    recipe: Recipe, role: Role, shape: tuple[int, ...], dim: int, group: dist.ProcessGroup, overlap: bool
) -> Rows | None:
    """Return how the rows of a tensor are sharded along axis `dim`; None if they are uneven or split a block."""
    fmt, size, ranks = recipe.format(role), shape[dim], group.size()
    run = size // ranks * math.prod(shape[dim + 1 : -1])
    whole = size % ranks == 0 and run % block_alignment(fmt) == 0 and not recipe.added_rows(role, Usage.BOTH, run)
    return Rows(group, math.prod(shape[:dim]), run, overlap) if whole and 0 not in shape else None


def _sharded_fields(operand: Operand) -> list[str]:
    """Return the tensors of a plane that are sharded with its rows. The others are equal on all ranks."""
    return [name for name in Plane._fields if (part := getattr(operand.parts, name)) is not None and part.ndim]


def _ranks_from(rank: int, ranks: int) -> Iterable[int]:
    return ((rank + step) % ranks for step in range(ranks))


class _GatheredPlane(NamedTuple):
    own: weakref.ref[Tensor]
    usage: Usage
    whole: Plane


_slots = threading.local()


def _recall(own: Operand) -> Plane | None:
    """Return the cached plane of the whole, if it was gathered from these codes."""
    if is_compiling():
        return None
    found: _GatheredPlane | None = _slots.__dict__.get("gathered")
    is_same = found is not None and found.own() is own.parts.data and found.usage is own.usage
    return found.whole if found is not None and is_same else None


def _remember(own: Operand, whole: Plane) -> None:
    data = own.parts.data
    if not may_reuse(data):
        return
    slots = _slots.__dict__

    def forget(dead: weakref.ref[Tensor]) -> None:  # Maybe in another thread.
        found = slots.get("gathered")
        if found is not None and found.own is dead:
            slots["gathered"] = None

    slots["gathered"] = _GatheredPlane(weakref.ref(data, forget), own.usage, whole)


def _gather_each(
    sent: list[Tensor], received: list[Tensor], group: dist.ProcessGroup, consume: Callable[[int], None]
) -> None:
    """Gather `sent` into `received`, and call `consume(rank)` as soon as the rows of a rank have arrived.

    This rank comes first; `consume` reads its rows from `sent`, because `received` gets them last.
    """
    rank, ranks = group.rank(), group.size()
    if copies_memory(group, sent[0].device):
        bytes_sent, bytes_received = ([part.view(torch.uint8) for part in parts] for parts in (sent, received))
        pipelined_all_gather(bytes_sent, lambda _, other: consume(other), bytes_received, group.group_name)
        return
    works = []
    for step in range(1, ranks):
        to, source = (rank - step) % ranks, (rank + step) % ranks
        messages = [
            message
            for tag, (part, there) in enumerate(zip(sent, received, strict=True))
            for message in (
                _message(dist.isend, part, to, group, tag),
                _message(dist.irecv, there.chunk(ranks)[source], source, group, tag),
            )
        ]
        works.append(dist.batch_isend_irecv(messages))
    consume(rank)
    for part, there in zip(sent, received, strict=True):
        there.chunk(ranks)[rank].copy_(part)
    for step, those in enumerate(works, 1):
        for work in those:
            work.wait()
        consume((rank + step) % ranks)


def _exchange(produce: Callable[[int, Tensor], None], received: Tensor, group: dist.ProcessGroup) -> None:
    """All-to-all: `produce(rank, out)` writes the tensor for a rank, and `received` gets one tensor from each rank."""
    rank, ranks = group.rank(), group.size()
    if copies_memory(group, received.device):
        pipelined_all_to_all(produce, received.flatten(0, 1), group.group_name)
        return
    works, sent = [], []
    for step in range(1, ranks):
        to, source = (rank + step) % ranks, (rank - step) % ranks
        sent.append(torch.empty_like(received[rank]))
        produce(to, sent[-1])
        messages = [_message(dist.isend, sent[-1], to, group), _message(dist.irecv, received[source], source, group)]
        works += dist.batch_isend_irecv(messages)
    produce(rank, received[rank])
    for work in works:
        work.wait()


def _message(
    operation: Callable[..., Any], tensor: Tensor, rank: int, group: dist.ProcessGroup, tag: int = 0
) -> dist.P2POp:
    return dist.P2POp(operation, tensor, dist.get_global_rank(group, rank), group, tag)


_copying: weakref.WeakKeyDictionary[dist.ProcessGroup, bool] = weakref.WeakKeyDictionary()


def copies_memory(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return True if all GPUs of a group are on one host with peer access. Collective on the first call."""
    if device.type != "cuda" or is_capturing(device):
        return False
    found = _copying.get(group)
    if found is None:
        locations: list[Any] = [None] * group.size()
        dist.all_gather_object(locations, (socket.gethostname(), device.index), group=group)
        hosts, devices = zip(*locations, strict=True)
        others = [other for other in devices if other != device.index]
        found = len(set(hosts)) == 1 and len(set(devices)) == len(devices) and max(devices) < torch.cuda.device_count()
        mine = found and all(torch.cuda.can_device_access_peer(device.index, other) for other in others)
        answers: list[Any] = [None] * group.size()
        dist.all_gather_object(answers, mine, group=group)
        found = _copying[group] = all(answers)
    return found
