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
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from qshard._core.adam import BLOCK
from qshard._core.flat_shards import piece_bytes
from qshard.formats import Usage
from qshard.layout import plane
from qshard.torch_bridge._fsdp.weight import memory_of
from qshard.torch_bridge._ops.collectives import all_gather
from qshard.torch_bridge._optim.slices import QuantizedSlice, gather_parts
from qshard.torch_bridge._quantized.tensor import QuantizedTensor
from qshard.torch_bridge._torch_internals import have_one_storage, preserve_version_counter
from qshard.torch_bridge._zero.gradients import Gradient
from qshard.torch_bridge._zero.placeholders import GradientPlaceholder, WeightPlaceholder, weakly
from qshard.torch_bridge._zero.streams import Channel, Pending, Steps
from qshard.torch_bridge._zero.weight import Ranks, ZeroParameter

ALIGNMENT = 16  # bytes: whole elements of every dtype, and what vector loads want
BLOCK_ALIGNMENT = BLOCK * torch.float32.itemsize  # bytes: whole blocks of elements of every dtype


class FlatBuffer:
    """Weights that are gathered together, the part of this rank, and their gradients.

    Making it, of weights that `make` has made whole, puts views of the buffer in the place of the parameters. If it is
    sharded, the whole is freed between uses. Weights and parts are whole multiples of `alignment` bytes.

    Attributes:
      shard: the bytes of this rank. Those of values alone are made of masters for each gather, and kept nowhere.
      in_use: whether layers see the gathered weights.
      in_backward: whether they do until the gradients are there.
    """

    def __init__(
        self,
        weights: Sequence[ZeroParameter],
        ranks: Ranks,
        sharded: bool,
        alignment: int = ALIGNMENT,
        *,
        device: torch.device,
        written: Callable[[], None],
        make: Callable[[ZeroParameter], None],
        reduce_dtype: torch.dtype,
        reductions: Channel,
    ):
        self.weights, self.ranks, self.sharded, self.device = list(weights), ranks, sharded, device
        self.values_alone = sharded and all(weight.fmt is None for weight in self.weights)
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
        self.shard = own.clone() if sharded and not self.values_alone else own
        cuts = [[weight.first_elements(r * self.part) for weight in self.weights] for r in range(ranks.size + 1)]
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
        self.gradient = Gradient(
            self.weights,
            self.lengths,
            ranks,
            sharded=sharded,
            device=device,
            dtype=reduce_dtype,
            channel=reductions,
        )
        for index, weight in enumerate(self.weights):
            self._show(weight, index, written)
        self.in_use, self.in_backward = True, False
        self.gradient_is_whole: Callable[[FlatBuffer], None] | None = None  # Called with this, once it is.
        self._arriving: Pending | None = None
        self._stream: torch.cuda.Stream | None = None  # The one that was current when memory was asked for.
        self.free()

    def _place(self, weight: ZeroParameter, start: int, master: Tensor, lo: int) -> None:
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

    def _show(self, weight: ZeroParameter, index: int, written: Callable[[], None]) -> None:
        """Makes what users see of a weight, and of its gradient."""
        flat = weight.master.detach().view(-1)
        absent = WeightPlaceholder(flat, weight.start, weight.shape, weight.dtype, weight.name, written)
        weight.sliced = nn.Parameter(absent)
        weight.shown = weight.sliced if self.sharded else weight.parameter
        weight.taken = GradientPlaceholder(
            weight.parameter,
            weight.name,
            weakly(self.gradient.accumulate, index),
            weakly(self.gradient.forget, index),
        )

    def give_gradient(self, mean: Tensor | None) -> None:
        """Puts what there is of each weight at `.grad` of its master."""
        lengths = [weight.master.numel() for weight in self.weights]
        grads = [None] * len(lengths) if mean is None else mean.split(lengths)
        for weight, grad in zip(self.weights, grads, strict=True):
            weight.master.grad = None if grad is None else grad.view(weight.master.shape)

    def take_arrived(self, index: int, _: Tensor) -> None:
        """Takes the gradient that autograd has made of one of the weights."""
        if self.gradient.take(index) and self.gradient_is_whole is not None:
            self.gradient_is_whole(self)

    @property
    def freed(self) -> bool:
        """Whether there is no memory behind what layers see, nor any that parts are on their way to."""
        return not self._memory.untyped_storage().size()

    @property
    def kept(self) -> int:
        """Bytes that this rank has of the weights between uses, beside masters."""
        if self.values_alone:
            return 0
        return self.shard.nbytes if self.sharded else self._memory.nbytes

    def gather(self, channel: Channel) -> None:
        """Begins to put all parts in the buffer, with one all-gather of bytes, if they are not there."""
        if self.freed:
            self._memory.untyped_storage().resize_(self._memory.numel())
            self._stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
            self._arriving = channel.begin(self._gather(channel.asynchronous))

    @torch.no_grad()
    def _gather(self, asynchronous: bool) -> Steps:
        # The same bytes come back to what autograd has saved: it is to see no write, of threads of gloo neither.
        with preserve_version_counter(self._memory):
            if self.values_alone:
                own = [(w.values, w.master) for w in self.weights if w.values is not None and w.values.numel()]
                if own:
                    torch._foreach_copy_([values for values, _ in own], [master for _, master in own])
            work = self.publish(asynchronous)
            if work is not None:
                yield work

    def publish(self, asynchronous: bool = False) -> dist.Work | None:
        part = self.shard[: self.part]
        if self.ranks.size > 1:
            work: dist.Work | None = all_gather(self.buffer, part, group=self.ranks.group, async_op=asynchronous)
            return work
        if self.sharded and not self.values_alone:
            self.buffer.copy_(part)
        return None

    def use(self) -> None:
        """After `gather`, puts the weights into their modules."""
        self._wait()
        self._put(True)

    def hide(self) -> None:
        """Puts what is shown in the place of sharded weights, whose memory stays."""
        self._put(False)

    def free(self) -> None:
        """Gives back the memory of the whole, if it is sharded. What autograd has saved are views, which stay."""
        if not self.sharded:
            return
        self._wait()
        if not self.freed:
            if self._stream is not None and self._stream != (current := torch.cuda.current_stream(self.device)):
                self._stream.wait_stream(current)  # The memory goes back to it.
            self._memory.untyped_storage().resize_(0)
        self._put(False)

    def _wait(self) -> None:
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None

    def _put(self, real: bool) -> None:
        if real != self.in_use:
            self.in_use = real
            for weight in self.weights:
                for module, name in weight.owners:
                    module._parameters[name] = weight.parameter if real else weight.shown

    def shares(self, tensor: Tensor) -> bool:
        """Whether a tensor is memory that `free` gives back."""
        parts = [tensor] if type(tensor) is not QuantizedTensor else list(tensor.parts(Usage.ROWWISE) or ())
        return any(part is not None and have_one_storage(part, self._memory) for part in parts)

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

    def gather_masters(self) -> dict[str, Tensor]:
        """The masters of whole weights, on every rank. Collective."""
        group = self.ranks.group
        whole = self.masters if group is None else torch.cat(gather_parts(self.masters, self.lengths, group))
        sizes = [weight.size for weight in self.weights]
        return {w.name: v.view(w.shape).clone() for w, v in zip(self.weights, whole.split(sizes), strict=True)}


class Bucket(NamedTuple):
    """Units that a step updates together: mean gradients of few units exist at once, beside the sums that stay.

    Attributes:
      number: which bucket it is.
      flats: units.
      of_groups: their weights, by parameter group.
    """

    number: int
    flats: list[FlatBuffer]
    of_groups: list[list[ZeroParameter]]


def buckets_of(flats: Sequence[FlatBuffer], of_groups: Sequence[Sequence[ZeroParameter]]) -> list[Bucket]:
    """Units, in order, as many at a time as have no more elements of this rank than the largest one."""
    most = max(flat.masters.numel() for flat in flats)
    buckets: list[Bucket] = []
    size = most + 1
    for flat in flats:
        size += flat.masters.numel()
        if size > most:
            size = flat.masters.numel()
            buckets.append(Bucket(len(buckets), [], [[] for _ in of_groups]))
        buckets[-1].flats.append(flat)
    bucket_of = {id(weight): bucket for bucket in buckets for flat in bucket.flats for weight in flat.weights}
    for index, of_group in enumerate(of_groups):
        for weight in of_group:
            bucket_of[id(weight)].of_groups[index].append(weight)
    return buckets
