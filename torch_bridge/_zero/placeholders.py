"""Placeholder tensors for freed weights and gradients: tensors without memory, which say so.

    between uses of a unit   module.weight       WeightPlaceholder: this rank's slice of the master is all there is
    while it is used         module.weight       the gathered weight
    after backward           module.weight.grad  GradientPlaceholder: gradients are in flat buffers of float32

Each op on these raises and says what to call. A read of memory that was freed would end the process, and a gradient of
None would pass for none.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from qshard.torch_bridge._distributed.dtensor import local_of
from qshard.torch_bridge._torch_internals import disabled_torch_function, hooks_of, make_wrapper, pytree

aten = torch.ops.aten


def weakly(method: Callable[..., None], *first: Any) -> Callable[..., None]:
    """A method with its first arguments, for tensors to call: what they refer to is freed late, or never."""
    found = weakref.WeakMethod(method)

    def call(*others: Any) -> None:
        if (there := found()) is not None:
            there(*first, *others)

    return call


class Placeholder(Tensor):
    """A tensor that is not there: shape, dtype and device alone.

    Attributes:
      says: what a user is told who asks for its values.
    """

    says: str

    __torch_function__ = disabled_torch_function

    @staticmethod
    def empty(cls: type[Any], shape: Sequence[int], dtype: torch.dtype, device: torch.device, says: str) -> Any:
        self = make_wrapper(cls, tuple(shape), dtype=dtype, device=device)
        self.says = says
        return self

    def refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Raises RuntimeError: always."""
        raise RuntimeError(self.says)

    # These do not ask `__torch_dispatch__`, and would hand out an address of 0, or write a file of nothing.
    data_ptr = numpy = tolist = item = refuse
    share_memory_ = __array__ = __dlpack__ = __reduce_ex__ = __deepcopy__ = __copy__ = refuse

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        next(leaf for leaf in leaves if isinstance(leaf, Placeholder)).refuse()


class GradientPlaceholder(Placeholder):
    """Stands at `.grad` for a gradient that has gone to a flat buffer. What autograd adds to it goes there too.

    Attributes:
      accumulate, clear: what is done to the gradient that it stands for.
    """

    accumulate: Callable[[Tensor], None]
    clear: Callable[[], None]

    @staticmethod
    def __new__(
        cls, parameter: Tensor, name: str, accumulate: Callable[[Tensor], None], clear: Callable[[], None]
    ) -> Any:
        says = (
            f"ZeroOptimizer: grad of {name} {tuple(parameter.shape)} is not available: gradients are reduced into "
            "shards;\ncall clip_grad_norm_(max_norm) of the optimizer for their norm and to clip them, "
            "step(inv_grad_scale=) to unscale them"
        )
        self = Placeholder.empty(cls, parameter.shape, parameter.dtype, parameter.device, says)
        self.accumulate, self.clear = accumulate, clear
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> None:  # type: ignore[override]
        """A copy of the model has no gradient, as one of plain parameters has none."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self = args[0] if args else None
        if isinstance(self, GradientPlaceholder):
            if func is aten.add_.Tensor and not kwargs:  # Of autograd's AccumulateGrad.
                self.accumulate(args[1])
                return self
            if func is aten.zero_.default:  # Of nn.Module.zero_grad(set_to_none=False).
                self.clear()
                return self
        return super().__torch_dispatch__(func, types, args, kwargs)


class WeightPlaceholder(Placeholder):
    """A weight of which this rank holds a flat slice in float32, and which nothing else is there of.

    Attributes:
      local: the slice, flat: memory of the optimizer.
      start: its first element in the weight.
      label: its name.
      written: called when the slice is.
    """

    local: Tensor
    start: int
    label: str
    written: Callable[[], None]

    @staticmethod
    def __new__(
        cls, local: Tensor, start: int, shape: Sequence[int], dtype: torch.dtype, name: str, written: Callable[[], None]
    ) -> Any:
        says = (
            f"ZeroOptimizer: {name} {tuple(shape)} (sharded weights) is freed between uses of its unit; call the "
            "module that owns it,\nor choose units= so that it is gathered where you need it, or read full_weights()"
        )
        self = Placeholder.empty(cls, shape, dtype, local.device, says)
        self.local, self.start, self.label, self.written = local.detach(), start, name, written
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self = args[0] if args else None
        if isinstance(self, WeightPlaceholder):
            if func in (aten.detach.default, aten.alias.default):
                return WeightPlaceholder(self.local, self.start, self.shape, self.dtype, self.label, self.written)
            if func is aten.copy_.default:  # Of load_state_dict.
                self.local.copy_(own_part(args[1], self.shape, self.start, self.local.numel(), self.label))
                self.written()
                return self
        return super().__torch_dispatch__(func, types, args, kwargs)


def own_part(value: Any, shape: Sequence[int], start: int, length: int, name: str) -> Tensor:
    """The flat slice of a whole tensor, a DTensor, or a state that is sliced in the same way.

    Raises:
      ValueError: it is of another shape, or sliced otherwise.
    """
    flat_start = getattr(value, "start", None)
    if flat_start is not None:
        local = cast(Tensor, getattr(value, "local", None))
        if (tuple(value.shape), flat_start, local.numel()) != (tuple(shape), start, length):
            raise ValueError(
                f"ZeroOptimizer: {name} {tuple(value.shape)} (elements {flat_start} to {flat_start + local.numel()}) "
                f"is not the slice of this rank ({start} to {start + length} of {tuple(shape)}); load it with "
                "torch.distributed.checkpoint, or load a full state"
            )
        return local
    if isinstance(value, DTensor):
        value = value.full_tensor()
    value = local_of(value)
    if value.numel() != math.prod(shape):
        raise ValueError(
            f"ZeroOptimizer: {name} {tuple(value.shape)} does not have the shape {tuple(shape)}; load the state of the "
            "same model"
        )
    return cast(Tensor, value.detach().reshape(-1)[start : start + length])


class ArrivalHook:
    """The hook of a parameter by which its gradient leaves as soon as it is made."""

    def __init__(self, take: Callable[[Tensor], None]):
        self._take = take

    def __call__(self, parameter: Tensor) -> None:
        self._take(parameter)


def has_optimizer(parameter: Any) -> bool:
    """Whether a ZeroOptimizer trains a parameter."""
    _, hooks = hooks_of(parameter)
    return isinstance(parameter, WeightPlaceholder) or any(
        isinstance(hook, ArrivalHook) for hook in (hooks or {}).values()
    )
