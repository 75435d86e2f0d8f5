"""Autograd nodes of `linear`: tensors saved for backward, and the backward pass.

`LinearNode` saves the operands and computes both gradients. `ProductNode` computes y in a node of its own when
`saved_tensors_hooks` are active. `SavedLayout` describes the layout of the saved tensors.

The products of a recipe may have operands of their own (`Recipe.products`). Two products share an operand if they have
one recipe; else it is quantized once for each, or rounded to bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qshard._core.quantize_steps import Plane
from qshard.formats import Format, Usage
from qshard.recipes import Recipe, Role
from qshard.torch_bridge._delayed_scaling import merge_amax
from qshard.torch_bridge._distributed.activation_group import Join
from qshard.torch_bridge._distributed.sequence_parallel import Rows
from qshard.torch_bridge._distributed.tensor_shards import ShardSpec
from qshard.torch_bridge._nn import activations, linear_program
from qshard.torch_bridge._nn.module_calls import cached_amax
from qshard.torch_bridge._nn.operands import ROLES, LayerQuantizer, matrix_of, values_of
from qshard.torch_bridge._ops.autograd_node import Node
from qshard.torch_bridge._ops.eager import is_compiling
from qshard.torch_bridge._ops.programs import run_in_graph
from qshard.torch_bridge._quantized.gemm import Operand, Values, matmul
from qshard.torch_bridge._quantized.plane_programs import swiglu_columns, transpose
from qshard.torch_bridge._quantized.target_gpu import target_of

aten = torch.ops.aten


class SavedLayout(NamedTuple):
    """Layout of the tensors that `LinearNode` saves for the backward pass.

    Attributes:
      x_again: recomputes x from the tensors that `saved_input.source_of` found; None: the codes of x are saved.
      w_again: quantize the weight again in the backward pass; it is a parameter, so it stays in memory anyway. The
        amax of the whole weight is saved before it, or None.
      w_format: the format of the saved codes of the weight; None if they are values.
      w_usage: the plane of the saved codes of the weight; None if no codes are saved.
      scale_count: number of leading tensors that belong to delayed scaling.
      of_x: number of saved tensors that belong to x. The tensors of the weight follow.
      parts: how each operand is sharded under tensor parallelism; empty otherwise. Under sequence parallelism `x_rows`
        and `y_rows` tell how rows are sharded.
      join: gathers the codes of x that the ranks of an `ActivationGroup` saved; None: this rank saved all of them.
      is_kn: the weight is `[K, N]`.
    """

    recipe: Recipe
    dtype: torch.dtype
    x_again: Callable[..., tuple[Tensor, Tensor | None]] | None
    w_again: bool
    w_format: Format | None
    w_usage: Usage | None
    scale_count: int
    of_x: int
    y_shape: tuple[int, ...]
    parts: Mapping[Role, ShardSpec]
    x_rows: Rows | None
    y_rows: Rows | None
    join: Join | None
    is_kn: bool


class LinearNode(Node):
    """Autograd node that saves the operands of `linear` and computes both gradients.

    Under `saved_tensors_hooks` it runs before `ProductNode`. Activation checkpointing stops recomputing once the last
    saved tensor is recomputed, so it skips the last matmul.
    """

    op, degree = "linear", 2
    instead = "exclude the layer with convert(filter=), or multiply with torch.nn.functional.linear"

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        how: SavedLayout,
        seed: Tensor | None,
        ready: tuple[Tensor] | None,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """Save the operands and return y.

        `ready` has y; None returns a placeholder for y without memory, which `ProductNode` computes later. Under
        delayed scaling `tensors` begin with the scale of each role and the amax of the gradient. The tensors saved for
        x and for the weight follow. `how` has their layout.
        """
        scale_args, saved = tensors[: how.scale_count], tensors[how.scale_count :]
        ctx.how, ctx.x_shape, ctx.x_dtype, ctx.w_dtype = how, tuple(x.shape), x.dtype, weight.dtype
        ctx.scale_args = (
            scale_args  # Not saved: the backward pass writes an amax into one of them, and autograd would raise.
        )
        y = x.new_empty((), dtype=how.dtype).expand(how.y_shape) if ready is None else ready[0]
        return y, (*saved, *([weight] if how.w_again else []), seed)

    @staticmethod
    def gradients(ctx: Any, saved: list[Any], grad: Tensor) -> tuple[Tensor | None, ...]:
        how: SavedLayout = ctx.how
        seed = saved.pop()
        count, of_x, of_w = len(saved), saved[: how.of_x], saved[how.of_x :]
        saved.clear()  # Each operand is freed once it is multiplied.
        if how.join is not None:
            of_x[0] = how.join(of_x[0])
        dy, results = matrix_of(grad, grad.dtype), None
        if not (how.parts or how.is_kn or how.recipe.by_product):
            results = _gradients_in_one_call(ctx, dy, of_x, of_w, seed)
        if results is None:
            results = _gradients_op_by_op(ctx, dy, cached_amax(grad), of_x, of_w, seed)
        grad_x, grad_w, amax = results
        if amax is not None:
            merge_amax(ctx.scale_args[-1], amax)
        if grad_x is not None:
            # A program gives it its shape.
            grad_x = (grad_x if grad_x.shape == ctx.x_shape else grad_x.view(ctx.x_shape)).to(ctx.x_dtype)
        return grad_x, grad_w, *(None,) * (3 + how.scale_count + count - how.w_again)


LinearGradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Gradients of x and of the weight, and under delayed scaling the amax of the gradient of y."""


def _gradients_in_one_call(
    ctx: Any, dy: Tensor, of_x: list[Any], of_w: list[Any], seed: Tensor | None
) -> LinearGradients | None:
    how: SavedLayout = ctx.how
    need_x, need_w = ctx.needs_input_grad[:2]
    if how.w_usage is Usage.ROWWISE and how.w_format is not None and not how.w_format.shares_codes:
        return None
    x, w = ([part for part in parts if part is not None] for parts in (of_x, of_w))
    dtypes = how.dtype if need_x else None, ctx.w_dtype if need_w else None
    counts = 1 if how.x_again else len(x), 1 if how.w_again else len(w), how.w_usage
    sizes = (*dy.shape, ctx.x_shape[-1])
    if is_compiling():
        if ctx.scale_args or how.x_again:
            return None
        w = [values_of(w[-1])] if how.w_again else w
        grads = linear_program.compiled_backward(how.recipe, sizes, dtypes, counts, dy, x, w, seed, ctx.x_shape)
        return None if grads is None else (grads[0] if need_x else None, grads[-1] if need_w else None, None)
    plan = linear_program.plan_backward(how.recipe, sizes, target_of(dy.device), dtypes, counts)
    if plan is None:
        return None
    if how.x_again:
        x = [_recompute_x(how, of_x, ctx)[0]]
    if how.w_again:
        w = [values_of(of_w[-1])]
    return linear_program.run_backward(plan, how.recipe, dy, x, w, ctx.scale_args[: len(ROLES)], seed, ctx.x_shape)


def _gradients_op_by_op(
    ctx: Any, dy: Tensor, known: Tensor | None, of_x: list[Any], of_w: list[Any], seed: Tensor | None
) -> LinearGradients:
    how: SavedLayout = ctx.how
    need_x, need_w = ctx.needs_input_grad[:2]
    dys, amax = _quantize_gradient(ctx, dy, known, seed)
    grad_x = grad_w = waits = None
    if need_w and (how.x_rows or how.y_rows):
        sides = (dys.pop(Usage.COLUMNWISE), how.y_rows), (_take_x(how, of_x, seed, ctx), how.x_rows)
        waits = [(lambda own=own: own) if rows is None else rows.gather(own) for own, rows in sides]
        del sides
    elif need_w:
        pair = [dys.pop(Usage.COLUMNWISE), _take_x(how, of_x, seed, ctx)]
        if how.is_kn:
            pair.reverse()
        grad_w = matmul(pair.pop(0), pair.pop(), ctx.w_dtype)
    if need_x:
        dy_row, w_back = dys.pop(Usage.ROWWISE), _take_w(how, of_w, seed, ctx)
        grad_x = _multiply_operands(dy_row, w_back, how.dtype, how.y_rows, how.x_rows)
    if waits is not None:
        dy_column, x_column = (wait() for wait in waits)
        grad_w = matmul(dy_column, x_column, ctx.w_dtype)
    return grad_x, grad_w, amax


def _quantize_gradient(
    ctx: Any, dy: Tensor, known: Tensor | None, seed: Tensor | None
) -> tuple[dict[Usage, Any], Tensor | None]:
    """Quantize the gradient of y, rowwise for the gradient of x and columnwise for the weight gradient."""
    need_x, need_w = ctx.needs_input_grad[:2]
    dgrad, wgrad = ctx.how.recipe.products.dgrad, ctx.how.recipe.products.wgrad
    both = need_x and need_w and dgrad is wgrad
    usage = Usage.BOTH if both else Usage.ROWWISE if need_x else Usage.COLUMNWISE
    dys, amax = _quantizer(ctx, dgrad if need_x else wgrad, seed).quantize(dy, Role.GRADIENT, usage, known)
    if need_x and need_w and not both:
        dys |= _quantizer(ctx, wgrad, seed).quantize(dy, Role.GRADIENT, Usage.COLUMNWISE, known)[0]
    return dys, amax


def _recompute_x(how: SavedLayout, saved: Sequence[Any], ctx: Any) -> tuple[Tensor, Tensor | None]:
    """Recompute x as a matrix from the saved tensors, and its amax if the recomputation also gives it."""
    assert how.x_again is not None
    x, amax = how.x_again(*saved)
    return matrix_of(x, how.dtype, ctx.x_shape[-1]), amax if x.dtype == how.dtype else None


def _quantizer(ctx: Any, recipe: Recipe | None, seed: Tensor | None) -> LayerQuantizer:
    return LayerQuantizer(recipe, seed, ctx.how.parts, ctx.scale_args)


def _take_x(how: SavedLayout, saved: list[Any], seed: Tensor | None, ctx: Any) -> Any:
    """Return x columnwise from its saved tensors, and empty the list `saved` to free them."""
    parts, role, columns = tuple(saved), Role.ACTIVATION, Usage.COLUMNWISE
    saved.clear()
    recipe = how.recipe.products.wgrad
    fmt = None if recipe is None else recipe.format(role)
    if how.x_again is None:
        return _operand(fmt, parts, columns)
    is_swiglu = how.x_again is activations.recompute_swiglu
    if is_swiglu and fmt is not None and fmt.per_tensor and not ctx.scale_args and not how.parts:
        gate, up = (matrix_of(part, part.dtype, ctx.x_shape[-1]) for part in parts[:2])
        if len(parts) > 2 and gate.dtype == how.dtype:
            return Operand(fmt, Plane(*swiglu_columns((gate, up, parts[2]), fmt)), columns)
    x, amax = _recompute_x(how, parts, ctx)
    return _quantizer(ctx, recipe, seed).quantize(x, role, columns, amax)[0][columns]


def _operand(fmt: Format | None, parts: Sequence[Any], usage: Usage) -> Operand | Values:
    """Return an operand from its tensors: codes and scales, or without a format a matrix of values."""
    return Values(parts[0], usage) if fmt is None else Operand(fmt, Plane(*parts), usage)


def _take_w(how: SavedLayout, saved: list[Any], seed: Tensor | None, ctx: Any) -> Any:
    """Return the plane of the weight that contracts N, and empty the list `saved` to free the saved tensors."""
    parts = tuple(saved)
    saved.clear()
    usage = Usage.ROWWISE if how.is_kn else Usage.COLUMNWISE
    if how.w_again:
        whole, values = parts[0], values_of(parts[-1])
        quantizer = _quantizer(ctx, how.recipe.products.dgrad, seed)
        return quantizer.quantize(values, Role.WEIGHT, usage, whole=whole)[0][usage]
    if how.w_format is None:
        return Values(parts[0], usage)
    codes = Plane(*parts)
    if how.w_usage is not usage:
        if not how.w_format.shares_codes:
            return Operand(how.w_format, codes, is_transposed=True)
        codes = transpose(codes, how.w_format)
    return Operand(how.w_format, codes, usage)


def compute_y(
    x: Any, w: Any, dtype: torch.dtype, shape: Sequence[int], x_rows: Rows | None, y_rows: Rows | None
) -> Tensor:
    """Compute y in its final shape. It is not a view, because FSDP2 cannot attach its hooks to one."""
    y: Tensor = aten._unsafe_view.default(_multiply_operands(x, w, dtype, x_rows, y_rows, fast=True), shape)
    return y


def _multiply_operands(
    x: Any, w: Any, dtype: torch.dtype, x_rows: Rows | None, y_rows: Rows | None, *, fast: bool = False
) -> Tensor:
    """Compute `x @ w.T`, with the rows of x or of the result sharded over ranks if `x_rows` or `y_rows` is given."""
    if x_rows is not None:
        return x_rows.gather_matmul(x, w, dtype, fast=fast)
    if y_rows is not None:
        return y_rows.matmul_scatter(x, w, dtype, fast=fast)
    return matmul(x, w, dtype, fast=fast)


class ProductNode(torch.autograd.Function):
    """Autograd node of `y = x @ w.T`, with the identity as its backward pass.

    `LinearNode` runs next in the backward pass and computes the gradients. It also rejects second derivatives.
    """

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        dtype: torch.dtype,
        x_format: Format | None,
        w_format: Format | None,
        is_kn: bool,
        rows: tuple[Rows | None, Rows | None],
        program: str | None,
        *parts: Any,
    ) -> Tensor:
        """Multiply the planes of x and of the weight in `parts`; or run `program` on `parts`."""
        ctx.count = len(parts)
        if program is not None:
            return run_in_graph(parts, program, 1)[0]
        half = ctx.count // 2
        x = _operand(x_format, parts[:half], Usage.ROWWISE)
        w = _operand(w_format, parts[half:], Usage.COLUMNWISE if is_kn else Usage.ROWWISE)
        return compute_y(x, w, dtype, y.shape, *rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None, None, None, None, None, *(None for _ in range(ctx.count))
