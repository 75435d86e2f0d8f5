"""Newton-Schulz of whole matrices on one device, with products in bfloat16 or, in the first steps, in FP8."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qshard._core import quantize_steps
from qshard._core.operands import OperandSpec
from qshard._core.optimizers import muon as core
from qshard._core.quantize_steps import Plane
from qshard.formats import FP8_E4M3, Usage
from qshard.torch_bridge._experts.operands import BatchedOps, GroupedOperand
from qshard.torch_bridge._experts.products import row_product
from qshard.torch_bridge._experts.tiles import Tiles
from qshard.torch_bridge._quantized.gemm import Operand, matmul
from qshard.torch_bridge._quantized.plane_programs import quantize_operand

NEWTON_SCHULZ_SETTINGS = ("ns_coefficients", "ns_steps", "eps", "ns_fp8_steps", "ns_fp8_min_side")
"""Settings of a group of the optimizer that are arguments of `newton_schulz`, in its order."""


def newton_schulz(
    x: Tensor,
    coefficients: Sequence[float],
    steps: int,
    eps: float,
    fp8_steps: int = 0,
    fp8_min_side: int = core.FP8_MIN_SIDE,
) -> Tensor:
    """Return the orthogonalized bfloat16 matrix `[N, K]`, or matrices `[E, N, K]`, with the operations of torch's.

    The first `fp8_steps` steps multiply in FP8 if the shape fits: `core.fitting_fp8_steps`.
    """
    a, b, c = coefficients
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    fp8_steps = core.fitting_fp8_steps(fp8_steps, fp8_min_side, tuple(x.shape))
    stored = x.mT if is_tall else x
    for _ in range(fp8_steps):
        stored = _fp8_step(stored, coefficients)
    x = stored.mT if is_tall else stored
    add_product = torch.baddbmm if x.ndim == 3 else torch.addmm
    for _ in range(steps - fp8_steps):
        gram = x @ x.mT
        polynomial = add_product(gram, gram, gram, beta=b, alpha=c)
        x = add_product(x, polynomial, x, beta=a)
    return x.mT if is_tall else x


def _fp8_step(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Run a step for X = x, or X = x^T if x has more rows than columns, without a transposed copy of x.

    A and B are symmetric, so each serves as its own transpose, and only x needs both planes.
    """
    a, b, c = coefficients
    rows, columns = _quantize(x, Usage.BOTH)
    is_tall = x.shape[-2] > x.shape[-1]
    long = columns if is_tall else rows  # The plane that contracts the longer side of x.
    gram = _product(long, long)
    (of_gram,) = _quantize(gram, Usage.ROWWISE)
    square = _product(of_gram, of_gram)
    (polynomial,) = _quantize(gram.mul_(b).add_(square, alpha=c), Usage.ROWWISE)
    product = _product(rows, polynomial) if is_tall else _product(polynomial, columns)
    return product.add_(x, alpha=a)


def _quantize(x: Tensor, usage: Usage) -> list[Plane]:
    """Return the planes of a matrix, or of each matrix of a stack with a scale of its own."""
    if x.ndim == 2:
        planes, _ = quantize_operand(x, OperandSpec(FP8_E4M3, usage))
    else:
        planes = quantize_steps.quantize(BatchedOps(), x, FP8_E4M3, usage)
    return [planes[each] for each in usage.planes]


def _product(a: Plane, b: Plane) -> Tensor:
    """Compute `a @ b.T` of codes `[M, K]` and `[N, K]`, or of stacks of them, in bfloat16 with float32 sums."""
    if a.data.ndim == 2:
        return matmul(Operand(FP8_E4M3, a), Operand(FP8_E4M3, b), torch.bfloat16)
    count, m, k = a.data.shape
    stops = tuple(range(m, count * m + 1, m))
    on_device = torch.arange(m, count * m + 1, m, dtype=torch.int32, device=a.data.device)
    tiles = Tiles(m, on_device, None, on_device[:1].expand(count * m), None)  # Of `rows` only the length is read.
    flat = GroupedOperand(FP8_E4M3, Usage.ROWWISE, a._replace(data=a.data.view(count * m, k)))
    matrices = GroupedOperand(FP8_E4M3, Usage.ROWWISE, b)
    columns = b.data.shape[1]
    product = row_product(flat, matrices, Usage.ROWWISE, tiles, stops, columns, torch.bfloat16, fast=False)
    return product.view(count, m, columns)
