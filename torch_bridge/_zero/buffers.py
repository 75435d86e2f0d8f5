"""Flat buffers of ZeRO: the weights of one unit as consecutive bytes, sharded evenly over ranks.

    | weight 0 | weight 1 | ... | padding |        gathered bytes: codes, or values in the dtype of the model
    |   rank 0   |   rank 1   |   rank 2   |       shard boundaries, at multiples of `alignment`

The shards are equal in bytes, not elements, so one all-gather puts all weights in their places, whatever their dtypes.
A rank has the float32 master and the gradient of the elements in its bytes: all of some weights, part of one or two,
none of the others. 16 bytes are a whole number of elements of every dtype, so no boundary splits a byte of two codes.
For optimizer states with a scale for every `BLOCK` elements, boundaries are between such blocks, and each shard
computes the scales of the whole weight.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from qshard._core.flat_shards import piece_bytes
from qshard._core.optimizers.adam import BLOCK
from qshard._core.quantize_steps import Plane
from qshard.formats import Usage
from qshard.layout import slice_plane
from qshard.torch_bridge._distributed.ordered_sum import GradientWire
from qshard.torch_bridge._fsdp.weight import memory_of
from qshard.torch_bridge._ops.collectives import all_gather
from qshard.torch_bridge._optim.slices import empty_scales, gather_parts
from qshard.torch_bridge._quantized.stack import QuantizedStack
from qshard.torch_bridge._quantized.tensor import QuantizedTensor
from qshard.torch_bridge._torch_internals import have_one_storage, preserve_version_counter
from qshard.torch_bridge._zero.gradients import Gradient
from qshard.torch_bridge._zero.placeholders import GradientPlaceholder, WeightPlaceholder, weakly
from qshard.torch_bridge._zero.streams import Channel, Pending, Steps
from qshard.torch_bridge._zero.weight import Ranks, ZeroParameter, copy_values

ALIGNMENT = 16  # Bytes: whole elements of every dtype, and the width of vector loads.
BLOCK_ALIGNMENT = BLOCK * torch.float32.itemsize  # Bytes: whole blocks of elements of every dtype.


class FlatBuffer:
    """The weights of one unit in one buffer, the shard of this rank, and their gradients.

    The constructor replaces parameters by views of the buffer. If weights are sharded, the memory of the whole buffer
    is freed between uses. Weights and shards begin at multiples of `alignment` bytes. `on_write` is called when a user
    writes to a master through a placeholder. `make` materializes a weight that is on meta.

    Attributes:
      shard: the bytes of this rank. A unit without codes casts them from masters for each gather, and keeps none.
      in_use: True while modules have the gathered weights.
      in_backward: True while they have them for the backward pass.
    """

    def __init__(
        self,
        weights: Sequence[ZeroParameter],
        ranks: Ranks,
        sharded: bool,
        alignment: int = ALIGNMENT,
        *,
        device: torch.device,
        on_write: Callable[[], None],
        make: Callable[[ZeroParameter], None],
        wire: GradientWire,
        reductions: Channel,
    ):
        self.weights, self.ranks, self.sharded, self.device = list(weights), ranks, sharded, device
        self.values_alone = sharded and all(weight.fmt is None for weight in self.weights)
        size = 0
        for weight in self.weights:
            weight.first = size
            size += -(-weight.buffer_size // alignment) * alignment
        self.part = -(-size // (alignment * ranks.size)) * alignment
        # A whole number of elements of any dtype, or torch.load would reject views that torch.save wrote.
        self._memory = torch.zeros(ranks.size * self.part + ALIGNMENT, dtype=torch.uint8, device=self.device)
        self.buffer = self._memory[: ranks.size * self.part]
        lo = ranks.rank * self.part
        own = self._memory[lo : lo + self.part + 1]
        self.shard = own.clone() if sharded and not self.values_alone else own
        bounds = [[weight.first_elements(r * self.part) for weight in self.weights] for r in range(ranks.size + 1)]
        self.lengths = [sum(stops) - sum(starts) for starts, stops in itertools.pairwise(bounds)]
        self.masters = torch.empty(self.lengths[ranks.rank], dtype=torch.float32, device=self.device)
        at = 0
        with torch.no_grad():
            for weight, start, stop in zip(self.weights, *bounds[ranks.rank : ranks.rank + 2], strict=True):
                master = self.masters[at : (at := at + stop - start)]
                make(weight)
                master.copy_(memory_of(weight.parameter).view(-1)[start:stop])
                self._place(weight, start, master, lo)
        for weight, *starts in zip(self.weights, *bounds, strict=True):
            weight.slices = list(itertools.pairwise(starts))
        self.gradient = Gradient(
            self.weights, self.lengths, ranks, sharded=sharded, device=device, wire=wire, channel=reductions
        )
        for index, weight in enumerate(self.weights):
            self._make_placeholders(weight, index, on_write)
        self.in_use, self.in_backward = True, False
        self.gradient_is_whole: Callable[[FlatBuffer], None] | None = None  # Called with self.
        self._arriving: Pending | None = None
        self._stream: torch.cuda.Stream | None = None  # The current stream when memory was allocated.
        self.free()

    def _place(self, weight: ZeroParameter, start: int, master: Tensor, lo: int) -> None:
        """Point a weight, its master and its slice from element `start` at the buffer.

        The shard begins at byte `lo`.
        """
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
            where = slice_plane(fmt, shape, Usage.ROWWISE, op="ZeroOptimizer", is_stack=weight.is_stack)
            weight.quantized = Plane(own[: piece_bytes(fmt, master.numel())], *empty_scales(fmt, where, self.device))
            parts = weight.quantized._replace(data=whole.view(where.data_shape))
            kind = QuantizedStack if weight.is_stack else QuantizedTensor
            new = nn.Parameter(kind(fmt, shape, dtype, rowwise=parts))
        weight.parameter = new
        for module, name in weight.owners:
            module._parameters[name] = new

    def _make_placeholders(self, weight: ZeroParameter, index: int, on_write: Callable[[], None]) -> None:
        flat = weight.master.detach().view(-1)
        placeholder = WeightPlaceholder(flat, weight.start, weight.shape, weight.dtype, weight.name, on_write)
        weight.placeholder = nn.Parameter(placeholder)
        weight.visible = weight.placeholder if self.sharded else weight.parameter
        weight.grad_placeholder = GradientPlaceholder(
            weight.parameter, weight.name, weakly(self.gradient.accumulate, index), weakly(self.gradient.forget, index)
        )

    def set_gradients(self, mean: Tensor | None) -> None:
        """Set `.grad` of the masters to their parts of the mean, or to None."""
        lengths = [weight.master.numel() for weight in self.weights]
        grads = [None] * len(lengths) if mean is None else mean.split(lengths)
        for weight, grad in zip(self.weights, grads, strict=True):
            weight.master.grad = None if grad is None else grad.view(weight.master.shape)

    def collect_gradient(self, index: int, _: Tensor) -> None:
        """Move the gradient that autograd has accumulated for one of the weights to the flat gradient."""
        if self.gradient.collect(index) and self.gradient_is_whole is not None:
            self.gradient_is_whole(self)

    @property
    def freed(self) -> bool:
        return not self._memory.untyped_storage().size()

    @property
    def stored_bytes(self) -> int:
        """Bytes of weights that this rank stores between uses, not counting masters."""
        if self.values_alone:
            return 0
        return self.shard.nbytes if self.sharded else self._memory.nbytes

    def gather(self, channel: Channel) -> None:
        """Start an all-gather of the shards into the whole buffer, unless it has memory."""
        if self.freed:
            self._memory.untyped_storage().resize_(self._memory.numel())
            self._stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
            self._arriving = channel.begin(self._gather(channel.asynchronous))

    @torch.no_grad()
    def _gather(self, asynchronous: bool) -> Steps:
        # Saved tensors get the same bytes again, so autograd must not count the write, nor one by a gloo thread.
        with preserve_version_counter(self._memory):
            if self.values_alone:
                copy_values(self.weights)
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
        """Wait for the gather, and put the weights into their modules."""
        self._wait()
        self._put(True)

    def hide(self) -> None:
        """Put the placeholders of sharded weights into their modules, and keep the memory of the whole buffer."""
        self._put(False)

    def free(self) -> None:
        """Free the memory of sharded weights. Tensors saved by autograd are views, valid after the next gather."""
        if not self.sharded:
            return
        self._wait()
        if not self.freed:
            if self._stream is not None and self._stream != (current := torch.cuda.current_stream(self.device)):
                self._stream.wait_stream(current)  # The allocator returns the memory to that stream.
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
                    module._parameters[name] = weight.parameter if real else weight.visible

    def shares(self, tensor: Tensor) -> bool:
        """Return True if a tensor is a view of memory that `free` frees."""
        parts = [tensor] if not isinstance(tensor, QuantizedTensor) else list(tensor.parts(Usage.ROWWISE) or ())
        return any(part is not None and have_one_storage(part, self._memory) for part in parts)

    def note_versions(self) -> None:
        """Record that masters and weights are equal now."""
        self._version = self.masters._version
        for weight in self.weights:
            if weight.fmt is None and not self.sharded:
                weight.address, weight.version = (
                    (weight.visible.data_ptr(), weight.visible.dtype),
                    weight.visible._version,
                )

    @property
    def is_written(self) -> bool:
        """True if torch has written to masters since `note_versions`, for example through a state dict."""
        return self._version != self.masters._version

    def gather_masters(self) -> dict[str, Tensor]:
        """Return the whole masters by name, on every rank. Collective."""
        group = self.ranks.group
        whole = self.masters if group is None else torch.cat(gather_parts(self.masters, self.lengths, group))
        sizes = [weight.size for weight in self.weights]
        return {w.name: v.view(w.shape).clone() for w, v in zip(self.weights, whole.split(sizes), strict=True)}


class UpdateBatch(NamedTuple):
    """Units that a step updates together, and their weights by group; batches bound the memory of mean gradients."""

    number: int
    flats: list[FlatBuffer]
    of_groups: list[list[ZeroParameter]]


def update_batches(flats: Sequence[FlatBuffer], of_groups: Sequence[Sequence[ZeroParameter]]) -> list[UpdateBatch]:
    """Group units, in order, so that no batch has more elements of this rank than the largest unit."""
    most = max(flat.masters.numel() for flat in flats)
    batches: list[UpdateBatch] = []
    size = most + 1
    for flat in flats:
        size += flat.masters.numel()
        if size > most:
            size = flat.masters.numel()
            batches.append(UpdateBatch(len(batches), [], [[] for _ in of_groups]))
        batches[-1].flats.append(flat)
    batch_of = {id(weight): batch for batch in batches for flat in batch.flats for weight in flat.weights}
    for index, of_group in enumerate(of_groups):
        for weight in of_group:
            batch_of[id(weight)].of_groups[index].append(weight)
    return batches
