"""Gradients of a unit's weights: collected from autograd, then reduce-scattered.

    unreduced  gradients by weight, as autograd computed them; float32 once two were added
    reduced    sharded weights: float32 sums over ranks of this rank's elements
    clipped    the mean after `clip_grad_norm_`; it replaces the sum

Gradients of sharded weights are reduced as soon as the unit has all of its gradients. Others are reduced when the mean
is requested, once for all backward passes of a step.

Floating-point sums depend on their order, and so on the sharding. The norm therefore adds powers as integers:

    r = |g| / 2^e, with 2^e > max |g|       r < 1, exact in float64; the maximum is over all ranks
    t = r^p = high 2^-30 + low 2^-60        high, low < 2^30, rounded once, element by element
    norm = 2^e (sum of t)^(1/p)             sums of integers, exact in any order, of up to 2^33 elements

It takes two reductions, of one number and of two, and never waits for the device.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from qshard.torch_bridge._distributed.ordered_sum import GradientWire
from qshard.torch_bridge._ops.collectives import max_over_ranks
from qshard.torch_bridge._zero.streams import Channel, Pending, Steps
from qshard.torch_bridge._zero.weight import Ranks, ZeroParameter

_CHUNK = 1 << 22  # Elements: a float64 sum of this many 30-bit integers is exact.
_ONE = 2.0**30


class Gradient:
    """The gradients of weights that are gathered together; `lengths` has the number of elements of each rank.

    Attributes:
      sent_at_once: bytes of one all-to-all: enough to saturate links, little next to a unit that needs sharding.
    """

    sent_at_once = 1 << 27

    def __init__(
        self,
        weights: Sequence[ZeroParameter],
        lengths: Sequence[int],
        ranks: Ranks,
        *,
        sharded: bool,
        device: torch.device,
        wire: GradientWire,
        channel: Channel,
    ):
        self._weights, self._lengths, self._ranks, self._sharded = weights, lengths, ranks, sharded
        self._device, self._wire, self._channel = device, wire, channel
        self._firsts = list(itertools.accumulate((weight.size for weight in weights), initial=0))
        self._starts = list(itertools.accumulate(lengths, initial=0))
        self._own = lengths[ranks.rank]
        self._present: set[int] = set()  # Weights with a gradient since zero_grad.
        self._unreduced: dict[int, Tensor] = {}  # Their flat gradients that are not reduced yet.
        self._added: set[int] = set()  # Unreduced gradients that are sums, in memory of this object.
        self._reduced: Tensor | None = None
        self._clipped: Tensor | None = None
        self._pending: Pending | None = None
        self._sent: Mapping[int, Tensor] = {}  # Read by the running reduction.

    @property
    def is_pending(self) -> bool:
        return bool(self._unreduced)

    def collect(self, index: int) -> bool:
        """Move the gradient of a parameter here. Returns True if all weights have a gradient."""
        weight = self._weights[index]
        for parameter in {weight.parameter, weight.visible}:
            if parameter.grad is not None and parameter.grad is not weight.grad_placeholder:
                grad, parameter.grad = parameter.grad, None
                self._add(index, grad)
        return len(self._unreduced) == len(self._weights)

    def accumulate(self, index: int, grad: Tensor) -> None:
        """Add a gradient that autograd adds to one that was moved here. Autograd still owns its memory."""
        self._add(index, grad if index in self._unreduced else grad.clone())

    def _add(self, index: int, grad: Tensor) -> None:
        """Add a gradient in float32, and put the placeholder at `.grad`."""
        weight = self._weights[index]
        if index in self._present and weight.visible.grad is None:
            self.forget_cleared()
        if self._clipped is not None:
            raise RuntimeError(
                f"ZeroOptimizer: gradients (of {weight.name}) are already clipped, so no more can be accumulated; call "
                "clip_grad_norm_ after the last backward pass of a step, and zero_grad before the next"
            )
        grad = grad.detach().reshape(-1)
        if index not in self._unreduced:
            self._unreduced[index] = grad
        elif index in self._added:
            self._unreduced[index] += grad
        else:
            self._unreduced[index] = self._unreduced[index].float() + grad
            self._added.add(index)
        weight.visible.grad = weight.grad_placeholder
        self._present.add(index)

    def forget(self, index: int) -> None:
        """Set a gradient to zero. Every rank must, or sums of sharded gradients would include only some ranks."""
        self.finish()
        self._present.discard(index)
        self._unreduced.pop(index, None)
        self._added.discard(index)
        if not self._present:
            self.clear()
            return
        at = sum(weight.master.numel() for weight in self._weights[:index])
        for own in (self._reduced, self._clipped):
            if own is not None:
                own[at : at + self._weights[index].master.numel()].zero_()

    def forget_cleared(self) -> None:
        """Forget the gradients that `zero_grad` of the model has set to None."""
        for index in [index for index in self._present if self._weights[index].visible.grad is None]:
            self.forget(index)

    def clear(self) -> None:
        self.finish()
        self._reduced = self._clipped = None
        self._present, self._unreduced, self._added = set(), {}, set()

    def reduce(self) -> None:
        """Start the sum over ranks of the unreduced gradients of sharded weights."""
        self.finish()
        if self._unreduced:
            fresh = self._reduced is None
            if self._reduced is None:
                self._reduced = torch.empty(self._own, dtype=torch.float32, device=self._device)
            self._sent, self._unreduced, self._added = self._unreduced, {}, set()
            self._pending = self._channel.begin(self._sum(self._sent, self._reduced, fresh))

    def finish(self) -> None:
        """Wait for a running reduction, and release the gradients that it sent."""
        if self._pending is not None:
            self._pending.wait()
            self._pending, self._sent = None, {}

    def settle(self) -> None:
        """Move gradients that users have set at `.grad`, forget cleared ones, and reduce if weights are sharded."""
        for index, weight in enumerate(self._weights):
            if weight.visible.grad is not weight.grad_placeholder and weight.visible.grad is not None:
                self.collect(index)
        self.forget_cleared()
        if self._sharded and self._clipped is None:
            self.reduce()
        self.finish()

    def mean(self) -> Tensor:
        """Return the mean over ranks of this rank's elements; zeros without gradients. Call `settle` first."""
        if self._clipped is not None:
            return self._clipped
        total = self.total()
        return torch.div(total, self._divisor(), out=None if total is self._reduced else total)

    def freeze_mean(self) -> Tensor:
        """Replace the sum by the mean, to be clipped. Until `clear` no gradient can be added. Call `settle` first."""
        if self._clipped is None:
            self._clipped = self.total().div_(self._divisor())
            self._reduced, self._unreduced, self._added = None, {}, set()
        return self._clipped

    @property
    def is_clipped(self) -> bool:
        return self._clipped is not None

    def total(self) -> Tensor:
        """Return the sum over ranks, for callers that divide themselves. Call `settle` first."""
        if self._sharded:
            if self._reduced is not None:
                return self._reduced
            return torch.zeros(self._own, dtype=torch.float32, device=self._device)
        total = torch.empty(self._own, dtype=torch.float32, device=self._device)
        self._channel.begin(self._sum(self._unreduced, total, True)).wait()
        return total

    def _divisor(self) -> Tensor:
        """Return the number of ranks as a tensor: on a GPU torch divides by numbers through a reciprocal."""
        return torch.full((), self._ranks.size, dtype=torch.float32, device=self._device)

    @torch.no_grad()
    def _sum(self, unreduced: Mapping[int, Tensor], total: Tensor, fresh: bool) -> Steps:
        """Reduce-scatter that adds in rank order, whatever the backend, the sharding and the number of buffers.

        It sends as much as a ring does, (ranks - 1) / ranks of the elements. It is split into all-to-alls that send and
        receive at most `sent_at_once` bytes each. Their number follows from lengths that all ranks know.
        """
        # Elements of one rank, whole blocks of the wire.
        at_once = self.sent_at_once // (self._ranks.size * (self._wire.dtype or torch.float32).itemsize)
        most = max(at_once // self._wire.unit, 1) * self._wire.unit
        dtype = self._dtype_of(unreduced)
        for at in range(0, max(self._lengths), most):
            stops = [min(at + most, length) for length in self._lengths]
            ranges = [(start + min(at, stop), start + stop) for start, stop in zip(self._starts, stops, strict=False)]
            padded = [self._wire.padded(stop - start) for start, stop in ranges]
            values = self._packed(unreduced, ranges, padded, dtype)
            start, stop = ranges[self._ranks.rank]
            there = total[at : at + stop - start]
            yield from self._wire.sum_in_order(
                values, padded, there, self._ranks.group, fresh=fresh, asynchronous=self._channel.asynchronous
            )

    def _dtype_of(self, unreduced: Mapping[int, Tensor]) -> torch.dtype:
        """Return the dtype of values to send, or to quantize: gradients of one dtype are not converted."""
        found = {grad.dtype for grad in unreduced.values()}
        return self._wire.dtype or (found.pop() if len(found) == 1 else torch.float32)

    def _packed(
        self,
        unreduced: Mapping[int, Tensor],
        ranges: Sequence[tuple[int, int]],
        padded: Sequence[int],
        dtype: torch.dtype,
    ) -> Tensor:
        """Concatenate ranges of the unreduced gradients; zeros for weights without one, and up to a padded length.

        `cat` copies vectors of 16 bytes where `_foreach_copy_` copies 4 elements, but it would need more memory to
        convert.
        """
        parts: list[Tensor] = []
        for (start, stop), length in zip(ranges, padded, strict=True):
            padding = length - (stop - start)
            index = bisect_right(self._firsts, start) - 1
            while start < stop:
                first, end = self._firsts[index], min(stop, self._firsts[index + 1])
                if index in unreduced:
                    parts.append(unreduced[index][start - first : end - first])
                else:
                    parts.append(torch.zeros(end - start, dtype=dtype, device=self._device))
                start, index = end, index + 1
            if padding:
                parts.append(torch.zeros(padding, dtype=dtype, device=self._device))
        if all(part.dtype == dtype for part in parts):
            return torch.cat(parts)
        packed = torch.empty(sum(padded), dtype=dtype, device=self._device)
        torch._foreach_copy_(packed.split([*map(torch.numel, parts)]), parts)
        return packed


@torch.no_grad()
def norm_over_ranks(parts: Sequence[Tensor], norm_type: float, group: dist.ProcessGroup | None) -> Tensor:
    """Return the norm of all elements, float32 `[]`, with equal bits on every rank. Collective."""
    device = parts[0].device
    largest = torch.zeros((), dtype=torch.float32, device=device)
    for part in parts:
        if part.numel():
            largest = torch.maximum(largest, part.abs().amax())  # NaN passes through both.
    if group is not None:
        largest = max_over_ranks(largest.view(1), group).view(())
    if norm_type == float("inf"):
        return largest
    finite = largest.isfinite()
    exponent = torch.frexp(torch.where(finite, largest, 0.0))[1].to(torch.int64)
    down, up = _power_of_two(-exponent), _power_of_two(exponent)
    sums = torch.zeros(2, dtype=torch.int64, device=device)
    for part in parts:
        for chunk in part.split(_CHUNK) if part.numel() else ():
            ratio = chunk.double().abs_() * down
            powers = (ratio * ratio if norm_type == 2.0 else ratio.pow_(norm_type)).mul_(_ONE)
            high = powers.floor()
            low = powers.sub_(high).mul_(_ONE).round_()
            sums += torch.stack([high.sum(), low.sum()]).nan_to_num_(0.0, 0.0, 0.0).to(torch.int64)
    if group is not None:
        dist.all_reduce(sums, group=group)
    total = (sums[0].double() + sums[1].double() / _ONE) / _ONE
    root = total.sqrt() if norm_type == 2.0 else total ** (1.0 / norm_type)
    return torch.where(finite, (root * up).float(), largest)


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return `2.0**exponent`, built from bits: no `pow` that differs between libraries."""
    return ((exponent + 1023) << 52).view(torch.float64)


@torch.no_grad()
def clip_by_norm(parts: Sequence[Tensor], norm: Tensor, max_norm: float | Tensor) -> None:
    """Multiply in place by `min(1, max_norm / (norm + 1e-6))`, as `torch.nn.utils.clip_grads_with_norm_` does."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for part in parts:
        part.mul_(factor)
