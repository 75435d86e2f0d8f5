"""The passes of a linear layer in few calls, for layers so small that the host is what they wait for.

A weight is quantized and multiplied in one call, and so are both gradients: programs (`programs.py`) of the same ops,
in the same order, as `functional.py` runs one after another; so the bits are the same. What lies between is held until
the end of the call, which is why large layers, which wait for no host, go one op after another.

Only where an op makes the products (`gemm.way_of`), of codes or of values: so on GPUs. Else they are PyTorch's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qshard._core import quantize_steps
from qshard._core.quantize_steps import Draws, Plane
from qshard.formats import Format, Usage
from qshard.gemm_dispatch import Way
from qshard.recipes import DelayedScaling, Recipe, Role
from qshard.torch_bridge._nn.operands import ROLES, check_planes, draws_of
from qshard.torch_bridge._ops.memo import Kept
from qshard.torch_bridge._ops.programs import Steps
from qshard.torch_bridge._quantized.gemm import LARGE, way_of


class _Product(NamedTuple):
    """`a @ b.T` of two planes."""

    way: Way
    dtype: torch.dtype

    def of(self, ops: Any, a: Plane, b: Plane, *, fast: bool = False) -> Any:
        return self.way.product(ops, a, b, dtype=self.dtype, fast=fast)


class Backward(NamedTuple):
    """What the backward pass of a layer comes down to.

    Attributes:
      dw, dx: the products for the gradients that are needed.
      x_parts, w_parts: how many tensors x and the weight are: the parts of a plane, or values, which are quantized.
      w_usage: which plane of the weight. Of x it is the columnwise one.
      drawn: the tensors that are rounded at random.
    """

    dw: _Product | None
    dx: _Product | None
    x_parts: int
    w_parts: int
    w_usage: Usage | None
    drawn: tuple[Role, ...]


def product(
    x: Plane,
    x_format: Format,
    weight: Tensor,
    recipe: Recipe,
    scale: Tensor | None,
    seed: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None] | None:
    """`y = x @ w.T` of the codes of x and values of a weight, and the amax of a weight whose `scale` is given.

    None: it cannot be had so.
    """
    sizes = (x.data.shape[0], weight.shape[0], weight.shape[1])
    how = _forward(x_format, recipe, sizes, weight.device, dtype)
    if how is None:
        return None
    of_x = _there(x)
    given = () if scale is None else (scale,)
    drawn = _draws(recipe, (Role.WEIGHT,) if recipe.weight.stochastic else (), seed, weight.device)
    y, amax = _multiply_weight((*of_x, weight, *given, *drawn), len(of_x), how, recipe)
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


@Kept
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
    (m, n, k), (x_dtype, w_dtype) = sizes, dtypes
    usage = Usage.BOTH if x_dtype and w_dtype else Usage.ROWWISE if x_dtype else Usage.COLUMNWISE
    dy, x, w = recipe.gradient, recipe.activation, recipe.weight
    if max(m * k, n * k, m * n) > LARGE or recipe.added_rows(Role.GRADIENT, usage, m):
        return None
    dw = dx = None
    if w_dtype is not None:
        way = way_of(dy, Usage.COLUMNWISE, x, Usage.COLUMNWISE, (n, k, m), device, w_dtype)
        if way is None:
            return None
        dw = _Product(way, w_dtype)
    if x_dtype is not None:
        way = way_of(dy, Usage.ROWWISE, w, Usage.COLUMNWISE, (m, k, n), device, x_dtype)
        if way is None:
            return None
        dx = _Product(way, x_dtype)
    x_parts, w_parts, _ = kept
    check_planes((m, n), dy, usage, Role.GRADIENT)  # What ops take may be less than whole blocks.
    if dw and x_parts == 1:
        check_planes((m, k), x, Usage.COLUMNWISE, Role.ACTIVATION)
    if dx and w_parts == 1:
        check_planes((n, k), w, Usage.COLUMNWISE, Role.WEIGHT)
    made = {Role.GRADIENT: True, Role.ACTIVATION: bool(dw) and x_parts == 1, Role.WEIGHT: bool(dx) and w_parts == 1}
    drawn = tuple(role for role, here in made.items() if here and recipe.format(role).stochastic)
    return Backward(dw, dx, *kept, drawn)


@Kept
def _forward(
    x: Format, recipe: Recipe, sizes: tuple[int, int, int], device: torch.device, dtype: torch.dtype
) -> _Product | None:
    m, n, k = sizes
    if max(m * k, n * k, m * n) > LARGE:
        return None
    way = way_of(x, Usage.ROWWISE, recipe.weight, Usage.ROWWISE, sizes, device, dtype)
    if way is None:
        return None
    check_planes((n, k), recipe.weight, Usage.ROWWISE, Role.WEIGHT)
    return _Product(way, dtype)


def _draws(recipe: Recipe, roles: Iterable[Role], seed: Tensor | None, device: torch.device) -> Iterator[Tensor]:
    """Seed and first index of each."""
    for role in roles:
        draws = draws_of(recipe.format(role), role, seed, device)
        assert draws is not None
        yield from (draws.seed, draws.first)


@Steps
def _multiply_weight(ops: Any, *args: Any) -> tuple[Any, ...]:
    *tensors, of_x, how, recipe = args
    x, weight, rest = tensors[:of_x], tensors[of_x], tensors[of_x + 1 :]
    scale, draws = (None, Draws(*rest)) if recipe.weight.stochastic else (rest[0] if rest else None, None)
    w, amax = _made(ops, weight, recipe, Role.WEIGHT, Usage.ROWWISE, scale, draws)
    return how.of(ops, Plane(*x), w[Usage.ROWWISE], fast=True), amax


@Steps
def _gradients(ops: Any, *args: Any) -> tuple[Any, ...]:
    grad, *tensors, how, recipe = args
    x, w = tensors[: how.x_parts], tensors[how.x_parts : how.x_parts + how.w_parts]
    rest = tensors[how.x_parts + how.w_parts :]
    drawn = [Draws(*pair) for pair in zip(rest[::2], rest[1::2], strict=True)] if how.drawn else []
    scales: dict[Role, Any] = {} if how.drawn else dict(zip(ROLES, rest, strict=False))  # Not both.
    draws = dict(zip(how.drawn, drawn, strict=True))

    def made(x: Any, role: Role, usage: Usage) -> tuple[dict[Usage, Plane], Any]:
        return _made(ops, x, recipe, role, usage, scales.get(role), draws.get(role))

    def columnwise(parts: Sequence[Any], role: Role, kept: Usage | None) -> Plane:
        """The columnwise plane of what is kept of an operand."""
        if len(parts) == 1:
            return made(parts[0], role, Usage.COLUMNWISE)[0][Usage.COLUMNWISE]
        codes = Plane(*parts)
        return codes if kept is Usage.COLUMNWISE else quantize_steps.transposed(ops, codes, recipe.format(role))

    dy, amax = made(grad, Role.GRADIENT, Usage.BOTH if how.dx and how.dw else (how.dx or how.dw).way.a[1])
    dx = dw = None
    if how.dw is not None:
        dw = how.dw.of(ops, dy[Usage.COLUMNWISE], columnwise(x, Role.ACTIVATION, Usage.COLUMNWISE))
    if how.dx is not None:
        dx = how.dx.of(ops, dy[Usage.ROWWISE], columnwise(w, Role.WEIGHT, how.w_usage))
    return dx, dw, amax


def _made(
    ops: Any, x: Any, recipe: Recipe, role: Role, usage: Usage, scale: Any, draws: Draws | None
) -> tuple[dict[Usage, Plane], Any]:
    """The planes of a matrix, and its amax if its scale is given."""
    if isinstance(recipe, DelayedScaling):
        return quantize_steps.quantize_delayed(ops, x, recipe.format(role), usage, scale, recipe.margin)
    return quantize_steps.quantize(ops, x, recipe.format(role), usage, draws=draws), None


def _there(parts: Plane) -> tuple[Tensor, ...]:
    return tuple(part for part in parts if part is not None)
