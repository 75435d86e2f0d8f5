"""Ops around a grouped product that its autograd node computes under a compiler: SwiGLU, and the sum of a token's rows.

    forward     x  --product, SwiGLU-->  h, amaxes of rows  --product, sum-->  tokens
    backward    tokens  --sum, products-->  dh  --SwiGLU, products-->  dx

The ops that compute h, and the gradients of both products, also give the amax of each row. The quantization after them
then reads no rows for the amaxes of experts. In eager mode an amax is passed as an attribute of a tensor
(`module_calls.py`). Dynamo traces no attributes from one node to the next, and no amax of a gradient has a way there at
all. So under a compiler both gradients are computed and quantized in one node each, and the amaxes of h are a result of
the first node and an operand of the second.

Eager nodes stay separate: a node keeps its saved tensors until it ends, so gate, up and y would be in memory during the
products of the backward pass.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from qshard._core.layers import MoEPermutation
from qshard.torch_bridge._nn.activations import gate_up_and_amaxes, gate_up_grad_and_amaxes
from qshard.torch_bridge._ops.bind import ops


class Fusion(NamedTuple):
    """Ops that the node of a product of padded rows computes besides the product.

    Attributes:
      amaxes: x, and the amax of each of its rows, fp32 `[rows]`. A product that receives another x ignores them.
      swiglu: apply SwiGLU to the result, and also return the amax of each row of h.
      permutation: add the rows of each token, times `weights`; for the product after SwiGLU.
      weights: the weight of each choice, a float dtype `[T, k]`.
    """

    amaxes: tuple[Tensor, Tensor] | None = None
    swiglu: bool = False
    permutation: MoEPermutation | None = None
    weights: Tensor | None = None

    def amaxes_of(self, x: Tensor) -> Tensor | None:
        """Return the amaxes of the rows of a tensor object, or None."""
        return self.amaxes[1] if self.amaxes is not None and self.amaxes[0] is x else None


def combine(y: Tensor, weights: Tensor, permutation: MoEPermutation, need_weights: bool) -> tuple[Tensor, list[Tensor]]:
    """Add the rows of each token, times its weights. Also return the tensors to save for `combine_grad`."""
    y = y.contiguous()
    saved = [*permutation[:2], weights, *([y] if need_weights else [])]
    return ops.combine_rows(y, permutation.positions, weights.float().contiguous()), saved


def combine_grad(saved: list[Tensor], grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute the gradient of y, and if weights need a gradient the amaxes of its rows, and the gradient of weights."""
    choices, positions, weights, *y = saved
    tokens = MoEPermutation(choices, positions, choices).tokens
    # Choices outside are padding, which has no token and so no weight.
    inside = choices.clamp(max=max(0, weights.numel() - 1))
    of_rows, grad = weights.float().flatten().index_select(0, inside), grad.contiguous()
    if not y:
        return ops.combine_rows(grad, tokens[:, None], of_rows[:, None]), None, None
    dy, dots, amaxes = ops.combine_rows_grad(y[0], tokens, of_rows, grad)
    dweights = dots.index_select(0, positions.flatten()).view(weights.shape)
    return dy, amaxes, dweights.to(weights.dtype)


def fused_result(
    y: Tensor, fusion: Fusion, weights: Tensor | None, need_weights: bool
) -> tuple[Tensor | tuple[Tensor, Tensor], list[Tensor]]:
    """Apply the ops of `fusion` to the result of a product. Also return the tensors to save for `fused_gradients`."""
    if fusion.swiglu:
        h, amaxes, halves = gate_up_and_amaxes(y)
        return (h, amaxes), [halves]
    if fusion.permutation is None or weights is None:
        return y, []
    return combine(y, weights, fusion.permutation, need_weights)


def fused_gradients(saved: list[Tensor], grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute the gradient of y, the amaxes of its rows, and the gradient of weights, from the gradient of the result.

    `saved` are the tensors of `fused_result`.
    """
    if not saved:
        return grad, None, None
    if len(saved) == 1:  # Of SwiGLU. The sum saves three or four.
        return *gate_up_grad_and_amaxes(saved[0], grad), None
    return combine_grad(saved, grad)
