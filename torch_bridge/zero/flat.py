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

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from qshard.adam import BLOCK
from qshard.formats import Format, Usage
from qshard.layout import plane
from qshard.master import piece_bytes
from qshard.torch_bridge.delayed import DelayedScale
from qshard.torch_bridge.fsdp.weight import memory_of
from qshard.torch_bridge.optim.slices import QuantizedSlice, gather_parts
from qshard.torch_bridge.tensor import QuantizedTensor

ALIGNMENT = 16  # bytes: whole elements of every dtype, and what vector loads want
BLOCK_ALIGNMENT = BLOCK * torch.float32.itemsize  # bytes: whole blocks of elements of every dtype


class Ranks(NamedTuple):
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
    """A parameter of the model, and the slice of it that this rank owns.

    Attributes:
      parameter: as it was, then as layers see it.
      owners: the modules that have it, and under which name.
      fmt: what it is gathered as; None: values of its dtype.
      first, start: its first byte in the buffer, and the first element of the slice.
      master: of the slice, float32, a view of the flat one: `[1, n]`, a row that states have scales along, or `[n]` of
        a weight with less than two axes.
      quantized: where the codes of the slice and the scales of the whole go; None if it is gathered as values,
      values: which then go here.
    """

    name: str
    parameter: nn.Parameter
    owners: list[tuple[nn.Module, str]]
    fmt: Format | None = None
    delayed: DelayedScale | None = None
    first: int = 0
    start: int = 0
    master: nn.Parameter = field(init=False)
    quantized: QuantizedSlice | None = None
    values: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parameter.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.parameter.dtype

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.bytes_of(self.size)

    def bytes_of(self, elements: int) -> int:
        """How long its first elements are in the buffer. No cut is amid a byte."""
        return elements * self.dtype.itemsize if self.fmt is None else elements // self.fmt.element.codes_per_byte

    def first_elements(self, end: int) -> int:
        """How many of its elements are before byte `end` of the buffer."""
        end = min(max(end - self.first, 0), self.bytes)
        return end // self.dtype.itemsize if self.fmt is None else end * self.fmt.element.codes_per_byte


class Flat:
    """Weights that are gathered together, the part of this rank, and their gradients.

    Making it, of weights that are whole, puts views of the buffer in the place of the parameters. If it is sharded, the
    whole is freed between uses. Weights and parts are whole multiples of `alignment` bytes.
    """

    def __init__(self, weights: Sequence[Weight], ranks: Ranks, sharded: bool, alignment: int = ALIGNMENT):
        self.weights, self.ranks, self.sharded = list(weights), ranks, sharded
        self.device = weights[0].parameter.device
        size = 0
        for weight in self.weights:
            weight.first = size
            size += -(-weight.bytes // alignment) * alignment
        self.part = -(-size // (alignment * ranks.size)) * alignment
        # A piece of 4-bit codes has room for the half of a byte that a cut may leave; ours leave none, but take it. All
        # of it is whole elements of any dtype: torch.load does not take views of other memory that torch.save wrote.
        self._memory = torch.zeros(ranks.size * self.part + ALIGNMENT, dtype=torch.uint8, device=self.device)
        self.buffer = self._memory[: ranks.size * self.part]
        lo = ranks.rank * self.part
        own = self._memory[lo : lo + self.part + 1]
        self.shard = own.clone() if sharded else own
        cuts = [[weight.first_elements(r * self.part) for weight in self.weights] for r in range(ranks.size + 1)]
        self.lengths = [sum(stops) - sum(starts) for starts, stops in itertools.pairwise(cuts)]
        self.masters = torch.empty(self.lengths[ranks.rank], device=self.device)
        at = 0
        with torch.no_grad():
            for weight, start, stop in zip(self.weights, *cuts[ranks.rank : ranks.rank + 2], strict=True):
                master = self.masters[at : (at := at + stop - start)]
                master.copy_(memory_of(weight.parameter).view(-1)[start:stop])
                self._place(weight, start, master, lo)
        self._arrived: set[int] = set()
        self._gradient: Tensor | None = None  # float32, of all elements in order; a cut of bytes is one of elements.
        self._reduced: Tensor | None = None  # Of sharded weights: of this rank's elements, summed over ranks.
        self.in_backward = False
        self.free()

    def _place(self, weight: Weight, start: int, master: Tensor, lo: int) -> None:
        """What this rank, whose part begins at byte `lo`, owns of a weight, and what layers see, is in the buffer."""
        weight.start = start
        weight.master = nn.Parameter(master.view(1, -1) if len(weight.shape) > 1 else master)
        own = self.shard[weight.first + weight.bytes_of(start) - lo if master.numel() else 0 :]
        whole = self.buffer[weight.first : weight.first + weight.bytes]
        if weight.fmt is None:
            weight.values = own[: weight.bytes_of(master.numel())].view(weight.dtype).view(weight.master.shape)
            values = whole.view(weight.dtype).view(weight.shape)
            if type(weight.parameter) is nn.Parameter:
                weight.parameter.data = values
                return
            new = nn.Parameter(values)
        else:
            fmt, shape, dtype = weight.fmt, weight.shape, weight.dtype
            weight.quantized = QuantizedSlice.empty(fmt, shape, 0, dtype=dtype, device=self.device)
            weight.quantized.data = own[: piece_bytes(fmt, master.numel())]
            parts = weight.quantized.parts._replace(data=whole.view(plane(fmt, shape, Usage.ROWWISE).data_shape))
            new = nn.Parameter(QuantizedTensor(fmt, shape, dtype, rowwise=parts))
        weight.parameter = new
        for module, name in weight.owners:
            module.register_parameter(name, new)

    @property
    def freed(self) -> bool:
        """Whether there is no memory behind what layers see."""
        return not self._memory.untyped_storage().size()

    def gather(self) -> None:
        """Puts all parts in the buffer, with one all-gather of bytes, if they are not there."""
        if not self.freed:
            return
        self._memory.untyped_storage().resize_(self._memory.numel())
        # The same bytes come back to what autograd has saved: it is to see no write.
        with _unsafe_preserve_version_counter(self._memory):
            self.publish()

    def publish(self) -> None:
        part = self.shard[: self.part]
        if self.ranks.size > 1:
            dist.all_gather_into_tensor(self.buffer, part, group=self.ranks.group)
        elif self.sharded:
            self.buffer.copy_(part)

    def free(self) -> None:
        """Gives back the memory of the whole, if it is sharded. What has views of it keeps them."""
        if self.sharded:
            self._memory.untyped_storage().resize_(0)

    def take_gradient(self, index: int) -> bool:
        """Adds the gradient that a parameter has to the flat one, in float32. Returns whether all have arrived."""
        parameter = self.weights[index].parameter
        assert parameter.grad is not None
        if self._gradient is None:
            self._gradient = torch.zeros(sum(self.lengths), device=self.device)
        at = sum(weight.size for weight in self.weights[:index])
        there = self._gradient[at : at + parameter.numel()].view(parameter.shape)
        if index in self._arrived:
            there += parameter.grad
        else:
            there.copy_(parameter.grad)
        parameter.grad = None
        self._arrived.add(index)
        return len(self._arrived) == len(self.weights)

    def reduce_gradient(self) -> None:
        """Of sharded weights: adds up what ranks have, keeps this rank's part and lets the whole go."""
        if self._gradient is not None:
            part = self._sum_over_ranks(self._gradient)
            self._reduced = part if self._reduced is None else self._reduced.add_(part)
            self._gradient, self._arrived = None, set()

    def end_backward(self) -> None:
        self.reduce_gradient()
        self.in_backward = False
        self.free()

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
        self._arrived, self.in_backward = set(), False
        for weight in self.weights:
            weight.parameter.grad = None

    def _sum_over_ranks(self, mine: Tensor) -> Tensor:
        """A reduce-scatter that adds in the order of ranks, whatever the library, the cut and the number of buffers.

        It sends what a ring sends, (ranks - 1) / ranks of the buffer, and holds as much for a moment.
        """
        if self.ranks.size == 1:
            return mine.clone()
        own = self.masters.numel()
        received = mine.new_empty(self.ranks.size * own)
        dist.all_to_all_single(received, mine, [own] * self.ranks.size, self.lengths, group=self.ranks.group)
        total, *others = received.split(own) if own else [received]
        for other in others:
            total += other
        return total

    def gather_masters(self) -> dict[str, Tensor]:
        """The masters of whole weights, on every rank. Collective."""
        group = self.ranks.group
        whole = self.masters if group is None else torch.cat(gather_parts(self.masters, self.lengths, group))
        sizes = [weight.size for weight in self.weights]
        return {w.name: v.view(w.shape).clone() for w, v in zip(self.weights, whole.split(sizes), strict=True)}
