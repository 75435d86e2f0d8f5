"""The schedule of gathers and reductions of sharded weights, and the hooks on modules that drive it.

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

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from qshard.torch_bridge._ops.eager import is_capturing
from qshard.torch_bridge._quantized.device_moves import Move, changes, guard_moves
from qshard.torch_bridge._torch_internals import active_ddp, backward_id, call_after_backward, pytree
from qshard.torch_bridge._zero.buffers import FlatBuffer
from qshard.torch_bridge._zero.placeholders import ArrivalHook, weakly
from qshard.torch_bridge._zero.streams import Channel
from qshard.torch_bridge._zero.weight import ZeroParameter

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
        self.flats: list[FlatBuffer] = []
        self.in_backward = False
        computing: set[torch.cuda.Stream] = set()
        self.reductions, self._gathers = Channel(device, computing), Channel(device, computing)
        self._device = device
        self._forward: Order[FlatBuffer] = Order()
        self._backward: Order[FlatBuffer] = Order()
        self._in_forward = False  # Whether the model runs, not a part of it alone.
        self._next: FlatBuffer | None = None  # What should be taken next,
        self._ahead: FlatBuffer | None = None  # and what was gathered for it.
        self._reducing: FlatBuffer | None = None

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

    def take(self, flat: FlatBuffer) -> None:
        """Puts the weights of a unit before its layers, and begins to gather those of the next."""
        if flat.in_use:
            return
        if is_capturing(self._device):
            raise RuntimeError(
                "ZeroOptimizer: sharded weights do not support CUDA graph capture, as each gather allocates memory; "
                "run them outside graphs, or pass shard_weights=False"
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

    def leave(self, flat: FlatBuffer) -> None:
        """Frees the weights of a unit, unless it is the one that comes next: the last of forward, in backward."""
        if flat is self._next and self._ahead is None:
            flat.hide()
            self._ahead = flat
        else:
            flat.free()

    def pass_on(self, flat: FlatBuffer) -> None:
        """The gradients of a unit are there, so it needs its weights no more."""
        self.reduce(flat)
        flat.in_backward = False
        self.leave(flat)

    def reduce(self, flat: FlatBuffer) -> None:
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

    def _following(self, flat: FlatBuffer) -> FlatBuffer | None:
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
    return backward_id() is not None


class Hook:
    """A hook on a module, which no compiler traces, and which copies and pickles of the module have no use for."""

    def __init__(self, call: Callable[..., Any] | None = None):
        self._call = None if call is None else torch.compiler.disable(call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return None if self._call is None else self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, ()


def watch_gradients(flat: FlatBuffer) -> None:
    """Takes gradients as soon as they are made."""
    for index, weight in enumerate(flat.weights):
        weight.parameter.register_post_accumulate_grad_hook(ArrivalHook(weakly(flat.take_arrived, index)))


def watch_moves(model: nn.Module, weights: Sequence[ZeroParameter]) -> None:
    """Sees to it that a move of the model, or of a module of it that has weights, raises before anything has moved."""
    owned: dict[nn.Module, list[ZeroParameter]] = {model: [*weights]}
    for weight in weights:
        for module, _ in weight.owners:
            if module is not model:
                owned.setdefault(module, []).append(weight)

    def check(module: nn.Module, move: Move) -> None:
        for weight in owned[module]:
            if changes(move, weight.shown):
                raise RuntimeError(
                    f"ZeroOptimizer: {weight.name} cannot be moved after the optimizer was made, as its masters and "
                    "buffers would not move; call .to() on the model before that"
                )

    for module in owned:
        guard_moves(module, Hook(check))


def watch_uses(module: nn.Module, flat: FlatBuffer, schedule: Schedule, renew: Callable[[], None]) -> None:
    """Gathers sharded weights before their module runs, and frees them after it, so too in backward."""
    schedule.flats.append(flat)
    flat.gradient_is_whole = schedule.pass_on

    def before_backward(_: Tensor) -> None:
        if not schedule.in_backward:
            schedule.begin_backward()
            call_after_backward(schedule.end_backward)
        flat.in_backward = True
        schedule.take(flat)

    def before_forward(*_: Any) -> None:
        renew()
        schedule.take(flat)

    def after_forward(_module: nn.Module, _args: Any, output: Any) -> None:
        tensors = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor)]
        if torch.is_grad_enabled() and not tensors:
            raise TypeError(
                f"ZeroOptimizer: output of a unit ({type(output).__name__}) holds no tensor that a backward hook can "
                "watch; return tensors in tuples, lists or dicts, or choose other units"
            )
        for t in tensors:
            if flat.shares(t):
                raise RuntimeError(
                    f"ZeroOptimizer: output of a unit ({type(module).__name__}) is its own weight, which is freed now; "
                    "return a .clone(), or choose units= that contain its users too"
                )
            if t.requires_grad:
                t.register_hook(before_backward)
        if not flat.in_backward:  # Else activation checkpointing runs it, and backward goes on to use it.
            schedule.leave(flat)

    def refuse_copies(protocol: Any) -> Any:
        raise TypeError(
            f"ZeroOptimizer: {type(module).__name__} (sharded weights) cannot be pickled or copied; load "
            "full_weights() into another model"
        )

    module.register_forward_pre_hook(Hook(before_forward))
    module.register_forward_hook(Hook(after_forward))
    module.__reduce_ex__ = refuse_copies  # type: ignore[method-assign]


def watch_model(model: nn.Module, schedule: Schedule, renew: Callable[[], None]) -> None:
    """Before the model runs: masters that were loaded are published, and wrappers are refused. To call last."""

    def before_forward(*_: Any) -> None:
        wrapper = active_ddp()
        if wrapper is not None and any(module is model for module in wrapper.modules()):
            raise RuntimeError(
                "ZeroOptimizer: model is wrapped in DistributedDataParallel, but the optimizer already reduces "
                "gradients; call the model without the wrapper"
            )
        renew()
        schedule.begin_forward()

    # Outside of those of the model as a unit.
    model.register_forward_pre_hook(Hook(before_forward), prepend=True)
    model.register_forward_hook(Hook(lambda *_: schedule.end_forward()))


def check_parameters(model: nn.Module, flats: list[FlatBuffer]) -> None:
    """Raises where parameters have changed in a way that a step would pass over.

    Raises:
      RuntimeError: one was replaced, moved, frozen or written, or the model has got others.
    """
    ours: set[int] = set()
    for flat in flats:
        for weight in flat.weights:
            shown = weight.shown
            there = {id(module._parameters.get(name)) for module, name in weight.owners}
            if not there <= {id(shown), id(weight.parameter)}:
                raise _change_error(weight.name, "was replaced", "change the model before making its optimizer")
            if not shown.requires_grad:
                raise _change_error(
                    weight.name, "was frozen", "freeze it before that, or set lr and weight_decay of its group to 0"
                )
            if weight.where is not None and weight.where != (shown.data_ptr(), shown.dtype):
                raise _change_error(weight.name, "was moved", "call .to() on the model before that")
            if weight.where is not None and shown._version != weight.version:
                raise _change_error(
                    weight.name, "was written", "use load_state_dict of the model, which writes the masters too"
                )
            ours.update((id(shown), id(weight.parameter)))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in ours:
            raise _change_error(name, "became trainable", "add and unfreeze parameters before that")


def _change_error(name: str, what: str, instead: str) -> RuntimeError:
    return RuntimeError(f"ZeroOptimizer: {name} {what} after the optimizer was made; {instead}")
