"""The passes of a linear layer in few calls, for layers so small that the host is what they wait for.

A weight is quantized and multiplied in one call, and so are both gradients: programs (`programs.py`) of the same ops,
in the same order, as `functional.py` runs one after another; so the bits are the same. What lies between is held until
the end of the call, which is why large layers, which wait for no host, go one op after another.

Only where an op makes the products (`gemm.way_of`), of codes or of values: so on GPUs. Else they are PyTorch's own.
Without this module training steps on an H100 took longer by 8 to 28 % (the examples' GPT, 256 to 1024 wide) and by 21
to 30 % (one Llama block).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qshard._core import quantize_steps
from qshard._core.operands import quantize_operand
from qshard._core.quantize_steps import Draws, Plane
from qshard.formats import Format, Usage
from qshard.recipes import Recipe, Role
from qshard.torch_bridge._nn.operands import ROLES, draws_of, operand_spec
from qshard.torch_bridge._ops.programs import Memo, Steps
from qshard.torch_bridge._quantized.gemm import LARGE, Operand, way_of

Product = Callable[..., Any]
"""`a @ b.T` of two planes, in some dtype: `Way.product`."""


class Backward(NamedTuple):
    """What the backward pass of a layer comes down to.

    Attributes:
      dw, dx: the products for the gradients that are needed.
      usage: the planes of the gradient of y.
      x_parts, w_parts: how many tensors x and the weight are: the parts of a plane, or values, which are quantized.
      w_usage: which plane of the weight. Of x it is the columnwise one.
      drawn: the tensors that are rounded at random.
    """

    dw: Product | None
    dx: Product | None
    usage: Usage
    x_parts: int
    w_parts: int
    w_usage: Usage | None
    drawn: tuple[Role, ...]


def product(
    x: Operand, weight: Tensor, recipe: Recipe, scale: Tensor | None, seed: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """`y = x @ w.T` of the codes of x and values of a weight, and the amax of a weight whose `scale` is given.

    y is None where it cannot be had so.
    """
    multiply = _forward(x.format, recipe, (x.parts.data.shape[0], *weight.shape), weight.device, dtype)
    if multiply is None:
        return None, None
    of_x = [part for part in x.parts if part is not None]
    given = () if scale is None else (scale,)
    drawn = _draws(recipe, (Role.WEIGHT,) if recipe.weight.stochastic else (), seed, weight.device)
    y, amax = _multiply_weight((*of_x, weight, *given, *drawn), len(of_x), multiply, recipe)
    return y, amax


def gradients(
    how: Backward,
    recipe: Recipe,
    grad: Tensor,
    x: Sequence[Tensor],
    w: Sequence[Tensor],
    scales: Sequence[Tensor],
    seed: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x and of the weight, and the amax of that of y if its scale is given.

    Args:
      grad: of y, a matrix.
      x, w: what `how` says.
      scales: of weight, x and gradient, under delayed scaling.
      seed: of the layer, where something is rounded at random.
    """
    drawn = _draws(recipe, how.drawn, seed, grad.device)
    dx, dw, amax = _gradients((grad, *x, *w, *scales, *drawn), how, recipe)
    return dx, dw, amax


@Memo
def backward_of(
    recipe: Recipe,
    sizes: tuple[int, int, int],
    device: torch.device,
    dtypes: tuple[torch.dtype | None, torch.dtype | None],
    kept: tuple[int, int, Usage | None],
) -> Backward | None:
    """How `gradients` has those of `x @ w.T`, of M, N and K; None: it cannot.

    Args:
      dtypes: of the gradient of x, and of that of the weight; None: it is not needed.
      kept: `x_parts`, `w_parts` and `w_usage` of the result.
    """
    (m, n, k), (x_dtype, w_dtype), (x_parts, w_parts, _) = sizes, dtypes, kept
    usage = Usage.BOTH if x_dtype and w_dtype else Usage.ROWWISE if x_dtype else Usage.COLUMNWISE
    dy, x, w = recipe.gradient, recipe.activation, recipe.weight
    if recipe.added_rows(Role.GRADIENT, usage, m):
        return None
    dw = dx = None
    if w_dtype is not None:
        dw = _product_of(dy, Usage.COLUMNWISE, x, Usage.COLUMNWISE, (n, k, m), device, w_dtype)
        if dw is None:
            return None
    if x_dtype is not None:
        dx = _product_of(dy, Usage.ROWWISE, w, Usage.COLUMNWISE, (m, k, n), device, x_dtype)
        if dx is None:
            return None
    made = {Role.GRADIENT: (m, n)}
    made |= {Role.ACTIVATION: (m, k)} if dw and x_parts == 1 else {}
    made |= {Role.WEIGHT: (n, k)} if dx and w_parts == 1 else {}
    for role, shape in made.items():  # What ops take may be less than whole blocks.
        operand_spec(recipe, role, usage if role is Role.GRADIENT else Usage.COLUMNWISE).layouts(shape)
    return Backward(dw, dx, usage, *kept, tuple(role for role in made if recipe.format(role).stochastic))


@Memo
def _forward(
    x: Format, recipe: Recipe, sizes: tuple[int, int, int], device: torch.device, dtype: torch.dtype
) -> Product | None:
    multiply = _product_of(x, Usage.ROWWISE, recipe.weight, Usage.ROWWISE, sizes, device, dtype)
    if multiply is not None:
        operand_spec(recipe, Role.WEIGHT, Usage.ROWWISE).layouts(sizes[1:])
    return multiply


def _product_of(
    a: Format,
    a_usage: Usage,
    b: Format,
    b_usage: Usage,
    sizes: tuple[int, int, int],
    device: torch.device,
    dtype: torch.dtype,
) -> Product | None:
    """The product by an op, if one makes it and its operands are small."""
    m, n, k = sizes
    way = way_of(a, a_usage, b, b_usage, sizes, device, dtype) if max(m * k, n * k, m * n) <= LARGE else None
    return None if way is None else functools.partial(way.product, dtype=dtype)


def _draws(recipe: Recipe, roles: Iterable[Role], seed: Tensor | None, device: torch.device) -> Iterator[Tensor]:
    """Seed and first index of each."""
    for role in roles:
        draws = draws_of(operand_spec(recipe, role, Usage.ROWWISE), seed, device)
        assert draws is not None
        yield from (draws.seed, draws.first)


@Steps
def _multiply_weight(ops: Any, *args: Any) -> tuple[Any, ...]:
    *tensors, of_x, multiply, recipe = args
    x, weight, rest = tensors[:of_x], tensors[of_x], tensors[of_x + 1 :]
    scale, draws = (None, Draws(*rest)) if recipe.weight.stochastic else (rest[0] if rest else None, None)
    w, amax = _planes(ops, weight, recipe, Role.WEIGHT, Usage.ROWWISE, scale, draws)
    return multiply(ops, Plane(*x), w[Usage.ROWWISE], fast=True), amax


@Steps
def _gradients(ops: Any, *args: Any) -> tuple[Any, ...]:
    grad, *tensors, how, recipe = args
    x, w = tensors[: how.x_parts], tensors[how.x_parts : how.x_parts + how.w_parts]
    rest = tensors[how.x_parts + how.w_parts :]
    pairs = [Draws(*pair) for pair in zip(rest[::2], rest[1::2], strict=True)] if how.drawn else []
    draws = dict(zip(how.drawn, pairs, strict=True))
    scales: dict[Role, Any] = {} if how.drawn else dict(zip(ROLES, rest, strict=False))  # Not both.

    def planes(x: Any, role: Role, usage: Usage) -> tuple[dict[Usage, Plane], Any]:
        return _planes(ops, x, recipe, role, usage, scales.get(role), draws.get(role))

    def columnwise(parts: Sequence[Any], role: Role, kept: Usage | None) -> Plane:
        """The columnwise plane of what is kept of an operand."""
        if len(parts) == 1:
            return planes(parts[0], role, Usage.COLUMNWISE)[0][Usage.COLUMNWISE]
        codes = Plane(*parts)
        return codes if kept is Usage.COLUMNWISE else quantize_steps.transpose_plane(ops, codes, recipe.format(role))

    dy, amax = planes(grad, Role.GRADIENT, how.usage)
    dx = dw = None
    if how.dw is not None:
        dw = how.dw(ops, dy[Usage.COLUMNWISE], columnwise(x, Role.ACTIVATION, Usage.COLUMNWISE))
    if how.dx is not None:
        dx = how.dx(ops, dy[Usage.ROWWISE], columnwise(w, Role.WEIGHT, how.w_usage))
    return dx, dw, amax


def _planes(
    ops: Any, x: Any, recipe: Recipe, role: Role, usage: Usage, scale: Any, draws: Draws | None
) -> tuple[dict[Usage, Plane], Any]:
    """The planes of a matrix, and its amax if its scale is given."""
    return quantize_operand(ops, x, operand_spec(recipe, role, usage), scale=scale, draws=draws)
