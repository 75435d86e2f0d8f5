"""Sequence parallelism: products of x or y with rows sharded over the ranks that shard the weight.

    whole    all rows of `[*lead, S, *rest, C]`, as a matrix
    run      adjacent rows of the whole on one rank: a shard of S, for one index of `lead`
    own      the local rows: one run for each index of `lead`
    by rank  the rows of the whole in another order: all rows of rank 0, then all rows of rank 1, ...

Ranks exchange codes of x and of the gradient of y. Own rows are quantized, with the scale of the whole if there is one,
and gathered: the codes are bit for bit the codes of one device. Partial sums of y and of the gradient of x are
exchanged as values, and each rank adds the sums of its own rows in rank order.

With `overlap`, products are computed run by run, own rows first: ranks send codes while other codes are multiplied, and
partial sums while others are computed. GPUs with peer access use their copy engines (PyTorch's symmetric memory),
others send messages. Without `overlap` there is one product of all rows, with all communication before or after it. The
operands have the same bits; sums of products may be rounded in another order.

Each thread caches its last gathered plane until the own rows are freed, so q, k and v share it.
"""

from __future__ import annotations

import itertools
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
from qshard.torch_bridge._ops.collectives import PendingGather
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
        known = cached_plane(own)
        if known is not None:
            return lambda: own._replace(parts=known)
        axis = 1 if is_transposed(own.format, own.usage) else 0
        wait = self._start_gather(own)

        def finish() -> Operand:
            parts = {name: self._reorder(part, axis) for name, part in wait().items()}
            whole = own.parts._replace(**parts)
            cache_plane(own, whole)
            return own._replace(parts=whole)

        return finish

    def gather_matmul(self, own: Operand, w: Operand, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
        """Return `x @ w.T` of the whole x, from a rowwise plane of the own rows and the local shard of the weight."""
        if not self.overlap:
            y = matmul(self._gather_by_rank(own), w, dtype, fast=fast)
            return y if self.lead == 1 else self._reorder(y.unflatten(0, (self.ranks, -1)), 0)
        if is_compiling():
            by_rank, order = self._gather_by_rank(own), itertools.product(range(self.lead), range(self.ranks))
            runs = [self._run(by_rank, rank * self.lead + i) for i, rank in order]
            return torch.cat([matmul(run, w, dtype, fast=fast) for run in runs])
        return self._gather_while_multiplying(own, w, dtype, fast)

    def _gather_while_multiplying(self, own: Operand, w: Operand, dtype: torch.dtype, fast: bool) -> Tensor:
        x, ranks = own.parts.data, self.ranks
        known = cached_plane(own)
        whole = known or own.parts._replace(
            **{
                name: part.new_empty((ranks * part.shape[0], *part.shape[1:]))
                for name, part in _sharded_tensors(own).items()
            }
        )
        y: Tensor = x.new_empty((x.shape[0] * ranks, w.rows), dtype=dtype)
        by_rank = own._replace(parts=whole)

        def multiply(rank: int, operand: Operand, first: int) -> None:
            for i in range(self.lead):
                at = (i * ranks + rank) * self.run
                matmul_into(self._run(operand, first + i), w, y[at : at + self.run], fast=fast)

        rank = self.group.rank()
        if known is not None:
            for other in _ranks_from(rank, ranks):
                multiply(other, by_rank, other * self.lead)
            return y
        _gather_each(
            [*_sharded_tensors(own).values()],
            [*_sharded_tensors(by_rank).values()],
            self.group,
            lambda r: multiply(r, *((own, 0) if r == rank else (by_rank, r * self.lead))),
        )
        cache_plane(own, whole)
        return y

    def matmul_scatter(self, x: Operand, w: Operand, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
        """Return the own rows of the sum over ranks of `x @ w.T`, rounded once; x has all rows of its local columns."""
        ranks, size = self.ranks, self.lead * self.run
        if not self.overlap:
            y = matmul(x, w, dtype, fast=fast).view(self.lead, ranks, self.run, -1)
            sent = y.transpose(0, 1).reshape(ranks * size, -1)
        elif is_compiling():
            order = [i * ranks + rank for rank in range(ranks) for i in range(self.lead)]
            sent = torch.cat([matmul(self._run(x, at), w, dtype, fast=fast) for at in order])
        else:
            return self._multiply_while_scattering(x, w, dtype, fast)
        if is_compiling():
            received: Tensor = funcol.wait_tensor(funcol.all_to_all_single(sent, None, None, self.group))
        else:
            received = torch.empty_like(sent)
            dist.all_to_all_single(received, sent, group=self.group)
        return received.view(ranks, size, -1).sum(0)

    def _multiply_while_scattering(self, x: Operand, w: Operand, dtype: torch.dtype, fast: bool) -> Tensor:
        def multiply(rank: int, into: Tensor) -> None:
            for i in range(self.lead):
                run = into[i * self.run : (i + 1) * self.run]
                matmul_into(self._run(x, i * self.ranks + rank), w, run, fast=fast)

        received: Tensor = x.parts.data.new_empty((self.ranks, self.lead * self.run, w.rows), dtype=dtype)
        _exchange(multiply, received, self.group)
        return received.sum(0)

    def _run(self, operand: Operand, at: int) -> Operand:
        rows = at * self.run, (at + 1) * self.run
        return operand._replace(parts=plane_rows(operand.parts, operand.format, operand.usage, *rows))

    def _gather_by_rank(self, own: Operand) -> Operand:
        whole = cached_plane(own)
        if whole is None:
            parts = {name: part.flatten(0, 1) for name, part in self._start_gather(own)().items()}
            whole = own.parts._replace(**parts)
            cache_plane(own, whole)
        return own._replace(parts=whole)

    def _start_gather(self, own: Operand) -> Callable[[], dict[str, Tensor]]:
        """Start to gather the sharded tensors of a plane, in one call.

        The returned function waits and returns each as `[ranks, *part]`, by the name of its field.
        """
        parts = _sharded_tensors(own)
        if is_compiling():
            begun = [funcol.all_gather_tensor(part, 0, self.group) for part in parts.values()]
        else:
            gathering = PendingGather.begin([*parts.values()], self.group)

        def wait() -> dict[str, Tensor]:
            arrived = [*map(funcol.wait_tensor, begun)] if is_compiling() else gathering.wait()
            return {name: array.unflatten(0, (self.ranks, -1)) for name, array in zip(parts, arrived, strict=True)}

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


def _sharded_tensors(operand: Operand) -> dict[str, Tensor]:
    """Return the tensors of a plane that are sharded with its rows, by field. The others are equal on all ranks."""
    pairs = operand.parts._asdict().items()
    return {name: part for name, part in pairs if part is not None and part.ndim}


def _ranks_from(rank: int, ranks: int) -> Iterable[int]:
    return ((rank + step) % ranks for step in range(ranks))


class _GatheredPlane(NamedTuple):
    own: weakref.ref[Tensor]
    usage: Usage
    whole: Plane


_slots = threading.local()


def cached_plane(own: Operand) -> Plane | None:
    """Return the cached plane of the whole, if it was gathered from these codes."""
    if is_compiling():
        return None
    found: _GatheredPlane | None = _slots.__dict__.get("gathered")
    is_same = found is not None and found.own() is own.parts.data and found.usage is own.usage
    return found.whole if found is not None and is_same else None


def cache_plane(own: Operand, whole: Plane) -> None:
    """Cache the plane of the whole until the own rows are freed."""
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
