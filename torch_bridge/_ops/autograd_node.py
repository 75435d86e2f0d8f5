"""Base class of autograd nodes with a first derivative, and a clear error for a second derivative.

Kernels have no derivatives, so a gradient that a node returns is a constant for autograd. Under `create_graph=True` a
gradient penalty would silently lose the terms of the node. Therefore, under `create_graph=True`, a second node passes
each gradient on, and raises in its own backward pass. The second node depends on the inputs of the first, whether or
not the incoming gradient requires grad; `torch.autograd.function.once_differentiable` checks the incoming gradient
only. Code that computes gradients under `create_graph=True`, sums them and takes a step is not affected. Before torch
2.13 DTensors lose the second node, so a backward pass that reaches a DTensor under `create_graph=True` raises at once.

The link from the second node to those inputs is an empty tensor, the *anchor*: a second result of the first node, which
autograd saves with the other tensors. It costs about 2 us per call, and no device memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from qshard._core.validation import no_graph_of_gradients, no_second_derivative
from qshard.torch_bridge._ops.eager import is_compiling, is_exporting
from qshard.torch_bridge._torch_internals import (
    has_forward_ad_level,
    in_functorch,
    is_batch,
    loses_second_derivatives,
)

GradientsOfInputs = Sequence[Tensor | None]


class Node(torch.autograd.Function):
    """A `torch.autograd.Function` with one result and only a first derivative.

    Subclasses define two static methods. `forward(ctx, *inputs)` returns the result and the tensors to save. Under a
    compiler the result may be a tuple, and only its first tensor has a gradient.
    `gradients(ctx, saved, grad)` returns a gradient for each input. It may clear `saved` to free tensors.

    Attributes:
      op: the public function, for errors.
      instead: advice for users who need a second derivative, for errors.
      degree: 1 if the node is linear in all inputs together, so that their gradients depend on `grad` alone; 2 if it is
        linear in the first input and in the other inputs together, so that each gradient depends on the other side;
        None for everything else.
    """

    op: ClassVar[str]
    instead: ClassVar[str]
    degree: ClassVar[int | None] = None

    def __init_subclass__(cls) -> None:
        """Define `forward` and `backward` per class: Dynamo traces them, and accepts no class in a closure."""
        cls.forward = staticmethod(_with_anchor(cls.forward))  # type: ignore[method-assign]
        backward = _backward_of(cls.gradients, cls.op, cls.instead, cls.degree)  # type: ignore[attr-defined]
        cls.backward = staticmethod(backward)  # type: ignore[method-assign]


def apply_node(node: type[Node], *inputs: Any) -> Any:
    """Apply a node to its inputs. Call this instead of `node.apply`.

    Raises:
      NotImplementedError: a transform of `torch.func` is active, an input has a forward-mode tangent, or `torch.export`
        traces and an input requires grad.
    """
    if is_compiling():
        if is_exporting() and torch.is_grad_enabled():
            _check_keeps_gradients(inputs, node.op)
        return node.apply(*inputs)
    if in_functorch():
        raise NotImplementedError(
            f"{node.op}: transforms of torch.func (grad, jvp, vmap) are not supported; use torch.autograd.grad; or "
            f"{node.instead}"
        )
    check_no_tangent(inputs, node.op, node.instead)
    # Skips `Function.apply`, which would check for transforms again. That saves as much time as the anchor costs.
    result = super(torch.autograd.Function, node).apply(*inputs)  # type: ignore[misc]
    return result[0] if type(result) is tuple else result


def _with_anchor(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapper(ctx: Any, *inputs: Any) -> Any:
        result, saved = forward(ctx, *inputs)
        ctx.has_anchor = not is_compiling() and any(ctx.needs_input_grad)
        if not ctx.has_anchor:
            ctx.save_for_backward(*saved)
            if not is_compiling():
                return result
            if type(result) is not tuple:
                return _unique_result(result)
            ctx.mark_non_differentiable(*result[1:])
            return _unique_result(result[0]), *result[1:]
        anchor = torch.empty(0, dtype=torch.float32, device="cpu")
        ctx.save_for_backward(*saved, anchor)
        return result, anchor

    return wrapper


def _unique_result(result: Tensor) -> Tensor:
    """Return the result as a value that no other operation of `forward` returned.

    Dynamo of torch 2.11 makes every value of `forward` an output of the node. If two outputs are one tensor, as after
    an addition in place or a conversion to the same dtype, autograd sends its gradient to the last of them, and
    `backward` gets zeros.
    """
    alias: Tensor = torch.ops.aten._unsafe_view.default(result, result.shape)
    return alias


def _backward_of(
    gradients: Callable[..., GradientsOfInputs], op: str, instead: str, degree: int | None
) -> Callable[..., Any]:
    @functools.wraps(gradients)
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> Any:
        saved = [*ctx.saved_tensors]  # Read once: checkpointing unpacks only once.
        anchor = saved.pop() if ctx.has_anchor else None
        if is_compiling():  # AOTAutograd itself raises for second derivatives.
            return gradients(ctx, saved, grad)
        if is_batch(grad):
            raise NotImplementedError(
                f"{op}: batches of gradients (is_grads_batched, vectorize, torch.func) are not supported; compute one "
                f"gradient at a time; or {instead}"
            )
        check_no_tangent((grad,), op, instead)
        if not torch.is_grad_enabled():
            return gradients(ctx, saved, grad)
        with torch.no_grad():
            grads = gradients(ctx, saved, grad)
        if anchor is None:
            return grads
        needed = ctx.needs_input_grad
        where = [i for i, each in enumerate(grads) if each is not None and _depends(i, needed, degree, grad)]
        attached = [*grads]
        if where:
            if loses_second_derivatives(ctx.next_functions):
                raise NotImplementedError(no_graph_of_gradients(op, torch.__version__))
            text = no_second_derivative(op, instead)
            results = _Refusal.apply(text, len(where), *(grads[i] for i in where), anchor, grad)
            for i, result in zip(where, results, strict=True):
                attached[i] = result
        return tuple(attached)

    return backward


def _depends(i: int, needed: Sequence[bool], degree: int | None, grad: Tensor) -> bool:
    """Return True if the gradient of input i depends on a tensor that requires grad."""
    if grad.requires_grad or degree is None:
        return True
    return degree == 2 and (any(needed[1:]) if i == 0 else needed[0])


def _check_keeps_gradients(tensors: Sequence[Any], op: str) -> None:
    if any(isinstance(x, Tensor) and x.requires_grad for x in tensors):
        raise NotImplementedError(
            f"{op}: torch.export keeps no backward pass of it, so the graph would not train; export and run it under "
            "torch.no_grad(), or give PipelineStage the modules instead of calling pipeline()"
        )


def check_no_tangent(tensors: Sequence[Any], op: str, instead: str) -> None:
    """Raise NotImplementedError if a tensor has a forward-mode tangent, which ops drop: derivatives would be zeros."""
    if not has_forward_ad_level():
        return
    if any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(
            f"{op}: forward-mode differentiation (dual tensors) is not supported; use torch.autograd.grad; or {instead}"
        )


class _Refusal(torch.autograd.Function):
    """Identity on gradients, with a backward pass that raises."""

    @staticmethod
    def forward(ctx: Any, text: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return views of the first `count` tensors. The others are the tensors that the gradients depend on."""
        ctx.text = text
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise NotImplementedError(ctx.text)
