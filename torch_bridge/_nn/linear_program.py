"""Forward and backward passes of small linear layers in one host call each, eager and compiled.

One program (`programs.py`) quantizes and multiplies the weight, and another computes both gradients. Each runs the ops
of `functional.py` in the same order, so the bits are the same. Intermediate tensors stay allocated until the call ends.
Large layers are not limited by the host, so they run op by op instead.

Programs need GEMMs that are qshard ops (`gemm.plan_product`), so they run on GPUs only. Otherwise the caller uses
PyTorch's matmul. Without programs, training steps on an H100 took 8 to 28 % longer (the examples' GPT, 256 to 1024
wide) and 21 to 30 % longer (one Llama block).

In a compiled graph a program is one op in place of two or four. Dynamo does not trace plans and recorders, so
`_product_text` and `_gradients_text` are constants of the graph, and take recipes as `Recipe.text`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qshard._core import quantize_steps
from qshard._core.operands import quantize_operand
from qshard._core.quantize_steps import Philox, Plane
from qshard._files.recipe_records import recipe_of
from qshard.formats import Format, Usage
from qshard.gemm_dispatch import Sizes
from qshard.recipes import Recipe, Role
from qshard.torch_bridge._nn.operands import ROLES, operand_spec, philox_of
from qshard.torch_bridge._ops.programs import Memo, Steps, run_in_graph
from qshard.torch_bridge._quantized.gemm import Operand, plan_product
from qshard.torch_bridge._quantized.target_gpu import Target, target_of
from qshard.torch_bridge._torch_internals import base_of, has_memory_budget, has_static_shape

aten = torch.ops.aten

Product = Callable[..., Any]
"""GEMM `a @ b.T` of two planes, with a fixed result dtype: `ProductPlan.multiply`."""


class BackwardPlan(NamedTuple):
    """Plan of one backward pass.

    Attributes:
      dw: the GEMM of the weight gradient; None if it is not needed.
      dx: the GEMM of the gradient of x; None if it is not needed.
      usage: the planes of dy to compute.
      x_parts: number of tensors saved for x: the parts of a plane, or 1 for values, which are quantized again.
      w_parts: number of tensors saved for the weight, likewise.
      w_usage: the saved plane of the weight. The saved plane of x is columnwise.
      stochastic: the roles that need a Philox key and offset, in the order of the inputs.
    """

    dw: Product | None
    dx: Product | None
    usage: Usage
    x_parts: int
    w_parts: int
    w_usage: Usage | None
    stochastic: tuple[Role, ...]


def run_forward(
    x: Operand,
    weight: Tensor,
    recipe: Recipe,
    scale: Tensor | None,
    seed: Tensor | None,
    dtype: torch.dtype,
    shape: tuple[int, ...],
) -> tuple[Tensor | None, Tensor | None]:
    """Compute `y = x @ w.T` of this shape from codes of x and values of a weight `[N, K]`, in one call.

    Returns y, or None if no program can compute it; and the amax of the weight if its delayed `scale` is passed.
    """
    multiply = _forward(x.format, recipe, (x.parts.data.shape[0], *weight.shape), target_of(weight.device), dtype)
    if multiply is None:
        return None, None
    tensors, of_x = _product_inputs(x, weight, recipe, scale, seed)
    y, amax = _multiply_weight(tensors, of_x, multiply, recipe, shape)
    # Op by op y is a view, and FSDP2 cannot attach its hooks to one.
    return y if base_of(y) is None else aten._unsafe_view.default(y, shape), amax


def run_backward(
    how: BackwardPlan,
    recipe: Recipe,
    grad: Tensor,
    x: Sequence[Tensor],
    w: Sequence[Tensor],
    scales: Sequence[Tensor],
    seed: Tensor | None,
    x_shape: tuple[int, ...],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute both gradients of `linear` in one call, by a plan of `plan_backward`.

    `x` and `w` are the saved tensors that the plan describes. Under delayed scaling `scales` has the scales in the
    order of `ROLES`, and the third result is the amax of the gradient of y. `x_shape` is the shape of the first result.
    """
    philox = _philox(recipe, how.stochastic, seed, grad.device)
    dx, dw, amax = _gradients((grad, *x, *w, *scales, *philox), how, recipe, x_shape)
    return dx, dw, amax


def compiled_forward(
    x: Operand,
    weight: Tensor,
    recipe: Recipe,
    seed: Tensor | None,
    dtype: torch.dtype,
    shape: tuple[int, ...],
) -> tuple[tuple[Tensor, ...], str] | None:
    """Return the inputs and the program that computes `run_forward` in a compiled graph; None if no program can."""
    if not (has_static_shape(x.parts.data) and has_static_shape(weight)):
        return None
    tensors, of_x = _product_inputs(x, weight, recipe, None, seed)
    text = _product_text(recipe.text, of_x, *_signature(tensors), weight.device, dtype, shape)
    return None if text is None else (tensors, text)


def compiled_backward(
    recipe: Recipe,
    sizes: Sizes,
    dtypes: tuple[torch.dtype | None, torch.dtype | None],
    saved: tuple[int, int, Usage | None],
    grad: Tensor,
    x: Sequence[Tensor],
    w: Sequence[Tensor],
    seed: Tensor | None,
    x_shape: tuple[int, ...],
) -> Sequence[Tensor] | None:
    """Compute the needed gradients by one op of a compiled graph; None if no program can.

    `plan_backward` explains `sizes`, `dtypes` and `saved`, and `run_backward` the others.
    """
    if not all(map(has_static_shape, (grad, *x[:1], *w[:1]))):
        return None
    roles = [role for role in _roles_to_quantize(dtypes, saved) if recipe.format(role).stochastic]
    tensors = (grad, *x, *w, *_philox(recipe, roles, seed, grad.device))
    text = _gradients_text(recipe.text, sizes, dtypes, saved, *_signature(tensors), grad.device, x_shape)
    return None if text is None else run_in_graph(tensors, text, 2 if all(dtypes) else 1)


def _product_inputs(
    x: Operand, weight: Tensor, recipe: Recipe, scale: Tensor | None, seed: Tensor | None
) -> tuple[tuple[Tensor, ...], int]:
    """Return the inputs of `_multiply_weight`, and the number of them that belong to x."""
    of_x = [part for part in x.parts if part is not None]
    given = () if scale is None else (scale,)
    philox = _philox(recipe, (Role.WEIGHT,) if recipe.weight.stochastic else (), seed, weight.device)
    return (*of_x, weight, *given, *philox), len(of_x)


def _roles_to_quantize(
    dtypes: tuple[torch.dtype | None, torch.dtype | None], saved: tuple[int, int, Usage | None]
) -> list[Role]:
    """Return the roles of the operands that the backward pass quantizes, from arguments of `plan_backward`."""
    (x_dtype, w_dtype), (x_parts, w_parts, _) = dtypes, saved
    again = [Role.ACTIVATION] if w_dtype is not None and x_parts == 1 else []
    again += [Role.WEIGHT] if x_dtype is not None and w_parts == 1 else []
    return [Role.GRADIENT, *again]


def _signature(tensors: Sequence[Tensor]) -> tuple[tuple[tuple[int, ...], ...], tuple[torch.dtype, ...]]:
    return tuple([tuple(x.shape) for x in tensors]), tuple([x.dtype for x in tensors])


@torch.compiler.assume_constant_result
def _product_text(
    recipe_text: str | None,
    of_x: int,
    shapes: tuple[tuple[int, ...], ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, ...],
) -> str | None:
    recipe, target = _recipe_of(recipe_text), target_of(device)
    if recipe is None:
        return None
    multiply = _forward(recipe.activation, recipe, (shapes[0][0], *shapes[of_x]), target, dtype)
    if multiply is None:
        return None
    return _multiply_weight.text(shapes, dtypes, device.type, of_x, multiply, recipe, shape)


@torch.compiler.assume_constant_result
def _gradients_text(
    recipe_text: str | None,
    sizes: Sizes,
    dtypes_of_results: tuple[torch.dtype | None, torch.dtype | None],
    saved: tuple[int, int, Usage | None],
    shapes: tuple[tuple[int, ...], ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    x_shape: tuple[int, ...],
) -> str | None:
    recipe, target = _recipe_of(recipe_text), target_of(device)
    how = None if recipe is None else plan_backward(recipe, sizes, target, dtypes_of_results, saved)
    return None if how is None else _gradients.text(shapes, dtypes, device.type, how, recipe, x_shape)


def _recipe_of(text: str | None) -> Recipe | None:
    # Under a budget PyTorch would repeat a product in order to quantize its weight again.
    return None if text is None or has_memory_budget() else recipe_of(text)


@Memo
def plan_backward(
    recipe: Recipe,
    sizes: Sizes,
    target: Target | None,
    dtypes: tuple[torch.dtype | None, torch.dtype | None],
    saved: tuple[int, int, Usage | None],
) -> BackwardPlan | None:
    """Plan the backward pass of `x @ w.T`; None if `run_backward` cannot compute it.

    `sizes` are M, N and K. `dtypes` are the dtypes of the gradient of x and of the weight gradient; None for a gradient
    that is not needed. `saved` has `x_parts`, `w_parts` and `w_usage` of the result.
    """
    (m, n, k), (x_dtype, w_dtype) = sizes, dtypes
    usage = Usage.BOTH if x_dtype and w_dtype else Usage.ROWWISE if x_dtype else Usage.COLUMNWISE
    dy, x, w = recipe.gradient, recipe.activation, recipe.weight
    if recipe.added_rows(Role.GRADIENT, usage, m):
        return None
    dw = dx = None
    if w_dtype is not None:
        dw = _gemm_op(dy, Usage.COLUMNWISE, x, Usage.COLUMNWISE, (n, k, m), target, w_dtype)
        if dw is None:
            return None
    if x_dtype is not None:
        dx = _gemm_op(dy, Usage.ROWWISE, w, Usage.COLUMNWISE, (m, k, n), target, x_dtype)
        if dx is None:
            return None
    shapes = {Role.GRADIENT: (m, n), Role.ACTIVATION: (m, k), Role.WEIGHT: (n, k)}
    roles = _roles_to_quantize(dtypes, saved)
    for role in roles:  # Recipes may require whole blocks where ops do not.
        operand_spec(recipe, role, usage if role is Role.GRADIENT else Usage.COLUMNWISE).layouts(shapes[role])
    return BackwardPlan(dw, dx, usage, *saved, tuple(role for role in roles if recipe.format(role).stochastic))


@Memo
def _forward(x: Format, recipe: Recipe, sizes: Sizes, target: Target | None, dtype: torch.dtype) -> Product | None:
    multiply = _gemm_op(x, Usage.ROWWISE, recipe.weight, Usage.ROWWISE, sizes, target, dtype)
    if multiply is not None:
        operand_spec(recipe, Role.WEIGHT, Usage.ROWWISE).layouts(sizes[1:])
    return multiply


def _gemm_op(
    a: Format,
    a_usage: Usage,
    b: Format,
    b_usage: Usage,
    sizes: Sizes,
    target: Target | None,
    dtype: torch.dtype,
) -> Product | None:
    """Return the GEMM op for these sizes, or None if no op fits or an operand is large."""
    m, n, k = sizes
    if target is None or max(m * k, n * k, m * n) > target.large:
        return None
    plan = plan_product(a, a_usage, b, b_usage, sizes, target.gpu, dtype)
    return None if plan is None else functools.partial(plan.multiply, dtype=dtype)


def _philox(recipe: Recipe, roles: Iterable[Role], seed: Tensor | None, device: torch.device) -> Iterator[Tensor]:
    for role in roles:
        philox = philox_of(operand_spec(recipe, role, Usage.ROWWISE), seed, device)
        assert philox is not None
        yield from (philox.seed, philox.offset)


@Steps
def _multiply_weight(ops: Any, *args: Any) -> tuple[Any, ...]:
    *tensors, of_x, multiply, recipe, shape = args
    x, weight, rest = tensors[:of_x], tensors[of_x], tensors[of_x + 1 :]
    scale, philox = (None, Philox(*rest)) if recipe.weight.stochastic else (rest[0] if rest else None, None)
    w, amax = _planes(ops, weight, recipe, Role.WEIGHT, Usage.ROWWISE, scale, philox)
    return multiply(ops, Plane(*x), w[Usage.ROWWISE], fast=True).view(shape), amax


@Steps
def _gradients(ops: Any, *args: Any) -> tuple[Any, ...]:
    grad, *tensors, how, recipe, x_shape = args
    x, w = tensors[: how.x_parts], tensors[how.x_parts : how.x_parts + how.w_parts]
    rest = tensors[how.x_parts + how.w_parts :]
    pairs = [Philox(*pair) for pair in zip(rest[::2], rest[1::2], strict=True)] if how.stochastic else []
    philox = dict(zip(how.stochastic, pairs, strict=True))
    # No recipe has both delayed scales and stochastic rounding.
    scales: dict[Role, Any] = {} if how.stochastic else dict(zip(ROLES, rest, strict=False))

    def planes(x: Any, role: Role, usage: Usage) -> tuple[dict[Usage, Plane], Any]:
        return _planes(ops, x, recipe, role, usage, scales.get(role), philox.get(role))

    def columnwise(parts: Sequence[Any], role: Role, saved: Usage | None) -> Plane:
        """Return the columnwise plane of an operand from its saved tensors."""
        if len(parts) == 1:
            return planes(parts[0], role, Usage.COLUMNWISE)[0][Usage.COLUMNWISE]
        codes = Plane(*parts)
        return codes if saved is Usage.COLUMNWISE else quantize_steps.transpose_plane(ops, codes, recipe.format(role))

    dy, amax = planes(grad, Role.GRADIENT, how.usage)
    dx = dw = None
    if how.dw is not None:
        dw = how.dw(ops, dy[Usage.COLUMNWISE], columnwise(x, Role.ACTIVATION, Usage.COLUMNWISE))
    if how.dx is not None:
        dx = how.dx(ops, dy[Usage.ROWWISE], columnwise(w, Role.WEIGHT, how.w_usage)).view(x_shape)
    return dx, dw, amax


def _planes(
    ops: Any, x: Any, recipe: Recipe, role: Role, usage: Usage, scale: Any, philox: Philox | None
) -> tuple[dict[Usage, Plane], Any]:
    spec, is_whole = operand_spec(recipe, role, usage), has_static_shape(x)
    return quantize_operand(ops, x, spec, scale=scale, philox=philox, is_whole=is_whole)
