"""The passes of a linear layer in few calls, for layers so small that the host is what they wait for.

A weight is quantized and multiplied in one call, and so are both gradients: programs (`programs.py`) of the same ops,
in the same order, as `linear.py` runs one after another; so the bits are the same. What lies between is held until the
end of the call, which is why large layers, which wait for no host, go one op after another.

Only where tensor cores take the codes of both operands. Else a product is PyTorch's own, of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qshard import pipeline, products
from qshard.formats import Format, Usage
from qshard.pipeline import Plane
from qshard.recipes import DelayedScaling, Recipe, Role
from qshard.torch_bridge.gemm import workspace_of
from qshard.torch_bridge.kept import Kept
from qshard.torch_bridge.programs import Steps

LARGE = 2**24
"""Elements of the largest operand from which on kernels take longer than the host: on an H200 a GEMM of 4096 x 4096 x
4096 takes 0.2 ms, and the calls of a layer half of that."""


class _Product(NamedTuple):
    """`a @ b.T`, of planes for two usages."""

    a: Format
    b: Format
    workspace: int
    dtype: torch.dtype

    def of(self, ops: Any, a: Plane, b: Plane, *, fast: bool = False) -> Any:
        options: dict[str, Any] = {"dtype": self.dtype, "fast": fast, "workspace": self.workspace}
        return products.multiply(ops, a, self.a, b, self.b, **options)


class Backward(NamedTuple):
    """What the backward pass of a layer comes down to.

    Attributes:
      dw, dx: the products for the gradients that are needed.
      margin: of delayed scaling.
      x_parts, w_parts: how many tensors x and the weight are: the parts of a plane, or values, which are quantized.
      w_usage: which plane of the weight. Of x it is the columnwise one.
    """

    dw: _Product | None
    dx: _Product | None
    margin: int | None
    x_parts: int
    w_parts: int
    w_usage: Usage | None


def product(
    x: Plane, x_format: Format, weight: Tensor, recipe: Recipe, scale: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None] | None:
    """`y = x @ w.T` of the codes of x and values of a weight, and the amax of a weight whose `scale` is given.

    None: it cannot be had so.
    """
    sizes = (x.data.shape[0], weight.shape[0], weight.shape[1])
    how = _forward(x_format, recipe, sizes, weight.device, dtype)
    if how is None:
        return None
    tensors = (*_there(x), weight) if scale is None else (*_there(x), weight, scale)
    y, amax = _multiply_weight(tensors, how, _margin(recipe))
    return y, amax


def gradients(
    how: Backward, recipe: Recipe, grad: Tensor, x: Sequence[Tensor], w: Sequence[Tensor], scales: Sequence[Tensor]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x and of the weight, and the amax of that of y if its scale is given.

    Args:
      grad: of y, a matrix.
      x, w: what `how` says.
      scales: of weight, x and gradient, under delayed scaling.
    """
    dx, dw, amax = _gradients((grad, *x, *w, *scales), how, recipe)
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
    if max(m * k, n * k, m * n) > LARGE or recipe.stochastic or recipe.added_rows(Role.GRADIENT, usage, m):
        return None
    dw = dx = None
    if w_dtype is not None:
        found = workspace_of((dy, Usage.COLUMNWISE), (x, Usage.COLUMNWISE), (n, k, m), device)
        if found is None:
            return None
        dw = _Product(dy, x, found, w_dtype)
    if x_dtype is not None:
        found = workspace_of((dy, Usage.ROWWISE), (w, Usage.COLUMNWISE), (m, k, n), device)
        if found is None:
            return None
        dx = _Product(dy, w, found, x_dtype)
    return Backward(dw, dx, _margin(recipe), *kept)


@Kept
def _forward(
    x: Format, recipe: Recipe, sizes: tuple[int, int, int], device: torch.device, dtype: torch.dtype
) -> _Product | None:
    m, n, k = sizes
    if max(m * k, n * k, m * n) > LARGE or recipe.stochastic:
        return None
    found = workspace_of((x, Usage.ROWWISE), (recipe.weight, Usage.ROWWISE), sizes, device)
    return None if found is None else _Product(x, recipe.weight, found, dtype)


@Steps
def _multiply_weight(ops: Any, *args: Any) -> tuple[Any, ...]:
    *tensors, how, margin = args
    scale = tensors.pop() if margin is not None else None
    *x, weight = tensors
    w, amax = _made(ops, weight, how.b, Usage.ROWWISE, scale, margin)
    return how.of(ops, Plane(*x), w[Usage.ROWWISE], fast=True), amax


@Steps
def _gradients(ops: Any, *args: Any) -> tuple[Any, ...]:
    grad, *tensors, how, recipe = args
    x, w = tensors[: how.x_parts], tensors[how.x_parts : how.x_parts + how.w_parts]
    w_scale, x_scale, scale = tensors[how.x_parts + how.w_parts :] or (None, None, None)
    usage = Usage.BOTH if how.dx and how.dw else Usage.ROWWISE if how.dx else Usage.COLUMNWISE
    dy, amax = _made(ops, grad, recipe.gradient, usage, scale, how.margin)
    dx = dw = None
    if how.dw is not None:
        columns = _columnwise(ops, x, Usage.COLUMNWISE, recipe.activation, x_scale, how.margin)
        dw = how.dw.of(ops, dy[Usage.COLUMNWISE], columns)
    if how.dx is not None:
        columns = _columnwise(ops, w, how.w_usage, recipe.weight, w_scale, how.margin)
        dx = how.dx.of(ops, dy[Usage.ROWWISE], columns)
    return dx, dw, amax


def _columnwise(ops: Any, parts: Sequence[Any], usage: Usage | None, fmt: Format, scale: Any, margin: Any) -> Plane:
    """The columnwise plane of what is kept of an operand."""
    if len(parts) == 1:
        return _made(ops, parts[0], fmt, Usage.COLUMNWISE, scale, margin)[0][Usage.COLUMNWISE]
    codes = Plane(*parts)
    return codes if usage is Usage.COLUMNWISE else pipeline.transposed(ops, codes, fmt)


def _made(
    ops: Any, x: Any, fmt: Format, usage: Usage, scale: Any, margin: int | None
) -> tuple[dict[Usage, Plane], Any]:
    """The planes of a matrix, and its amax if its scale is given."""
    if margin is None:
        return pipeline.quantize(ops, x, fmt, usage), None
    return pipeline.quantize_delayed(ops, x, fmt, usage, scale, margin)


def _margin(recipe: Recipe) -> int | None:
    return recipe.margin if isinstance(recipe, DelayedScaling) else None


def _there(parts: Plane) -> tuple[Tensor, ...]:
    return tuple(part for part in parts if part is not None)
