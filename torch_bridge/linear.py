"""`linear`: three matrix products with quantized operands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from qshard import pipeline
from qshard.formats import Format, Usage
from qshard.layout import plane, source
from qshard.pipeline import Draws, Parts
from qshard.recipes import ROLE_SEEDS, Recipe, Role
from qshard.torch_bridge.delayed import DelayedScale
from qshard.torch_bridge.fsdp.weight import ShardedWeight
from qshard.torch_bridge.gemm import Operand, matmul
from qshard.torch_bridge.ops import ops
from qshard.torch_bridge.tensor import QuantizedTensor
from qshard.torch_bridge.words import words

__all__ = ["check_shape", "linear"]

aten = torch.ops.aten


# Dynamo of torch 2.11 cannot iterate over an enum, on Python 3.12.
ROLES = tuple(Role)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    *,
    seed: Tensor | None = None,
    delayed: Mapping[Role, DelayedScale] | None = None,
) -> Tensor:
    """`y = x @ weight.T + bias`, with x, weight and the gradient of y quantized.

    | product | operands |
    | --- | --- |
    | `y = x @ w.T` | x rowwise, w rowwise |
    | `grad_x = grad_y @ w` | grad_y rowwise, w columnwise |
    | `grad_w = grad_y.T @ x` | grad_y columnwise, x columnwise |

    Args:
      x: float32, bfloat16 or float16, `[..., K]`.
      weight: `[N, K]`, float32, bfloat16 or float16; or a `QuantizedTensor` with a rowwise plane.
      bias: `[N]` or None.
      recipe: the format of each role. The scales of x, and of the gradient of y, are those of this rank's tensor.
      seed: int32 `[2]`, low word first, for formats that round stochastically: another one for each call.
      delayed: the state of each tensor under `DelayedScaling`. Its scales are used, and amaxes noted: those of x and
        weight now, that of the gradient in the backward pass.

    Returns:
      `[..., N]`, in the dtype of x. Gradients have the dtypes of what they are gradients of.

    Raises:
      ValueError: an axis that is contracted is not whole blocks of its format, or there is no seed. The number of rows
        of x may be anything: where blocks run along it, operands get rows of zeros (`Recipe.added_rows`).

    >>> from qshard.recipes import CurrentScaling
    >>> x, w = torch.eye(2, requires_grad=True), torch.tensor([[1.0, 2.0], [4.0, 8.0]], requires_grad=True)
    >>> y = linear(x, w, None, CurrentScaling())
    >>> y.detach(), torch.autograd.grad(y.sum(), [x, w])
    (tensor([[1., 4.],
            [2., 8.]]), (tensor([[ 5., 10.],
            [ 5., 10.]]), tensor([[1., 1.],
            [1., 1.]])))

    Sources: arXiv:2209.05433.
    """
    if recipe.stochastic and seed is None:
        raise ValueError("linear: stochastic rounding needs a seed; pass a new one each call")
    given: Sequence[Tensor] = ()
    if recipe.stateful:
        if delayed is None:
            raise ValueError("linear: DelayedScaling needs the state of each tensor; pass delayed=, or use Linear")
        given = _Delayed.of(delayed)
    y, *amaxes = _Linear.apply(x, weight, recipe, seed if recipe.stochastic else None, *given)
    if delayed is not None:
        # The amax of a gathered weight is not among them: the hook before the gather has noted it.
        for role, amax in zip((Role.ACTIVATION, Role.WEIGHT), amaxes, strict=False):
            delayed[role].observe(amax)
    result: Tensor = y
    return result if bias is None else result + bias.to(result.dtype)


def check_shape(op: str, recipe: Recipe, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless a weight `[N, K]`, and what is multiplied with it, are whole blocks of their formats."""
    rows, columns = shape
    for role, matrix, usage in [
        (Role.WEIGHT, (rows, columns), Usage.BOTH),
        (Role.ACTIVATION, (_WHOLE, columns), Usage.ROWWISE),
        (Role.GRADIENT, (_WHOLE, rows), Usage.ROWWISE),
    ]:
        for one in usage.planes:
            plane(recipe.format(role), matrix, one, op=f"{op}: {role.value}")


_WHOLE = 128  # rows that are whole blocks of every format


class _Delayed(NamedTuple):
    """Delayed scales of each tensor, and where the amax of the gradient is noted: flat, as autograd takes tensors."""

    weight_scale: Tensor
    weight_scale_inv: Tensor
    activation_scale: Tensor
    activation_scale_inv: Tensor
    gradient_scale: Tensor
    gradient_scale_inv: Tensor
    gradient_amax: Tensor

    @classmethod
    def of(cls, states: Mapping[Role, DelayedScale]) -> _Delayed:
        weight, activation, gradient = (states[role] for role in (Role.WEIGHT, Role.ACTIVATION, Role.GRADIENT))
        return cls(
            weight_scale=weight.scale,
            weight_scale_inv=weight.scale_inv,
            activation_scale=activation.scale,
            activation_scale_inv=activation.scale_inv,
            gradient_scale=gradient.scale,
            gradient_scale_inv=gradient.scale_inv,
            gradient_amax=gradient.amax,
        )

    def scales(self, role: Role) -> tuple[Tensor, Tensor]:
        if role is Role.WEIGHT:
            return self.weight_scale, self.weight_scale_inv
        if role is Role.ACTIVATION:
            return self.activation_scale, self.activation_scale_inv
        return self.gradient_scale, self.gradient_scale_inv


class _Linear(torch.autograd.Function):
    """`linear` without bias. What it keeps for the backward pass are codes: of x, columnwise, and of the weight."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, recipe: Recipe, seed: Tensor | None, *given: Tensor
    ) -> tuple[Tensor, ...]:
        """`given`: the fields of `_Delayed`, or nothing.

        Returns y and what amaxes there are, of x and of the weight. (Dynamo of torch 2.11 takes no None among results.)
        """
        delayed = _Delayed(*given) if given else None
        grad_x, grad_w = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        ctx.x_shape, dtype = x.shape, x.dtype
        x_format, w_format = recipe.format(Role.ACTIVATION), recipe.format(Role.WEIGHT)
        x = x.reshape(-1, x.shape[-1]).contiguous()
        x_usage = Usage.BOTH if grad_w else Usage.ROWWISE
        x_planes, x_amax = _planes(x, recipe, x_usage, Role.ACTIVATION, seed, delayed)

        if isinstance(weight, QuantizedTensor):  # Gathered by FSDP2, for example.
            w_format, rowwise = weight.format, weight.parts(Usage.ROWWISE)
            if rowwise is None:
                raise ValueError("linear: weight (columnwise) has no rowwise plane; quantize it with usage=Usage.BOTH")
            w_planes, w_amax = {Usage.ROWWISE: rowwise}, None
            columnwise = weight.parts(Usage.COLUMNWISE)
            if grad_x and columnwise is not None:
                w_planes[Usage.COLUMNWISE] = columnwise
            elif grad_x and source(w_format, Usage.COLUMNWISE) not in w_planes:
                raise ValueError(
                    f"linear: weight ({w_format}, rowwise) has no columnwise plane, which its rowwise one does not "
                    "give; quantize it with usage=Usage.BOTH"
                )
        else:
            w = weight.shard if isinstance(weight, ShardedWeight) else weight
            w_usage = Usage.BOTH if grad_x else Usage.ROWWISE
            w_planes, w_amax = _planes(w, recipe, w_usage, Role.WEIGHT, seed, delayed)

        # A gathered weight is kept as it is: FSDP2 frees its memory, and fills it with the same codes before backward.
        ctx.w_usage = Usage.COLUMNWISE if Usage.COLUMNWISE in w_planes else Usage.ROWWISE
        no_plane = (None,) * len(Parts._fields)
        ctx.save_for_backward(*x_planes.get(Usage.COLUMNWISE, no_plane), *w_planes[ctx.w_usage], seed)
        ctx.recipe, ctx.w_format, ctx.dtype, ctx.w_dtype = recipe, w_format, dtype, weight.dtype
        ctx.delayed = delayed  # Not saved: autograd would object to the amax that is noted in it.
        x_operand, w_operand = Operand(x_format, x_planes[Usage.ROWWISE]), Operand(w_format, w_planes[Usage.ROWWISE])
        y: Tensor = matmul(x_operand, w_operand, dtype, fast=True)
        # Not a view, to which FSDP2 could not attach its hooks.
        y = aten._unsafe_view.default(y, (*ctx.x_shape[:-1], y.shape[1]))
        amaxes = [amax for amax in (x_amax, w_amax) if amax is not None]
        ctx.mark_non_differentiable(*amaxes)
        return (y, *amaxes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        *saved, seed = ctx.saved_tensors
        half = len(Parts._fields)
        x_parts, w_parts = Parts(*saved[:half]), Parts(*saved[half:])
        x_format, grad_format, w_format = (
            ctx.recipe.format(Role.ACTIVATION),
            ctx.recipe.format(Role.GRADIENT),
            ctx.w_format,
        )
        need_x, need_w = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        usage = Usage.BOTH if need_x and need_w else Usage.ROWWISE if need_x else Usage.COLUMNWISE
        grad = grad.reshape(-1, grad.shape[-1]).contiguous()
        planes, amax = _planes(grad, ctx.recipe, usage, Role.GRADIENT, seed, ctx.delayed)
        if amax is not None:
            noted = ctx.delayed.gradient_amax
            noted.copy_(torch.maximum(noted, amax))

        grad_x = grad_w = None
        if need_x:
            if ctx.w_usage is Usage.ROWWISE:
                w_parts = pipeline.transposed(ops, w_parts, w_format)
            w = Operand(w_format, w_parts, Usage.COLUMNWISE)
            grad_x = matmul(Operand(grad_format, planes[Usage.ROWWISE]), w, ctx.dtype).view(ctx.x_shape)
        if need_w:
            dy = Operand(grad_format, planes[Usage.COLUMNWISE], Usage.COLUMNWISE)
            grad_w = matmul(dy, Operand(x_format, x_parts, Usage.COLUMNWISE), ctx.w_dtype)
        return grad_x, grad_w, None, None, *(None for _ in ctx.delayed or ())


def _planes(
    x: Tensor,
    recipe: Recipe,
    usage: Usage,
    role: Role,
    seed: Tensor | None,
    delayed: _Delayed | None,
) -> tuple[dict[Usage, Parts], Tensor | None]:
    """The planes of a matrix `[M, K]`, and its amax if its scale does not come from it.

    The rowwise plane is without the rows that are added for the columnwise one.
    """
    fmt = recipe.format(role)
    if delayed is not None:
        return pipeline.quantize_delayed(ops, x, fmt, usage, *delayed.scales(role))
    if _NUMBERS_ARE_SYMBOLS and torch.compiler.is_compiling():
        fmt = _constant(fmt)
    rows = x.shape[0]
    added = recipe.added_rows(role, usage, rows)
    if added:
        x = torch.nn.functional.pad(x, (0, 0, 0, added))
    for one in usage.planes:
        plane(fmt, tuple(x.shape), one, op=f"linear: {role.value}")
    draws = None
    if fmt.stochastic and seed is not None:
        if ROLE_SEEDS[role]:
            seed = seed ^ words("linear", "seed", ROLE_SEEDS[role], x.device)
        draws = Draws(seed, words("linear", "first", 0, x.device))
    planes = pipeline.quantize(ops, x, fmt, usage, draws=draws)
    if added and Usage.ROWWISE in usage.planes:
        planes[Usage.ROWWISE] = pipeline.without_added_rows(planes[Usage.ROWWISE], fmt, rows)
    return planes, None


# Under `torch.compile(dynamic=True)` floats of an object become symbols. Dynamo of torch 2.13 fails on one in an
# autograd.Function, unless it is told that it is a constant; that of 2.11 cannot be told, and does not fail.
_NUMBERS_ARE_SYMBOLS = torch.__version__ >= "2.13"  # Compares versions, not strings.


class _Constant:
    """A format, or its scaling, some of whose attributes are constants to a compiler."""

    def __init__(self, real: Any, **constants: Any):
        self._real = real
        for name, value in constants.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _constant(fmt: Format) -> Format:
    eps, scale_max = _numbers(fmt)
    return cast(Format, _Constant(fmt, scaling=_Constant(fmt.scaling, eps=eps, scale_max=scale_max)))


@torch.compiler.assume_constant_result
def _numbers(fmt: Format) -> tuple[float, float]:
    return fmt.scaling.eps, fmt.scaling.scale_max
