"""The base class of autograd nodes: a first derivative, and a clear error where a second one is taken.

Kernels have no derivatives, so a gradient that a node returns is a constant for autograd. Under `create_graph=True` a
gradient penalty would then silently lose the terms of the node. So there each gradient is the result of a second node,
which raises in its own backward. The second node is attached to the inputs of the first, whether or not the gradient
that came in requires grad; `torch.autograd.function.once_differentiable` looks at that one alone. To calculate gradients
under `create_graph=True`, to add them up and to step with them stays possible.

The link is an empty tensor, the *anchor*: a second result of the node, which autograd saves with the others. It costs
about 2 us a call, and no memory on a device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from qshard.names import no_second_derivative

Gradients = Sequence[Tensor | None]


class Node(torch.autograd.Function):
    """A `torch.autograd.Function` of one result, whose gradients have no derivative.

    Subclasses define two static methods. `forward(ctx, *inputs)` returns the result and the tensors to save.
    `gradients(ctx, saved, grad)` returns a gradient for each input; it may clear `saved`, so that tensors are freed.

    Attributes:
      op: the public function, for errors.
      instead: what to do where a second derivative is needed, for errors.
      degree: 1 for a node that is linear in its inputs together, so that their gradients depend on `grad` alone; 2 for
        one that is linear in the first input and in the others together, so that the gradient of one depends on the
        other; None for all else.
    """

    op: ClassVar[str]
    instead: ClassVar[str]
    degree: ClassVar[int | None] = None

    def __init_subclass__(cls) -> None:
        """Methods of their own in each class: Dynamo traces these two, by source, and knows no `cls`."""
        cls.forward = staticmethod(_with_anchor(cls.forward))  # type: ignore[method-assign]
        cls.backward = staticmethod(_backward_of(cls, cls.gradients))  # type: ignore[attr-defined, method-assign]

    @classmethod
    def apply(cls, *inputs: Any) -> Any:
        """The result. Dynamo passes this by, and handles transforms itself.

        Raises:
          NotImplementedError: a transform of `torch.func` runs, or an input has a forward-mode tangent.
        """
        if torch._C._are_functorch_transforms_active():
            raise NotImplementedError(
                f"{cls.op}: transforms of torch.func (grad, jvp, vmap, hessian) do not apply to it; differentiate with "
                f"torch.autograd.grad, or {cls.instead}"
            )
        _check_no_tangent(cls, inputs)
        result = super().apply(*inputs)  # type: ignore[no-untyped-call]
        return result[0] if type(result) is tuple else result


def _with_anchor(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapper(ctx: Any, *inputs: Any) -> Any:
        result, saved = forward(ctx, *inputs)
        ctx.has_anchor = not torch.compiler.is_compiling() and any(ctx.needs_input_grad)
        if not ctx.has_anchor:
            ctx.save_for_backward(*saved)
            return result
        anchor = torch.empty(0, device="cpu")
        ctx.save_for_backward(*saved, anchor)
        return result, anchor

    return wrapper


def _backward_of(cls: type[Node], gradients: Callable[..., Gradients]) -> Callable[..., Any]:
    @functools.wraps(gradients)
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> Any:
        saved = [*ctx.saved_tensors]  # Once: checkpointing unpacks once.
        anchor = saved.pop() if ctx.has_anchor else None
        if torch.compiler.is_compiling():  # AOTAutograd itself raises for second derivatives.
            return gradients(ctx, saved, grad)
        _check_no_tangent(cls, (grad,))
        if not torch.is_grad_enabled():
            return gradients(ctx, saved, grad)
        with torch.no_grad():
            made = gradients(ctx, saved, grad)
        return made if anchor is None else _attached(cls, ctx.needs_input_grad, made, anchor, grad)

    return backward


def _check_no_tangent(cls: type[Node], tensors: Sequence[Any]) -> None:
    if forward_ad._current_level < 0:
        return
    if any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(
            f"{cls.op}: forward-mode differentiation (a dual tensor) is not defined; differentiate with "
            f"torch.autograd.grad, or {cls.instead}"
        )


def _attached(
    cls: type[Node], needed: Sequence[bool], gradients: Gradients, anchor: Tensor, grad: Tensor
) -> Gradients:
    """Gradients that raise as they are differentiated, where they depend on what requires grad."""

    def depends(i: int) -> bool:
        if grad.requires_grad:
            return True
        if cls.degree is None:
            return True
        return cls.degree == 2 and (any(needed[1:]) if i == 0 else needed[0])

    where = [i for i, made in enumerate(gradients) if made is not None and depends(i)]
    attached = [*gradients]
    if where:
        text = no_second_derivative(cls.op, cls.instead)
        made = _Refusal.apply(text, len(where), *(gradients[i] for i in where), anchor, grad)
        for i, each in zip(where, made, strict=True):
            attached[i] = each
    return tuple(attached)


class _Refusal(torch.autograd.Function):
    """Gradients as they are, with a backward pass that raises."""

    @staticmethod
    def forward(ctx: Any, text: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """`tensors`: the gradients, then those that they depend on."""
        ctx.text = text
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise NotImplementedError(ctx.text)
