"""What autograd keeps of a `linear`, and its backward pass.

    Gradients   the node that has the operands, and makes both gradients
    Product     that of the product, where it has one of its own
    How         which tensors are which operand, and which are made again

Hooks see what is kept, so under them it comes before the product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qshard._core.quantize_steps import Plane
from qshard.formats import Format, Usage
from qshard.recipes import Recipe, Role
from qshard.torch_bridge._delayed_scaling import note
from qshard.torch_bridge._distributed.activation_group import Join
from qshard.torch_bridge._distributed.sequence_parallel import Rows
from qshard.torch_bridge._distributed.tensor_shards import ShardSpec
from qshard.torch_bridge._nn import activations, linear_program
from qshard.torch_bridge._nn.module_calls import cached_amax
from qshard.torch_bridge._nn.operands import ROLES, LayerQuantizer, matrix_of, values_of
from qshard.torch_bridge._ops.autograd_node import Node
from qshard.torch_bridge._ops.eager import is_compiling
from qshard.torch_bridge._quantized.gemm import Operand, matmul
from qshard.torch_bridge._quantized.plane_programs import quantized_swiglu_again, transpose

aten = torch.ops.aten


class How(NamedTuple):
    """How the backward pass has its operands, and in which of the tensors that it is given.

    Attributes:
      dtype: of y.
      x_again: x is quantized again, from what `activations.source_of` found; None: its codes are kept.
      w_again: so is the weight, a parameter, which is there anyway. If codes are kept, `w_format` and `w_usage` say of
        which plane; None if there are none.
      given, of_x: how many of the tensors are those of delayed scaling, and how many are of x.
      y_shape: of y.
      parts: which parts of larger tensors the operands are, if they are.
      x_rows, y_rows: how rows of theirs are cut, of whose planes others have the rest.
      join: gathers the codes of x from the parts of an `ActivationGroup`; None: this rank keeps all codes.
      is_kn: the weight is `[K, N]`.
    """

    recipe: Recipe
    dtype: torch.dtype
    x_again: Callable[..., tuple[Tensor, Tensor | None]] | None
    w_again: bool
    w_format: Format
    w_usage: Usage | None
    given: int
    of_x: int
    y_shape: tuple[int, ...]
    parts: Mapping[Role, ShardSpec]
    x_rows: Rows | None
    y_rows: Rows | None
    join: Join | None
    is_kn: bool


class Gradients(Node):
    """The backward pass of `linear`: it keeps what that needs.

    A node of its own, before that of the product, where hooks see what is kept: activation checkpointing ends when the
    last tensor is, so what it recomputes last need not be multiplied.
    """

    op, degree = "linear", 2
    instead = "exclude the layer with convert(filter=), or multiply with torch.nn.functional.linear"

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        how: How,
        seed: Tensor | None,
        ready: tuple[Tensor] | None,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """`ready`: y; None: y has no memory yet, and `Product` gives it some. `tensors`: of delayed scaling, the scale
        of each role and the amax of the gradient, else none; then those of x, then those of the weight.
        """
        given, kept = tensors[: how.given], tensors[how.given :]
        ctx.how, ctx.x_shape, ctx.x_dtype, ctx.w_dtype = how, x.shape, x.dtype, weight.dtype
        ctx.given = given  # Not saved: autograd would object to the amax that is noted in it.
        y = x.new_empty((), dtype=how.dtype).expand(how.y_shape) if ready is None else ready[0]
        return y, (*kept, *([weight] if how.w_again else []), seed)

    @staticmethod
    def gradients(ctx: Any, saved: list[Any], grad: Tensor) -> tuple[Tensor | None, ...]:
        how: How = ctx.how
        seed = saved.pop()
        count, of_x, of_w = len(saved), saved[: how.of_x], saved[how.of_x :]
        saved.clear()  # Operands go as soon as they are multiplied: checkpointing has left no others of them.
        if how.join is not None:
            of_x[0] = how.join(of_x[0])
        dy, made = matrix_of(grad, grad.dtype), None
        if not how.parts and not how.is_kn and not is_compiling():
            made = _gradients_in_one_call(ctx, dy, of_x, of_w, seed)
        if made is None:
            made = _gradients_op_by_op(ctx, dy, cached_amax(grad), of_x, of_w, seed)
        grad_x, grad_w, amax = made
        if amax is not None:
            note(ctx.given[-1], amax)
        if grad_x is not None:
            grad_x = grad_x.view(ctx.x_shape).to(ctx.x_dtype)
        return grad_x, grad_w, *(None,) * (3 + how.given + count - how.w_again)


_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""The gradients of x and of the weight, and the amax of that of y, if its scale is given."""


def _gradients_in_one_call(
    ctx: Any, dy: Tensor, of_x: list[Any], of_w: list[Any], seed: Tensor | None
) -> _Gradients | None:
    how: How = ctx.how
    need_x, need_w = ctx.needs_input_grad[:2]
    x, w = ([part for part in parts if part is not None] for parts in (of_x, of_w))
    dtypes = how.dtype if need_x else None, ctx.w_dtype if need_w else None
    kept = 1 if how.x_again else len(x), 1 if how.w_again else len(w), how.w_usage
    plan = linear_program.backward_of(how.recipe, (*dy.shape, ctx.x_shape[-1]), dy.device, dtypes, kept)
    if plan is None:
        return None
    if how.x_again:
        x = [_again(how, of_x, ctx)[0]]
    if how.w_again:
        w = [values_of(of_w[-1])]
    return linear_program.gradients(plan, how.recipe, dy, x, w, ctx.given[: len(ROLES)], seed)


def _gradients_op_by_op(
    ctx: Any, dy: Tensor, known: Tensor | None, of_x: list[Any], of_w: list[Any], seed: Tensor | None
) -> _Gradients:
    how: How = ctx.how
    need_x, need_w = ctx.needs_input_grad[:2]
    usage = Usage.BOTH if need_x and need_w else Usage.ROWWISE if need_x else Usage.COLUMNWISE
    dys, amax = _quantizer(ctx, seed).quantize(dy, Role.GRADIENT, usage, known)
    grad_x = grad_w = travelling = None
    if need_w and (how.x_rows or how.y_rows):
        sides = (dys.pop(Usage.COLUMNWISE), how.y_rows), (_x_of(how, of_x, seed, ctx), how.x_rows)
        travelling = [(lambda own=own: own) if rows is None else rows.gathered(own) for own, rows in sides]
        del sides
    elif need_w:
        pair = [dys.pop(Usage.COLUMNWISE), _x_of(how, of_x, seed, ctx)]
        if how.is_kn:
            pair.reverse()
        grad_w = matmul(pair.pop(0), pair.pop(), ctx.w_dtype)
    if need_x:
        dy_row, w_back = dys.pop(Usage.ROWWISE), _w_of(how, of_w, seed, ctx)
        grad_x = _product_of(dy_row, w_back, how.dtype, how.y_rows, how.x_rows)
    if travelling is not None:
        dy_column, x_column = (wait() for wait in travelling)
        grad_w = matmul(dy_column, x_column, ctx.w_dtype)
    return grad_x, grad_w, amax


def _again(how: How, kept: Sequence[Any], ctx: Any) -> tuple[Tensor, Tensor | None]:
    """x as a matrix, from what autograd keeps of it, and its amax if that comes with it."""
    assert how.x_again is not None
    x, amax = how.x_again(*kept)
    return matrix_of(x, how.dtype, ctx.x_shape[-1]), amax if x.dtype == how.dtype else None


def _quantizer(ctx: Any, seed: Tensor | None) -> LayerQuantizer:
    return LayerQuantizer(ctx.how.recipe, seed, ctx.how.parts, ctx.given)


def _x_of(how: How, kept: list[Any], seed: Tensor | None, ctx: Any) -> Operand:
    """x, columnwise, from what is kept of it, which leaves the list."""
    parts, role, columns = tuple(kept), Role.ACTIVATION, Usage.COLUMNWISE
    kept.clear()
    fmt = how.recipe.format(role)
    if how.x_again is None:
        return Operand(fmt, Plane(*parts), columns)
    if how.x_again is activations.swiglu_again and fmt.per_tensor and not ctx.given and not how.parts:
        gate, up = (matrix_of(part, part.dtype, ctx.x_shape[-1]) for part in parts[:2])
        if len(parts) > 2 and gate.dtype == how.dtype:
            return Operand(fmt, quantized_swiglu_again(gate, up, fmt, parts[2]), columns)
    x, amax = _again(how, parts, ctx)
    return _quantizer(ctx, seed).quantize(x, role, columns, amax)[0][columns]


def _w_of(how: How, kept: list[Any], seed: Tensor | None, ctx: Any) -> Operand:
    """The weight, in the plane that contracts N, likewise."""
    parts = tuple(kept)
    kept.clear()
    usage = Usage.ROWWISE if how.is_kn else Usage.COLUMNWISE
    if how.w_again:
        return _quantizer(ctx, seed).quantize(values_of(parts[-1]), Role.WEIGHT, usage)[0][usage]
    codes = Plane(*parts)
    if how.w_usage is not usage:
        codes = transpose(codes, how.w_format)
    return Operand(how.w_format, codes, usage)


def multiply(
    x: Operand, w: Operand, dtype: torch.dtype, shape: Sequence[int], x_rows: Rows | None, y_rows: Rows | None
) -> Tensor:
    """y. Not a view, to which FSDP2 could not attach its hooks."""
    made: Tensor = aten._unsafe_view.default(_product_of(x, w, dtype, x_rows, y_rows, fast=True), shape)
    return made


def _product_of(
    x: Operand, w: Operand, dtype: torch.dtype, x_rows: Rows | None, y_rows: Rows | None, *, fast: bool = False
) -> Tensor:
    """`x @ w.T`, where rows of x, or of what it gives, are cut or not."""
    if x_rows is not None:
        return x_rows.product_of_own(x, w, dtype, fast=fast)
    if y_rows is not None:
        return y_rows.own_product(x, w, dtype, fast=fast)
    return matmul(x, w, dtype, fast=fast)


class Product(torch.autograd.Function):
    """`y = x @ w.T`, with the identity as its backward pass: `Gradients` comes next, and refuses second ones."""

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        dtype: torch.dtype,
        x_format: Format,
        w_format: Format,
        is_kn: bool,
        rows: tuple[Rows | None, Rows | None],
        *parts: Tensor | None,
    ) -> Tensor:
        half = len(Plane._fields)
        ctx.count = len(parts)
        usage = Usage.COLUMNWISE if is_kn else Usage.ROWWISE
        x, w = Operand(x_format, Plane(*parts[:half])), Operand(w_format, Plane(*parts[half:]), usage)
        return multiply(x, w, dtype, y.shape, *rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None, None, None, None, *(None for _ in range(ctx.count))
