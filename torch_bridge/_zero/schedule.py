"""Schedule of gathers and reductions of sharded weights, and the module hooks that drive it.

    forward     gather 0 | gather 1, run 0 | gather 2, run 1, free 0 | ...
    backward    gather 2, run 3 | reduce 3, gather 1, run 2, free 3 | ...

A unit is *taken* when its modules get their weights, and *left* when they are done. The next unit is predicted from the
last pass. Gathered at a time are the taken units (one, or nested ones) and one *ahead*; gradients of one unit are being
reduced.

All ranks start collectives in the same order, or they would deadlock:

- Each start follows only from the calls below (`begin_forward`, `take`, `leave`, `reduce` and so on), their units, and
  whether autograd records or runs: not from time, the completion of a collective, values of tensors or the rank.
- Hooks make these calls, so ranks make the same calls if they run the same modules in the same order and have gradients
  for the same parameters. Gathering on demand would require the same.

A wrong prediction is therefore wrong on all ranks: all gather a unit in vain, free it, and gather the right one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from qshard.torch_bridge._delayed_scaling import DelayedScale
from qshard.torch_bridge._modules import modules_of
from qshard.torch_bridge._ops.eager import is_capturing
from qshard.torch_bridge._optim.cast_master import Parity
from qshard.torch_bridge._quantized.device_moves import Move, changes, guard_moves
from qshard.torch_bridge._torch_internals import active_ddp, backward_id, call_after_backward, pytree
from qshard.torch_bridge._zero.buffers import FlatBuffer
from qshard.torch_bridge._zero.placeholders import GradientHook, weakly
from qshard.torch_bridge._zero.streams import Channel
from qshard.torch_bridge._zero.weight import ZeroParameter

T = TypeVar("T")


class Order(Generic[T]):
    """Learned order of the units in one kind of pass.

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
        return 0 <= self._at == len(self._known) - 1

    def begin(self) -> None:
        self._seen, self._at = [], -1

    def following(self, unit: T) -> T | None:
        """Record that a unit is taken, and return the unit expected next, if any."""
        self._seen.append(unit)
        try:
            self._at = self._known.index(unit, self._at + 1)
        except ValueError:  # Unknown here; later units may still be found.
            return None
        return None if self.is_over else self._known[self._at + 1]

    def end(self) -> None:
        """Learn the order of the finished pass. A shorter pass, over part of the model, is learned when it repeats."""
        if len(self._seen) >= len(self._known) or self._seen == self._last:
            self._known = self._seen
        self._last = self._seen


class Schedule:
    """Gathers and reductions of the units of one model."""

    def __init__(self, device: torch.device):
        self.flats: list[FlatBuffer] = []
        self.in_backward = False  # True between the first gather of a backward pass and its end.
        computing: set[torch.cuda.Stream] = set()
        self.reductions, self._gathers = Channel(device, computing), Channel(device, computing)
        self._device = device
        self._forward: Order[FlatBuffer] = Order()
        self._backward: Order[FlatBuffer] = Order()
        self._in_forward = False  # True while the whole model runs, not only part of it.
        self._next: FlatBuffer | None = None  # The predicted unit.
        self._ahead: FlatBuffer | None = None  # The unit gathered ahead.
        self._reducing: FlatBuffer | None = None

    def begin_forward(self) -> None:
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
        """End a backward pass, also for units with parameters that got no gradient."""
        self.in_backward = False
        self._backward.end()
        for flat in self.flats:
            self.reduce(flat)
            if flat.in_backward or (flat.in_use and not self._in_forward):  # A forward may call backward.
                flat.free()
            flat.in_backward = False
        self._drop()
        self._finish()

    def take(self, flat: FlatBuffer) -> None:
        """Gather a unit and put its weights into its modules, then start to gather the next unit."""
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
        """Free the weights of a unit, unless it comes next: the last unit of forward is the first of backward."""
        if flat is self._next and self._ahead is None:
            flat.hide()
            self._ahead = flat
        else:
            flat.free()

    def end_unit_backward(self, flat: FlatBuffer) -> None:
        """Reduce the gradients of a unit and leave it, once its gradients are complete."""
        self.reduce(flat)
        flat.in_backward = False
        self.leave(flat)

    def reduce(self, flat: FlatBuffer) -> None:
        """Start to sum the gradients of a unit, after the previous unit, which releases its gradients."""
        if flat.gradient.is_pending:
            self._finish()
            flat.gradient.reduce()
            self._reducing = flat

    def abandon(self) -> None:
        """Free everything that was gathered, after a pass that raised or a change of weights."""
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
    """Return True in a backward pass, and in a forward that activation checkpointing reruns in it."""
    return backward_id() is not None


class Hook:
    """A module hook that compilers do not trace, and that copies and pickles as a hook without effect."""

    def __init__(self, call: Callable[..., Any] | None = None):
        self._call = None if call is None else torch.compiler.disable(call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return None if self._call is None else self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, ()


def watch(
    model: nn.Module,
    units: Sequence[nn.Module],
    flats: Sequence[FlatBuffer],
    schedule: Schedule,
    parity: Parity,
    renew: Callable[[], None],
) -> None:
    """Register hooks for gradients, passes and moves of the model, and for uses of its units, if they are sharded."""
    for unit, flat in zip(units, flats, strict=True):
        for index, weight in enumerate(flat.weights):
            weight.parameter.register_post_accumulate_grad_hook(GradientHook(weakly(flat.collect_gradient, index)))
        if flat.sharded:
            _watch_uses(unit, flat, schedule, parity, renew)
    _watch_model(model, schedule, renew)
    _watch_moves(model, [weight for flat in flats for weight in flat.weights])
    on_load = Hook(weakly(renew))
    for module in modules_of(model):
        if isinstance(module, DelayedScale):
            module.group, module.on_load = flats[0].ranks.group, on_load


def _watch_moves(model: nn.Module, weights: Sequence[ZeroParameter]) -> None:
    """Make moves of the model, or of a module that owns weights, raise before anything is moved."""
    owned: dict[nn.Module, list[ZeroParameter]] = {model: [*weights]}
    for weight in weights:
        for module, _ in weight.owners:
            if module is not model:
                owned.setdefault(module, []).append(weight)

    def check(module: nn.Module, move: Move) -> None:
        for weight in owned[module]:
            if changes(move, weight.visible):
                raise RuntimeError(
                    f"ZeroOptimizer: {weight.name} cannot be moved after the optimizer was made, as its masters and "
                    "buffers would not move; call .to() on the model before that"
                )

    for module in owned:
        guard_moves(module, Hook(check))


class ZeroUnit(NamedTuple):
    """A unit with sharded weights, as `module.zero_unit`: for readers of weights outside of a pass."""

    flat: FlatBuffer
    schedule: Schedule
    parity: Parity
    renew: Callable[[], None]

    def cast_dtype(self, weight: ZeroParameter) -> torch.dtype:
        """Return the dtype of the values of a weight that are gathered, or quantized and gathered."""
        return torch.float32 if weight.fmt is not None and self.parity == "master" else weight.dtype

    def gather_values(self) -> dict[int, Tensor]:
        """Return the whole weights as values, before a cast to codes, by the `id` of their parameters. Collective."""
        masters = self.flat.gather_masters()
        return {id(w.parameter): masters[w.name].to(self.cast_dtype(w)) for w in self.flat.weights}

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Gather the weights into their modules, and free them after it. Collective."""
        self.renew()
        was_in_use = self.flat.in_use
        self.schedule.take(self.flat)
        try:
            yield
        finally:
            if not was_in_use:
                self.schedule.leave(self.flat)


def _watch_uses(
    module: nn.Module, flat: FlatBuffer, schedule: Schedule, parity: Parity, renew: Callable[[], None]
) -> None:
    """Register hooks that gather the sharded weights of a unit before each use, and free them after it."""
    schedule.flats.append(flat)
    module.zero_unit = ZeroUnit(flat, schedule, parity, renew)  # type: ignore[assignment]
    flat.gradient_is_whole = schedule.end_unit_backward

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
        if not flat.in_backward:  # Else activation checkpointing reruns it, and backward still needs it.
            schedule.leave(flat)

    def refuse_copies(protocol: Any) -> Any:
        raise TypeError(
            f"ZeroOptimizer: {type(module).__name__} (sharded weights) cannot be pickled or copied; load "
            "full_weights() into another model"
        )

    module.register_forward_pre_hook(Hook(before_forward))
    module.register_forward_hook(Hook(after_forward))
    module.__reduce_ex__ = refuse_copies  # type: ignore[method-assign]


def _watch_model(model: nn.Module, schedule: Schedule, renew: Callable[[], None]) -> None:
    """Register hooks that publish loaded masters before a forward, and refuse wrappers. Call it last."""

    def before_forward(*_: Any) -> None:
        wrapper = active_ddp()
        if wrapper is not None and any(module is model for module in wrapper.modules()):
            raise RuntimeError(
                "ZeroOptimizer: model is wrapped in DistributedDataParallel, but the optimizer already reduces "
                "gradients; call the model without the wrapper"
            )
        renew()
        schedule.begin_forward()

    # Outside of the hooks of the model as a unit.
    model.register_forward_pre_hook(Hook(before_forward), prepend=True)
    model.register_forward_hook(Hook(lambda *_: schedule.end_forward()))


def check_parameters(model: nn.Module, flats: list[FlatBuffer]) -> None:
    """Raise RuntimeError if a parameter was replaced, moved, frozen, written or added: a step would ignore it."""
    ours: set[int] = set()
    for flat in flats:
        for weight in flat.weights:
            visible = weight.visible
            there = {id(module._parameters.get(name)) for module, name in weight.owners}
            if not there <= {id(visible), id(weight.parameter)}:
                raise _change_error(weight.name, "was replaced", "change the model before making its optimizer")
            if not visible.requires_grad:
                raise _change_error(
                    weight.name, "was frozen", "freeze it before that, or set lr and weight_decay of its group to 0"
                )
            if weight.address is not None and weight.address != (visible.data_ptr(), visible.dtype):
                raise _change_error(weight.name, "was moved", "call .to() on the model before that")
            if weight.address is not None and visible._version != weight.version:
                raise _change_error(
                    weight.name, "was written", "use load_state_dict of the model, which writes the masters too"
                )
            ours.update((id(visible), id(weight.parameter)))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in ours:
            raise _change_error(name, "became trainable", "add and unfreeze parameters before that")


def _change_error(name: str, what: str, instead: str) -> RuntimeError:
    return RuntimeError(f"ZeroOptimizer: {name} {what} after the optimizer was made; {instead}")
