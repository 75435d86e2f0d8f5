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
from collections.abc import Callable, Sequence
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
from qshard.torch_bridge.optim.slices import QuantizedSlice, all_gather, gather_parts
from qshard.torch_bridge.tensor import QuantizedTensor
from qshard.torch_bridge.zero.shown import SlicedWeight, TakenGradient, weakly

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
      sliced: what stands for it where only the slice of this rank is meant.
      shown: what others see between uses: `sliced` of sharded weights, else the parameter.
      owners: the modules that have it, and under which name.
      fmt: what it is gathered as; None: values of its dtype.
      first, start: its first byte in the buffer, and the first element of the slice.
      master: of the slice, float32, a view of the flat one: `[1, n]`, a row that states have scales along, or `[n]` of
        a weight with less than two axes.
      quantized: where the codes of the slice and the scales of the whole go; None if it is gathered as values,
      values: which then go here.
      cuts: the slices of all ranks.
      where, version: of values that users see, as they were published; to find out what was done to them.
    """

    name: str
    parameter: nn.Parameter
    owners: list[tuple[nn.Module, str]]
    fmt: Format | None = None
    delayed: DelayedScale | None = None
    first: int = 0
    start: int = 0
    master: nn.Parameter = field(init=False)
    cuts: list[tuple[int, int]] = field(init=False)
    sliced: nn.Parameter = field(init=False)
    shown: nn.Parameter = field(init=False)
    taken: TakenGradient = field(init=False)
    quantized: QuantizedSlice | None = None
    values: Tensor | None = None
    where: tuple[int, torch.dtype] | None = None
    version: int = 0

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

    @property
    def room(self) -> int:
        """With that for half a byte that a cut may leave of 4-bit codes: ours leave none, but ops want it."""
        return self.bytes if self.fmt is None else piece_bytes(self.fmt, self.size)

    def bytes_of(self, elements: int) -> int:
        """How long its first elements are in the buffer. No cut is amid a byte."""
        return elements * self.dtype.itemsize if self.fmt is None else elements // self.fmt.element.codes_per_byte

    def first_elements(self, end: int) -> int:
        """How many of its elements are before byte `end` of the buffer."""
        end = min(max(end - self.first, 0), self.bytes)
        return end // self.dtype.itemsize if self.fmt is None else end * self.fmt.element.codes_per_byte


class Flat:
    """Weights that are gathered together, the part of this rank, and their gradients.

    Making it, of weights that `make` has made whole, puts views of the buffer in the place of the parameters. If it is
    sharded, the whole is freed between uses. Weights and parts are whole multiples of `alignment` bytes.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        ranks: Ranks,
        sharded: bool,
        alignment: int = ALIGNMENT,
        *,
        device: torch.device,
        written: Callable[[], None],
        make: Callable[[Weight], None],
    ):
        self.weights, self.ranks, self.sharded, self.device = list(weights), ranks, sharded, device
        size = 0
        for weight in self.weights:
            weight.first = size
            size += -(-weight.room // alignment) * alignment
        self.part = -(-size // (alignment * ranks.size)) * alignment
        # Whole elements of any dtype: torch.load does not take views of other memory that torch.save wrote.
        self._memory = torch.zeros(ranks.size * self.part + ALIGNMENT, dtype=torch.uint8, device=self.device)
        self.buffer = self._memory[: ranks.size * self.part]
        lo = ranks.rank * self.part
        own = self._memory[lo : lo + self.part + 1]
        self.shard = own.clone() if sharded else own
        cuts = [[weight.first_elements(r * self.part) for weight in self.weights] for r in range(ranks.size + 1)]
        self._firsts = list(itertools.accumulate((weight.size for weight in self.weights), initial=0))
        self.lengths = [sum(stops) - sum(starts) for starts, stops in itertools.pairwise(cuts)]
        self.masters = torch.empty(self.lengths[ranks.rank], device=self.device)
        at = 0
        with torch.no_grad():
            for weight, start, stop in zip(self.weights, *cuts[ranks.rank : ranks.rank + 2], strict=True):
                master = self.masters[at : (at := at + stop - start)]
                make(weight)
                master.copy_(memory_of(weight.parameter).view(-1)[start:stop])
                self._place(weight, start, master, lo)
        for weight, *starts in zip(self.weights, *cuts, strict=True):
            weight.cuts = list(itertools.pairwise(starts))
        for index, weight in enumerate(self.weights):
            self._show(weight, index, written)
        self._given: set[int] = set()  # Weights that have had a gradient since zero_grad,
        self._arrived: set[int] = set()  # and those that `_gradient` has one of.
        self._gradient: Tensor | None = None  # float32, of all elements in order; a cut of bytes is one of elements.
        self._reduced: Tensor | None = None  # Of sharded weights: of this rank's elements, summed over ranks.
        self._clipped: Tensor | None = None  # The mean gradient, once it was clipped.
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

    def _show(self, weight: Weight, index: int, written: Callable[[], None]) -> None:
        """Makes what users see of a weight, and of its gradient."""
        flat = weight.master.detach().view(-1)
        absent = SlicedWeight(flat, weight.start, weight.shape, weight.dtype, weight.name, written)
        weight.sliced = nn.Parameter(absent)
        weight.shown = weight.sliced if self.sharded else weight.parameter
        weight.taken = TakenGradient(
            weight.parameter,
            weight.name,
            weakly(self.add_gradient, index),
            weakly(self.forget, index),
        )

    def take_arrived(self, index: int, _: Tensor) -> None:
        """What autograd has made of one of the weights. Once all are there, ranks may sum those of sharded ones."""
        if self.take_gradient(index) and self.sharded:
            self.end_backward()

    def put(self, real: bool) -> None:
        """Puts the gathered weights into their modules, or what is shown in their place."""
        for weight in self.weights:
            for module, name in weight.owners:
                module._parameters[name] = weight.parameter if real else weight.shown

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
        self.put(real=True)

    def publish(self) -> None:
        part = self.shard[: self.part]
        if self.ranks.size > 1:
            all_gather(self.buffer, part, group=self.ranks.group)
        elif self.sharded:
            self.buffer.copy_(part)

    def free(self) -> None:
        """Gives back the memory of the whole, if it is sharded. What autograd has saved are views, which stay."""
        if self.sharded:
            self._memory.untyped_storage().resize_(0)
            self.put(real=False)

    def shares(self, tensor: Tensor) -> bool:
        """Whether a tensor is memory that `free` gives back."""
        parts = [tensor] if type(tensor) is not QuantizedTensor else list(tensor.parts(Usage.ROWWISE) or ())
        own = self._memory.untyped_storage()._cdata
        return any(part is not None and part.untyped_storage()._cdata == own for part in parts)

    def take_gradient(self, index: int) -> bool:
        """Takes the gradient that a parameter has, if it was not taken yet. Returns whether all have arrived."""
        weight = self.weights[index]
        for parameter in {weight.parameter, weight.shown}:
            if parameter.grad is not None and parameter.grad is not weight.taken:
                grad, parameter.grad = parameter.grad, None
                self.add_gradient(index, grad)
        return len(self._arrived) == len(self.weights)

    def note_versions(self) -> None:
        """Masters and weights are the same now."""
        self._version = self.masters._version
        for weight in self.weights:
            if weight.fmt is None and not self.sharded:
                weight.where, weight.version = (weight.shown.data_ptr(), weight.shown.dtype), weight.shown._version

    @property
    def is_written(self) -> bool:
        """Whether torch has written to masters since, as to a state dict that shares their memory."""
        return self._version != self.masters._version

    def add_gradient(self, index: int, grad: Tensor) -> None:
        """Adds to the flat gradient, in float32, and leaves at `.grad` what stands for it."""
        weight = self.weights[index]
        if index in self._given and weight.shown.grad is None:
            self.forget_cleared()
        if self._clipped is not None:
            raise RuntimeError(
                f"ZeroOptimizer: gradients ({weight.name}) were clipped, and more cannot be added to them; call "
                "clip_grad_norm_ after the last backward pass of a step, and zero_grad before the next"
            )
        if self._gradient is None:
            self._gradient = torch.zeros(sum(self.lengths), device=self.device)
        there = self._of(self._gradient, index).view(weight.shape)
        if index in self._arrived:
            there += grad
        else:
            there.copy_(grad)
        weight.shown.grad = weight.taken
        self._arrived.add(index)
        self._given.add(index)

    def _of(self, whole: Tensor, index: int) -> Tensor:
        """The elements of a weight in what has those of all of them."""
        return whole[self._firsts[index] : self._firsts[index + 1]]

    def forget(self, index: int) -> None:
        """A gradient is zeros from now on. All ranks do so, or sums of sharded gradients are of some ranks alone."""
        self._given.discard(index)
        if not self._given:
            self._gradient = self._reduced = self._clipped = None
            self._arrived = set()
            return
        if self._gradient is not None:
            self._of(self._gradient, index).zero_()
        at = sum(weight.master.numel() for weight in self.weights[:index])
        for own in (self._reduced, self._clipped):
            if own is not None:
                own[at : at + self.weights[index].master.numel()].zero_()

    def forget_cleared(self) -> None:
        """What zero_grad of the model, not of the optimizer, has set to None is no gradient any more."""
        for index in [index for index in self._given if self.weights[index].shown.grad is None]:
            self.forget(index)

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
        for index, weight in enumerate(self.weights):
            if weight.shown.grad is not weight.taken and weight.shown.grad is not None:
                self.take_gradient(index)  # One that a user has put there.
        self.forget_cleared()
        if self._clipped is not None:
            return self._clipped
        if self.sharded:
            self.reduce_gradient()
            total = torch.zeros_like(self.masters) if self._reduced is None else self._reduced
        else:
            mine = torch.zeros(sum(self.lengths), device=self.device) if self._gradient is None else self._gradient
            total = self._sum_over_ranks(mine)
        # By a tensor: torch divides by a number on a GPU as it multiplies with its inverse, which is rounded.
        return total / torch.full((), self.ranks.size, dtype=torch.float32, device=self.device)

    def keep_clipped(self, mean: Tensor) -> None:
        """The mean gradient, clipped, is what the next step takes."""
        self._clipped = mean
        self._gradient = self._reduced = None
        self._arrived = set()

    def clear_gradient(self) -> None:
        self._gradient = self._reduced = self._clipped = None
        self._given, self._arrived, self.in_backward = set(), set(), False
        for weight in self.weights:
            weight.parameter.grad = weight.shown.grad = None

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
        return total.clone()  # A view would keep all that was received.

    def gather_masters(self) -> dict[str, Tensor]:
        """The masters of whole weights, on every rank. Collective."""
        group = self.ranks.group
        whole = self.masters if group is None else torch.cat(gather_parts(self.masters, self.lengths, group))
        sizes = [weight.size for weight in self.weights]
        return {w.name: v.view(w.shape).clone() for w, v in zip(self.weights, whole.split(sizes), strict=True)}
