"""Placeholder tensors for freed weights and gradients: tensors without memory that raise on use.

    between uses of a unit   module.weight       WeightPlaceholder: this rank stores only its slice of the master
    while it is used         module.weight       the gathered weight
    after backward           module.weight.grad  GradientPlaceholder: gradients are in flat float32 buffers

Their ops raise an error that says what to call instead. Reading freed memory would crash the process, and a `.grad` of
None would be taken for no gradient.
"""

from __future__ import annotations

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
    """Bind leading arguments to a weakly referenced method: objects that tensors refer to may never be freed."""
    found = weakref.WeakMethod(method)

    def call(*others: Any) -> None:
        if (there := found()) is not None:
            there(*first, *others)

    return call


class Placeholder(Tensor):
    """A tensor with a shape, dtype and device, and no memory. Its ops raise `message`."""

    message: str

    __torch_function__ = disabled_torch_function

    @staticmethod
    def empty(cls: type[Any], shape: Sequence[int], dtype: torch.dtype, device: torch.device, message: str) -> Any:
        self = make_wrapper(cls, tuple(shape), dtype=dtype, device=device)
        self.message = message
        return self

    def refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(self.message)

    # These bypass `__torch_dispatch__`: they would return address 0 or write an empty file.
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
    """The `.grad` of a weight after its values were moved to a flat buffer, which autograd adds to through it."""

    accumulate: Callable[[Tensor], None]
    clear: Callable[[], None]

    @staticmethod
    def __new__(
        cls, parameter: Tensor, name: str, accumulate: Callable[[Tensor], None], clear: Callable[[], None]
    ) -> Any:
        message = (
            f"ZeroOptimizer: grad of {name} {tuple(parameter.shape)} is not available: gradients are reduced into "
            "shards;\ncall clip_grad_norm_(max_norm) of the optimizer for their norm and to clip them, "
            "step(inv_grad_scale=) to unscale them"
        )
        self = Placeholder.empty(cls, parameter.shape, parameter.dtype, parameter.device, message)
        self.accumulate, self.clear = accumulate, clear
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> None:  # type: ignore[override]
        """Return None: a copied model has no gradients, as with plain parameters."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self = args[0] if args else None
        if isinstance(self, GradientPlaceholder):
            if func is aten.add_.Tensor and not kwargs:  # From autograd's AccumulateGrad.
                self.accumulate(args[1])
                return self
            if func is aten.zero_.default:  # From nn.Module.zero_grad(set_to_none=False).
                self.clear()
                return self
        return super().__torch_dispatch__(func, types, args, kwargs)


class WeightPlaceholder(Placeholder):
    """A freed weight: this rank has a flat float32 slice of it, from element `start`, in memory of the optimizer."""

    local: Tensor
    start: int
    label: str
    on_write: Callable[[], None]

    @staticmethod
    def __new__(
        cls,
        local: Tensor,
        start: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        name: str,
        on_write: Callable[[], None],
    ) -> Any:
        message = (
            f"ZeroOptimizer: {name} {tuple(shape)} (sharded weights) is freed between uses of its unit; call the "
            "module that owns it,\nor choose units= so that it is gathered where you need it, or read full_weights()"
        )
        self = Placeholder.empty(cls, shape, dtype, local.device, message)
        self.local, self.start, self.label, self.on_write = local.detach(), start, name, on_write
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self = args[0] if args else None
        if isinstance(self, WeightPlaceholder):
            if func in (aten.detach.default, aten.alias.default):
                return WeightPlaceholder(self.local, self.start, self.shape, self.dtype, self.label, self.on_write)
            if func is aten.copy_.default:  # From load_state_dict.
                self.local.copy_(own_part(args[1], self.shape, self.start, self.local.numel(), self.label))
                self.on_write()
                return self
        return super().__torch_dispatch__(func, types, args, kwargs)


def own_part(value: Any, shape: Sequence[int], start: int, length: int, name: str) -> Tensor:
    """Return `length` elements of a state from flat index `start`: the slice of this rank.

    `value` is a whole tensor, a DTensor, or a state that is sliced in the same way; ValueError if shapes or slices
    differ.
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
    if tuple(value.shape) != tuple(shape):
        raise ValueError(
            f"ZeroOptimizer: {name} {tuple(value.shape)} does not have the shape {tuple(shape)}; load the state of the "
            "same model"
        )
    return cast(Tensor, value.detach().reshape(-1)[start : start + length])


class GradientHook:
    """Post-accumulate hook of a parameter: moves its gradient away as soon as autograd has computed it."""

    def __init__(self, take: Callable[[Tensor], None]):
        self._take = take

    def __call__(self, parameter: Tensor) -> None:
        self._take(parameter)


def has_optimizer(parameter: Any) -> bool:
    _, hooks = hooks_of(parameter)
    return isinstance(parameter, WeightPlaceholder) or any(
        isinstance(hook, GradientHook) for hook in (hooks or {}).values()
    )
