"""The flat buffers of ZeRO: the weights of some layers as one run of bytes, of which each rank owns an even part.

    | weight 0 | weight 1 | ... | padding |        as they are gathered: codes, or values in the dtype of the model
    |   rank 0   |   rank 1   |   rank 2   |       cut wherever that falls, at multiples of `alignment`

Bytes are cut, not elements, so that one all-gather of equal parts puts everything in its place, whatever the dtypes. A
rank has the float32 master and the gradient of the elements whose bytes it owns: of some weights all, of one or two a
part, of the others nothing. As 16 bytes hold whole elements of every kind, no cut is amid a byte of two codes.
Optimizer states with a scale for every `BLOCK` elements ask for cuts between such blocks: then the scales are those of
the whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from qshard.adam import BLOCK
from qshard.formats import Format, Usage
from qshard.layout import plane
from qshard.master import piece_bytes
from qshard.torch_bridge.delayed import DelayedScale
from qshard.torch_bridge.fsdp.weight import plain
from qshard.torch_bridge.optim.slices import QuantizedSlice
from qshard.torch_bridge.tensor import QuantizedTensor

__all__ = ["Flat", "Ranks", "Weight"]

ALIGNMENT = 16  # bytes: whole elements of every dtype, and what vector loads want
BLOCK_ALIGNMENT = BLOCK * torch.float32.itemsize  # bytes: whole blocks of elements of every dtype


@dataclass(frozen=True)
class Ranks:
    """A process group, or one process without any."""

    group: dist.ProcessGroup | None
    size: int
    rank: int

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Ranks:
        if group is None and not dist.is_initialized():
            return cls(None, 1, 0)
        group = group or dist.group.WORLD
        return cls(group, dist.get_world_size(group), dist.get_rank(group))


@dataclass(eq=False)
class Weight:
    """A parameter of the model.

    Attributes:
      name: of its first owner.
      parameter: as it was, then as layers see it.
      owners: the modules that have it, and under which name.
      fmt: what it is gathered as; None: values of its dtype.
      delayed: has its scale, if the recipe is `DelayedScaling`.
      first: its first byte in the buffer.
    """

    name: str
    parameter: nn.Parameter
    owners: list[tuple[nn.Module, str]]
    fmt: Format | None = None
    delayed: DelayedScale | None = None
    first: int = 0
    shape: tuple[int, ...] = field(init=False)
    dtype: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        self.shape, self.dtype = tuple(self.parameter.shape), self.parameter.dtype

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.bytes_of(self.size)

    def bytes_of(self, elements: int) -> int:
        """How long its first elements are in the buffer. No cut is amid a byte."""
        return elements * self.dtype.itemsize if self.fmt is None else elements // self.fmt.element.codes_per_byte

    def elements(self, lo: int, hi: int) -> tuple[int, int]:
        """Which of its elements are in bytes [lo, hi) of the buffer."""
        ends = (min(max(end - self.first, 0), self.bytes) for end in (lo, hi))
        if self.fmt is None:
            start, stop = (end // self.dtype.itemsize for end in ends)
        else:
            start, stop = (end * self.fmt.element.codes_per_byte for end in ends)
        return start, stop


@dataclass(eq=False)
class Slice:
    """What this rank owns of a weight.

    Attributes:
      start: its first element in the weight.
      master: float32, a view of the flat one: `[1, n]`, a row that states have scales along, or `[n]` of a weight with
        less than two axes.
      quantized: where its codes and the scales of the whole weight go; None for one that is gathered as values,
      values: which then go here.
    """

    weight: Weight
    start: int
    master: nn.Parameter
    quantized: QuantizedSlice | None
    values: Tensor | None


class Flat:
    """Weights that are gathered together, the part of this rank, and their gradients.

    Args:
      weights: on one device, whole, the same on all ranks.
      ranks: that share them.
      sharded: whether the whole is freed between uses, so that a rank keeps its part alone.
      alignment: bytes that weights and parts are whole multiples of.

    Making it puts views of the buffer in the place of the parameters.
    """

    def __init__(self, weights: Sequence[Weight], ranks: Ranks, sharded: bool, alignment: int = ALIGNMENT):
        self.weights, self.ranks, self.sharded = list(weights), ranks, sharded
        self.device = weights[0].parameter.device
        size = 0
        for weight in self.weights:
            weight.first = size
            size += -(-weight.bytes // alignment) * alignment
        self.part = -(-size // (alignment * ranks.size)) * alignment
        # A piece of 4-bit codes has room for the half of a byte that a cut may leave; ours leave none, but take it.
        self._memory = torch.zeros(ranks.size * self.part + 1, dtype=torch.uint8, device=self.device)
        self.buffer = self._memory[: ranks.size * self.part]
        lo = ranks.rank * self.part
        own = self._memory[lo : lo + self.part + 1]
        self.shard = own.clone() if sharded else own
        bounds = [[w.elements(r * self.part, (r + 1) * self.part) for w in self.weights] for r in range(ranks.size)]
        self.lengths = [sum(stop - start for start, stop in of_rank) for of_rank in bounds]
        self.masters = torch.empty(self.lengths[ranks.rank], device=self.device)
        self.slices: list[Slice] = []
        at = 0
        with torch.no_grad():
            for weight, (start, stop) in zip(self.weights, bounds[ranks.rank], strict=True):
                master = self.masters[at : at + stop - start]
                master.copy_(plain(weight.parameter).reshape(-1)[start:stop])
                at += stop - start
                self.slices.append(self._slice(weight, start, master, lo))
            for weight, piece in zip(self.weights, self.slices, strict=True):
                self._replace(weight, piece.quantized)
        self._arrived = [False] * len(self.weights)
        self._gradient: Tensor | None = None  # float32, of all elements in order; a cut of bytes is one of elements.
        self._reduced: Tensor | None = None  # Of sharded weights: of this rank's elements, summed over ranks.
        self.whole, self.in_backward = True, False
        self.free()

    def _slice(self, weight: Weight, start: int, master: Tensor, lo: int) -> Slice:
        first = weight.first + weight.bytes_of(start) - lo if master.numel() else 0
        parameter = nn.Parameter(master.view(1, -1) if len(weight.shape) > 1 else master)
        if weight.fmt is None:
            there = self.shard[first : first + master.numel() * weight.dtype.itemsize]
            return Slice(weight, start, parameter, None, there.view(weight.dtype).view(parameter.shape))
        quantized = QuantizedSlice.empty(weight.fmt, weight.shape, 0, dtype=weight.dtype, device=self.device)
        quantized.data = self.shard[first : first + piece_bytes(weight.fmt, master.numel())]
        return Slice(weight, start, parameter, quantized, None)

    def _replace(self, weight: Weight, quantized: QuantizedSlice | None) -> None:
        """What layers see from now on is memory of the buffer."""
        there = self.buffer[weight.first : weight.first + weight.bytes]
        if quantized is None:
            values = there.view(weight.dtype).view(weight.shape)
            if type(weight.parameter) is nn.Parameter:
                weight.parameter.data = values
                return
            new = nn.Parameter(values)
        else:
            assert weight.fmt is not None
            where = plane(weight.fmt, weight.shape, Usage.ROWWISE)
            parts = quantized.parts._replace(data=there.view(where.data_shape))
            new = nn.Parameter(QuantizedTensor(weight.fmt, weight.shape, weight.dtype, rowwise=parts))
        weight.parameter = new
        for module, name in weight.owners:
            module.register_parameter(name, new)

    @property
    def own(self) -> int:
        """How many elements this rank owns."""
        return self.lengths[self.ranks.rank]

    def gather(self) -> None:
        """Puts all parts in the buffer, with one all-gather of bytes, if they are not there."""
        if self.whole:
            return
        self._memory.untyped_storage().resize_(self._memory.numel())
        # The same bytes come back to what autograd has saved: it is to see no write.
        with _unsafe_preserve_version_counter(self._memory):
            self.publish()
        self.whole = True

    def publish(self) -> None:
        """Sends the part of this rank to the buffers of all."""
        part = self.shard[: self.part]
        if self.ranks.size > 1:
            dist.all_gather_into_tensor(self.buffer, part, group=self.ranks.group)
        elif self.sharded:
            self.buffer.copy_(part)

    def free(self) -> None:
        """Gives back the memory of the whole, if it is sharded. What has views of it keeps them."""
        if self.sharded and self.whole:
            self._memory.untyped_storage().resize_(0)
            self.whole = False

    def take_gradient(self, index: int) -> bool:
        """Adds the gradient that a parameter has to the flat one, in float32.

        Returns:
          Whether those of all parameters have arrived.
        """
        parameter = self.weights[index].parameter
        assert parameter.grad is not None
        if self._gradient is None:
            self._gradient = torch.zeros(sum(self.lengths), device=self.device)
        at = sum(weight.size for weight in self.weights[:index])
        there = self._gradient[at : at + parameter.numel()].view(parameter.shape)
        if self._arrived[index]:
            there += parameter.grad
        else:
            there.copy_(parameter.grad)
        parameter.grad, self._arrived[index] = None, True
        return all(self._arrived)

    def reduce_gradient(self) -> None:
        """Of sharded weights: adds up what ranks have, keeps this rank's part and lets the whole go."""
        if self._gradient is not None:
            part = self._sum_over_ranks(self._gradient)
            self._reduced = part if self._reduced is None else self._reduced.add_(part)
            self._gradient, self._arrived = None, [False] * len(self.weights)

    def mean_gradient(self) -> Tensor:
        """The mean over ranks of the gradients of this rank's elements; zeros where there are none."""
        if self.sharded:
            self.reduce_gradient()
            total = torch.zeros_like(self.masters) if self._reduced is None else self._reduced
        else:
            mine = torch.zeros(sum(self.lengths), device=self.device) if self._gradient is None else self._gradient
            total = self._sum_over_ranks(mine)
        # By a tensor: torch divides by a number on a GPU as it multiplies with its inverse, which is rounded.
        return total / torch.full((), self.ranks.size, dtype=torch.float32, device=self.device)

    def clear_gradient(self) -> None:
        self._gradient = self._reduced = None
        self._arrived, self.in_backward = [False] * len(self.weights), False
        for weight in self.weights:
            weight.parameter.grad = None

    def _sum_over_ranks(self, mine: Tensor) -> Tensor:
        """A reduce-scatter that adds in the order of ranks, whatever the library, the cut and the number of buffers.

        It sends what a ring sends, (ranks - 1) / ranks of the buffer, and holds as much for a moment.
        """
        if self.ranks.size == 1:
            return mine.clone()
        received = mine.new_empty(self.ranks.size * self.own)
        dist.all_to_all_single(received, mine, [self.own] * self.ranks.size, self.lengths, group=self.ranks.group)
        total, *others = received.split(self.own) if self.own else [received]
        for other in others:
            total += other
        return total

    def gather_masters(self) -> dict[str, Tensor]:
        """The masters of whole weights, on every rank. Collective."""
        whole = self.masters
        if self.ranks.size > 1:
            room = max(self.lengths)
            send = torch.nn.functional.pad(self.masters, (0, room - self.own))
            received = send.new_empty(self.ranks.size * room)
            dist.all_gather_into_tensor(received, send, group=self.ranks.group)
            parts = received.split(room)
            whole = torch.cat([part[:length] for part, length in zip(parts, self.lengths, strict=True)])
        sizes = [weight.size for weight in self.weights]
        return {w.name: v.view(w.shape).clone() for w, v in zip(self.weights, whole.split(sizes), strict=True)}
