"""The permutation that sorts the rows of a mixture-of-experts layer by expert, and its inverse.

    x [T, H], each token with k experts  --permute-->  [T k, H], rows sorted by expert  --unpermute-->  [T, H]

Nothing waits for the device, and the number of launches does not grow with the number of experts. Backward passes
gather rows instead of adding to them, so gradients are deterministic, and each is rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qshard._core.layers import MoEPermutation, check_choice, check_tokens, check_weights
from qshard._core.validation import quote
from qshard.torch_bridge._experts.fusion import combine, combine_grad
from qshard.torch_bridge._experts.tiles import GroupedRows, tiles_of
from qshard.torch_bridge._nn.module_calls import pass_row_amaxes
from qshard.torch_bridge._ops.autograd_node import Node, apply_node
from qshard.torch_bridge._ops.bind import ops
from qshard.torch_bridge._quantized.validation import check_tensor

_KEYS = (torch.uint8, torch.int16, torch.int32)
"""Dtypes of sort keys: the radix sort of a GPU makes fewer passes over narrow keys."""


def moe_permutation(indices: Tensor, num_experts: int) -> MoEPermutation:
    """Sort the choices of a router by expert. Choices of the same expert keep the order of their tokens.

    Args:
      indices: int32 or int64 `[T, k]`: the experts of each token. An index outside of 0..E-1 names no expert: its row
        comes after the last group, where `grouped_linear` gives zeros.
      num_experts: E.

    Returns:
      The permutation of the `T k` rows, on the device of `indices`.

    Raises:
      TypeError: `indices` are not integers.
      ValueError: `indices` are not `[T, k]`, or `num_experts` is not positive.

    Ranks sort their own tokens. Nothing waits for the device.

    >>> permutation = moe_permutation(torch.tensor([[2, 0], [0, 1]]), 3)
    >>> permutation.tokens, permutation.group_sizes
    (tensor([0, 1, 1, 0], dtype=torch.int32), tensor([2, 1, 1], dtype=torch.int32))

    Source: Megatron-Core (`moe_utils.permute`).
    """
    if not isinstance(indices, Tensor) or indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"moe_permutation: indices ({quote(indices)}) are not int32 or int64; pass the experts of each token"
        )
    check_choice("moe_permutation", tuple(indices.shape), num_experts)
    narrow = next(dtype for dtype in _KEYS if num_experts <= torch.iinfo(dtype).max)
    flat = indices.flatten()
    keys = torch.where((flat < 0) | (flat > num_experts), num_experts, flat).to(narrow)
    by_expert, choices = torch.sort(keys, stable=True)
    starts = torch.searchsorted(
        by_expert, torch.arange(num_experts + 1, dtype=narrow, device=keys.device), out_int32=True
    )
    row = torch.arange(keys.shape[0], dtype=torch.int32, device=keys.device)
    positions = torch.empty_like(row).scatter_(0, choices, row).view(indices.shape)
    return MoEPermutation(choices.to(torch.int32), positions, starts.diff())


def moe_permute(x: Tensor, permutation: MoEPermutation) -> Tensor:
    """Copy the rows of tokens to the rows of their experts. Differentiable.

    Args:
      x: float32, bfloat16 or float16 `[T, H]`.
      permutation: the result of `moe_permutation`.

    Returns:
      `[T k, H]`, sorted by expert. The gradient of a token is the sum over its rows, in fp32 and rounded once.

    Raises:
      TypeError: `x` is not a tensor of such a dtype.
      ValueError: `x` does not have T rows.

    >>> moe_permute(torch.tensor([[1.0], [2.0]]), moe_permutation(torch.tensor([[2, 0], [0, 1]]), 3)).flatten()
    tensor([1., 2., 2., 1.])

    Source: Megatron-Core (`moe_utils.permute`).
    """
    check_tensor("moe_permute", "x", x)
    check_tokens("moe_permute", "x", tuple(x.shape), permutation.positions.shape[0], "x as [T, H]")
    y: Tensor = apply_node(_Permute, x, permutation)
    return y


def moe_unpermute(y: Tensor, permutation: MoEPermutation, weights: Tensor | None = None) -> Tensor:
    """Add the rows of each token, times the weights of its experts. Differentiable in both.

    Args:
      y: float32, bfloat16 or float16 `[T k, N]`, sorted by expert.
      permutation: the result of `moe_permutation`.
      weights: the weight of each choice, a float dtype `[T, k]`; None for 1.

    Returns:
      `[T, N]` in the dtype of `y`: the sum over k, in fp32 and rounded once.

    Raises:
      TypeError: `y` or `weights` is not a tensor of such a dtype.
      ValueError: `y` does not have `T k` rows, or `weights` are not `[T, k]`.

    >>> permutation = moe_permutation(torch.tensor([[2, 0], [0, 1]]), 3)
    >>> moe_unpermute(torch.tensor([[1.0], [2.0], [4.0], [8.0]]), permutation, torch.tensor([[1.0, 0.5], [1.0, 2.0]]))
    tensor([[ 8.5000],
            [10.0000]])

    Source: Megatron-Core (`moe_utils.unpermute`).
    """
    check_tensor("moe_unpermute", "y", y)
    positions = permutation.positions
    check_tokens("moe_unpermute", "y", tuple(y.shape), positions.numel(), "one row for each of the T k choices")
    if weights is None:
        weights = torch.ones(positions.shape, dtype=torch.float32, device=y.device)
    check_tensor("moe_unpermute", "weights", weights)
    check_weights("moe_unpermute", tuple(weights.shape), tuple(positions.shape))
    return combine_experts(y, permutation, weights)


def combine_experts(y: Tensor, permutation: MoEPermutation, weights: Tensor) -> Tensor:
    """Compute `moe_unpermute` without checks, also of padded rows."""
    x: Tensor = apply_node(_Unpermute, y, weights, permutation)
    return x


def padded_rows(permutation: MoEPermutation, tile_rows: int) -> tuple[MoEPermutation, GroupedRows, GroupedRows]:
    """Pad the rows of each expert to a multiple of `tile_rows`, at least one. There is at least one token.

    Returns:
      The permutation of padded rows, where choices outside of `T k` are padding; the padded rows of a product that
      reads tokens; and the padded rows of a product that reads padded rows. Both products give padded rows.
    """
    choices, positions, sizes = permutation
    tiles, _ = tiles_of(tile_rows, choices.shape[0], sizes)
    is_row = tiles.rows < choices.shape[0]
    last = choices.shape[0] - 1
    choices = torch.where(is_row, choices.index_select(0, tiles.rows.clamp(max=last)), choices.shape[0])
    assert tiles.place is not None
    positions = tiles.place.index_select(0, positions.flatten()).view(positions.shape)
    padded = MoEPermutation(choices, positions, sizes)
    row = torch.arange(is_row.shape[0], dtype=torch.int32, device=is_row.device)
    own = tiles._replace(ends=tiles.stops, rows=torch.where(is_row, row, is_row.shape[0]), place=None)
    of_tokens = own._replace(rows=padded.tokens, place=positions)
    return padded, GroupedRows(of_tokens, own), GroupedRows(own, own)


class _Permute(Node):
    op, instead, degree = "moe_permute", "use x.index_select(0, permutation.tokens)", 1

    @staticmethod
    def forward(ctx: Any, x: Tensor, permutation: MoEPermutation) -> tuple[Tensor, list[Tensor]]:
        return x.index_select(0, permutation.tokens), [permutation.positions]

    @staticmethod
    def gradients(ctx: Any, saved: list[Tensor], grad: Tensor) -> tuple[Tensor | None, ...]:
        (positions,) = saved
        ones = torch.ones(positions.shape, dtype=torch.float32, device=grad.device)
        return ops.combine_rows(grad.contiguous(), positions, ones), None


class _Unpermute(Node):
    op, instead, degree = "moe_unpermute", "index y with permutation.positions, and add", 2

    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, permutation: MoEPermutation) -> tuple[Tensor, list[Tensor]]:
        return combine(y, weights, permutation, ctx.needs_input_grad[1])

    @staticmethod
    def gradients(ctx: Any, saved: list[Tensor], grad: Tensor) -> tuple[Tensor | None, ...]:
        dy, amaxes, dweights = combine_grad(saved, grad)
        if amaxes is not None:
            pass_row_amaxes(dy, amaxes)
        return dy, dweights, None
