"""When sharded weights travel: the next unit's codes while a unit runs, the last one's gradients while the next runs.

    forward     gather 0 | gather 1, run 0 | gather 2, run 1, free 0 | ...
    backward    gather 2, run 3 | reduce 3, gather 1, run 2, free 3 | ...

A unit is *taken* when its weights are put before layers, and *left* when they have done with them. Which comes next is
what came next in the pass before. Of what is gathered there are at most the units taken (one, or nested ones) and one
*ahead*; of gradients on their way, those of one unit.

Collectives begin in the same order on every rank, which is what keeps ranks from waiting for each other for ever:

- What begins, and when, follows from the sequence of calls below alone: `begin_forward`, `take`, `leave`, `reduce` and
  so on, each with the number of a unit, and from whether autograd records and runs. No clock is asked, nor whether a
  collective is done, nor a value of a tensor, nor the number of a rank.
- Hooks make these calls, so ranks make the same ones if they run the same modules in the same order, and have
  gradients for the same parameters. Gathers on demand ask for that too.

So a wrong guess is one on all ranks: all gather a unit that none uses, free it, and gather the other one.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import torch

from qshard.torch_bridge._zero.flat_buffers import Flat
from qshard.torch_bridge._zero.streams import Channel

T = TypeVar("T")


class Order(Generic[T]):
    """The order of units in a kind of pass, as learned.

    >>> order = Order()
    >>> for _ in range(2):
    ...     order.begin()
    ...     found = [order.following(unit) for unit in "abac"]
    ...     order.end()
    >>> found
    ['b', 'a', 'c', None]
    """

    def __init__(self) -> None:
        self._known: list[T] = []
        self._seen: list[T] = []
        self._last: list[T] = []
        self._at = -1

    @property
    def first(self) -> T | None:
        return self._known[0] if self._known else None

    @property
    def is_over(self) -> bool:
        """Whether no other unit should follow in this pass."""
        return 0 <= self._at == len(self._known) - 1

    def begin(self) -> None:
        self._seen, self._at = [], -1

    def following(self, unit: T) -> T | None:
        """Notes that a unit is taken, and says which one should be next, if any."""
        self._seen.append(unit)
        try:
            self._at = self._known.index(unit, self._at + 1)
        except ValueError:  # It was not there, or not then. Those that follow may be.
            return None
        return None if self.is_over else self._known[self._at + 1]

    def end(self) -> None:
        """The pass is complete. One of fewer units, as of a part of the model, is the order when it comes again."""
        if len(self._seen) >= len(self._known) or self._seen == self._last:
            self._known = self._seen
        self._last = self._seen


class Schedule:
    """Of the units of one model.

    Attributes:
      in_backward: whether a backward pass has been seen to begin, and not to end.
    """

    def __init__(self, device: torch.device):
        self.flats: list[Flat] = []
        self.in_backward = False
        computing: set[torch.cuda.Stream] = set()
        self.reductions, self._gathers = Channel(device, computing), Channel(device, computing)
        self._device = device
        self._forward: Order[Flat] = Order()
        self._backward: Order[Flat] = Order()
        self._in_forward = False  # Whether the model runs, not a part of it alone.
        self._next: Flat | None = None  # What should be taken next,
        self._ahead: Flat | None = None  # and what was gathered for it.
        self._reducing: Flat | None = None

    def begin_forward(self) -> None:
        """The model is called."""
        if not autograd_runs():
            raised = self.in_backward or any(flat.in_use for flat in self.flats)
            if raised or self._ahead not in (None, self._forward.first):
                self.abandon()
            self._forward.begin()
            self._in_forward = True

    def end_forward(self) -> None:
        if self._in_forward and not autograd_runs():
            self._in_forward = False
            self._forward.end()
            if self._ahead is not self._next:
                self._drop()

    def begin_backward(self) -> None:
        self.in_backward = True
        self._backward.begin()

    def end_backward(self) -> None:
        """Also of units of which some parameter had no gradient."""
        self.in_backward = False
        self._backward.end()
        for flat in self.flats:
            self.reduce(flat)
            if flat.in_backward or (flat.in_use and not self._in_forward):  # A model may call backward in forward.
                flat.free()
            flat.in_backward = False
        self._drop()
        self._finish()

    def take(self, flat: Flat) -> None:
        """Puts the weights of a unit before its layers, and begins to gather those of the next."""
        if flat.in_use:
            return
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "ZeroOptimizer: sharded weights cannot be used while a CUDA graph is captured, as each gather has "
                "other memory; run them outside of graphs, or pass shard_weights=False"
            )
        if self._ahead is not flat:
            self._drop()
        self._ahead = None
        flat.gather(self._gathers)
        flat.use()
        self._next = self._following(flat)
        if self._next is not None and self._next.freed:
            self._next.gather(self._gathers)
            self._ahead = self._next

    def leave(self, flat: Flat) -> None:
        """Frees the weights of a unit, unless it is the one that comes next: the last of forward, in backward."""
        if flat is self._next and self._ahead is None:
            flat.hide()
            self._ahead = flat
        else:
            flat.free()

    def pass_on(self, flat: Flat) -> None:
        """The gradients of a unit are there, so it needs its weights no more."""
        self.reduce(flat)
        flat.in_backward = False
        self.leave(flat)

    def reduce(self, flat: Flat) -> None:
        """Begins to sum the gradients of a unit, after those of the one before, whose memory goes back."""
        if flat.gradient.is_held:
            self._finish()
            flat.gradient.reduce()
            self._reducing = flat

    def abandon(self) -> None:
        """Frees all that was gathered: a pass has raised, or it will not be what it was."""
        self.in_backward = self._in_forward = False
        self._ahead = self._next = None
        self._finish()
        for flat in self.flats:
            flat.in_backward = False
            flat.free()

    def _following(self, flat: Flat) -> Flat | None:
        if autograd_runs():
            return self._backward.following(flat)
        if not self._in_forward:
            return None
        following = self._forward.following(flat)
        return self._backward.first if self._forward.is_over and torch.is_grad_enabled() else following

    def _drop(self) -> None:
        if self._ahead is not None:
            self._ahead.free()
            self._ahead = None

    def _finish(self) -> None:
        if self._reducing is not None:
            self._reducing.gradient.finish()
            self._reducing = None


def autograd_runs() -> bool:
    """Whether this is a backward pass, or what activation checkpointing runs again in it."""
    return bool(torch._C._current_graph_task_id() != -1)
