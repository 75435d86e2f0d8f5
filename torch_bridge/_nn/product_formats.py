"""`linear` with a recipe that has formats of single products: `NVFP4(wgrad="bf16")`.

A product multiplies codes in the formats of its own recipe, or values rounded to bfloat16 ("bf16"). An operand of two
products is quantized once if they have one recipe, and else once for each. Planes that no product reads are not
computed. As in `autograd.py`, a node that saves tensors comes before the node that multiplies.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qshard._core.quantize_steps import Plane
from qshard.formats import Format, Usage
from qshard.recipes import Product, Recipe, Role
from qshard.torch_bridge._nn.module_calls import cached_amax
from qshard.torch_bridge._nn.operands import LayerQuantizer, matrix_of, values_of
from qshard.torch_bridge._ops.autograd_node import Node
from qshard.torch_bridge._quantized.gemm import Operand, matmul
from qshard.torch_bridge._quantized.plane_programs import transpose

aten = torch.ops.aten

_PARTS = len(Plane._fields)


class ProductLayout(NamedTuple):
    """Layout of the tensors that `ProductGradients` saves.

    Attributes:
      of_x: number of saved tensors that belong to x, as wgrad reads it: a plane, or one bfloat16 matrix.
      w_usage: the plane of the saved codes of the weight; None: the weight itself is saved, and quantized again.
      is_kn: the weight is `[K, N]`.
    """

    recipe: Recipe
    dtype: torch.dtype
    y_shape: tuple[int, ...]
    of_x: int
    w_format: Format
    w_usage: Usage | None
    is_kn: bool

    @property
    def w_usages(self) -> tuple[Usage, Usage]:
        """The planes of the weight that the forward and the backward pass contract."""
        return (Usage.COLUMNWISE, Usage.ROWWISE) if self.is_kn else (Usage.ROWWISE, Usage.COLUMNWISE)

    def weight_plane(self, parts: Sequence[Tensor | None], usage: Usage) -> Operand:
        """Return a plane of a weight from saved codes of the plane `w_usage`."""
        codes = Plane(*parts)
        if self.w_usage is not usage:
            if not self.w_format.transposes:
                return Operand(self.w_format, codes, is_transposed=True)
            codes = transpose(codes, self.w_format)
        return Operand(self.w_format, codes, usage)


def matmul_values(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute `a @ b` of bfloat16 matrices, with sums in float32, rounded once to `dtype`."""
    kind = a.device.type
    # Autocast would change the dtype of the result.
    with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
        if dtype == torch.bfloat16:
            return torch.mm(a, b)
        if kind == "cuda" and a.numel() and b.numel():
            return torch.mm(a, b, out_dtype=torch.float32).to(dtype)
        return torch.mm(a.float(), b.float()).to(dtype)


class ProductGradients(Node):
    """Autograd node that saves the operands of dgrad and wgrad, and computes both gradients."""

    op, degree = "linear", 2
    instead = "exclude the layer with convert(filter=), or multiply with torch.nn.functional.linear"

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, how: ProductLayout, seed: Tensor | None, *saved: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """Save the operands and return a placeholder for y without memory, which `ForwardProduct` computes."""
        ctx.how, ctx.x_shape, ctx.x_dtype, ctx.w_dtype = how, x.shape, x.dtype, weight.dtype
        own = [weight] if how.w_usage is None else []
        return x.new_empty((), dtype=how.dtype).expand(how.y_shape), (*saved, *own, seed)

    @staticmethod
    def gradients(ctx: Any, saved: list[Any], grad: Tensor) -> tuple[Tensor | None, ...]:
        how: ProductLayout = ctx.how
        seed = saved.pop()
        count, of_x, of_w = len(saved) - (how.w_usage is None), saved[: how.of_x], saved[how.of_x :]
        saved.clear()  # Each operand is freed once it is multiplied.
        need_x, need_w = ctx.needs_input_grad[:2]
        dgrad, wgrad = (how.recipe.of(each) for each in (Product.DGRAD, Product.WGRAD))
        dy = matrix_of(grad, grad.dtype)
        dys = _planes_of_gradient(dy, dgrad if need_x else None, wgrad if need_w else None, seed, cached_amax(grad))
        grad_x = grad_w = None
        if need_w:
            grad_w = _weight_gradient(how, dy, dys.get(Product.WGRAD), of_x, ctx.w_dtype)
        if need_x:
            grad_x = _input_gradient(how, dy, dys.get(Product.DGRAD), of_w, seed)
            grad_x = grad_x.view(ctx.x_shape).to(ctx.x_dtype)
        return grad_x, grad_w, *(None,) * (2 + count)


def _planes_of_gradient(
    dy: Tensor, dgrad: Recipe | None, wgrad: Recipe | None, seed: Tensor | None, amax: Tensor | None
) -> dict[Product, Operand]:
    """Quantize the gradient of y for the products that multiply codes, at once if they have one recipe."""
    role, rows, columns = Role.GRADIENT, Usage.ROWWISE, Usage.COLUMNWISE
    if dgrad is not None and dgrad is wgrad:
        both, _ = LayerQuantizer(dgrad, seed).quantize(dy, role, Usage.BOTH, amax)
        return {Product.DGRAD: both[rows], Product.WGRAD: both[columns]}
    planes = {}
    if dgrad is not None:
        planes[Product.DGRAD] = LayerQuantizer(dgrad, seed).quantize(dy, role, rows, amax)[0][rows]
    if wgrad is not None:
        planes[Product.WGRAD] = LayerQuantizer(wgrad, seed).quantize(dy, role, columns, amax)[0][columns]
    return planes


def _weight_gradient(
    how: ProductLayout, dy: Tensor, plane: Operand | None, of_x: list[Any], dtype: torch.dtype
) -> Tensor:
    if plane is None:
        x, dy = of_x[0], dy.to(torch.bfloat16)
        return matmul_values(x.t(), dy, dtype) if how.is_kn else matmul_values(dy.t(), x, dtype)
    wgrad = how.recipe.of(Product.WGRAD)
    assert wgrad is not None
    pair = [plane, Operand(wgrad.activation, Plane(*of_x), Usage.COLUMNWISE)]
    return matmul(pair[how.is_kn], pair[not how.is_kn], dtype)


def _input_gradient(
    how: ProductLayout, dy: Tensor, plane: Operand | None, of_w: list[Any], seed: Tensor | None
) -> Tensor:
    usage = how.w_usages[1]
    if plane is None:
        values = values_of(of_w[-1]).to(torch.bfloat16)
        return matmul_values(dy.to(torch.bfloat16), values.t() if how.is_kn else values, how.dtype)
    dgrad = how.recipe.of(Product.DGRAD)
    assert dgrad is not None
    if how.w_usage is not None:
        return matmul(plane, how.weight_plane(of_w, usage), how.dtype)
    w = LayerQuantizer(dgrad, seed).quantize(values_of(of_w[-1]), Role.WEIGHT, usage)[0][usage]
    return matmul(plane, w, how.dtype)


class ForwardProduct(torch.autograd.Function):
    """Autograd node of `y = x @ w.T`, with the identity as its backward pass. `ProductGradients` runs next there."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, how: ProductLayout, x_format: Format | None, *parts: Tensor | None) -> Tensor:
        """Multiply the planes of x and of the weight in `parts`; or without a format, two bfloat16 matrices."""
        ctx.count = len(parts)
        return forward_product(how, x_format, *parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None, *(None for _ in range(ctx.count))


def forward_product(how: ProductLayout, x_format: Format | None, *parts: Any) -> Tensor:
    """Compute y in its final shape, which is not a view: FSDP2 cannot attach its hooks to one."""
    if x_format is None:
        x, w = parts
        y = matmul_values(x, w if how.is_kn else w.t(), how.dtype)
    else:
        forward = how.recipe.of(Product.FORWARD)
        assert forward is not None
        x, w = Plane(*parts[:_PARTS]), Plane(*parts[_PARTS:])
        y = matmul(Operand(x_format, x), Operand(forward.weight, w, how.w_usages[0]), how.dtype, fast=True)
    shaped: Tensor = aten._unsafe_view.default(y, how.y_shape)
    return shaped


def bfloat16_matrix(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x as a matrix of bfloat16, rounded to the dtype of the layer first."""
    return matrix_of(matrix_of(x, dtype), torch.bfloat16)
