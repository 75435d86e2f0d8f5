"""Autograd node of `grouped_linear`: quantization of rows and weights, and three grouped products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qshard._core.quantize_steps import Plane
from qshard.formats import Usage
from qshard.layout import source
from qshard.recipes import Recipe, Role
from qshard.torch_bridge._experts.expert_parallel import quantize_dispatched
from qshard.torch_bridge._experts.fusion import fused_gradients, fused_result
from qshard.torch_bridge._experts.operands import GroupedOperand, OperandList
from qshard.torch_bridge._experts.products import (
    expert_products,
    host_stops,
    multiplies_codes,
    row_product,
    sums_by_expert,
)
from qshard.torch_bridge._experts.tiles import GroupedRows, Tiles, Transfer, quantize_experts, tile_rows_of, tiles_of
from qshard.torch_bridge._experts.weights import gathered_weights, quantize_weights
from qshard.torch_bridge._nn.module_calls import take_row_amaxes
from qshard.torch_bridge._nn.operands import operand_spec
from qshard.torch_bridge._ops.autograd_node import Node

DelayedStates = Sequence[Any] | Mapping[Role, Any]
"""For each expert a `DelayedScale` by role, or for each role one of all experts."""


class ProductOptions(NamedTuple):
    """Options of `GroupedProduct`. `sizes` are the group sizes, if the host knows them."""

    recipe: Recipe
    dtype: torch.dtype
    sizes: tuple[int, ...] | None
    delayed: DelayedStates | None
    is_gathered: bool
    transfer: Transfer | None = None

    def combined(self, rows: Tensor, role: Role) -> Tensor:
        """Return the rows of a product to their source ranks, if the rows of the operand in `role` are dispatched."""
        return rows if self.transfer is None or self.transfer.role is not role else self.transfer.exchange.combine(rows)

    def backward_plane(self, device: torch.device) -> Usage:
        """Return the plane of quantized weights that the backward pass reads."""
        if multiplies_codes(self.recipe.format(Role.GRADIENT), self.recipe.weight, device):
            return Usage.COLUMNWISE
        return source(self.recipe.weight, Usage.COLUMNWISE)

    def scales(self, role: Role) -> Tensor | None:
        if self.delayed is None:
            return None
        if isinstance(self.delayed, Mapping):
            scale: Tensor = self.delayed[role].scale
            return scale
        return torch.stack([states[role].scale for states in self.delayed])

    def observe(self, role: Role, amaxes: Tensor | None) -> None:
        if self.delayed is None or amaxes is None:
            return
        if isinstance(self.delayed, Mapping):
            self.delayed[role].observe(amaxes)
            return
        for states, amax in zip(self.delayed, amaxes.unbind(), strict=True):
            states[role].observe(amax)


class GroupedProduct(Node):
    """Autograd node of `grouped_linear`. `row_amaxes` and `token_weights` are tensors of a `Fusion`."""

    op, degree = "grouped_linear", 2
    instead = "multiply the rows of each expert with torch.nn.functional.linear"

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        groups: Tensor | GroupedRows,
        seeds: Tensor | None,
        bias: Tensor | None,
        row_amaxes: Tensor | None,
        token_weights: Tensor | None,
        how: ProductOptions,
        *weights: Tensor,
    ) -> tuple[Tensor | tuple[Tensor, Tensor], list[Tensor | None]]:
        need_x, need_w = ctx.needs_input_grad[0], any(ctx.needs_input_grad[_FIRST_WEIGHT:])
        row, columns = Usage.ROWWISE, Usage.COLUMNWISE
        if isinstance(groups, Tensor):
            tiles, fits = tiles_of(tile_rows_of(x.device, how.recipe), x.shape[0], groups)
            groups = GroupedRows(tiles, tiles)
            if how.sizes is None:
                torch._assert_async(fits, _UNFIT_SIZES)
        tiles = groups.x
        sides = _quantize_rows(x, how, Usage.BOTH if need_w else row, Role.ACTIVATION, tiles, seeds, row_amaxes)
        # Codes gathered by FSDP2 are saved by reference: FSDP2 frees their memory and gathers them again.
        saved_w: list[Tensor | None] = [*weights] if need_x else []
        backward = how.backward_plane(x.device)
        w: GroupedOperand | OperandList
        if how.is_gathered:
            w = gathered_weights(weights, row)
        else:
            usage = Usage.BOTH if need_x and backward is columns else row
            planes, amax = quantize_weights(weights, how.recipe, usage, seeds=seeds, scale=how.scales(Role.WEIGHT))
            how.observe(Role.WEIGHT, amax)
            w = planes[row]
            if need_x:
                saved_w = [*planes[backward].parts]
        stops, out = host_stops(how.sizes, tiles.tile_rows), weights[0].shape[-2]
        y = row_product(sides[row], w, row, groups.y, stops, out, how.dtype, fast=True)
        if bias is not None:
            groups.y.add_to_rows(y, bias.detach())
        saved_x = sides[columns].parts if need_w else (None,) * len(Plane._fields)
        ctx.how, ctx.x_dtype, ctx.tile_rows = how, x.dtype, tiles.tile_rows
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.w_dtype, ctx.w_shape, ctx.w_count = weights[0].dtype, weights[0].shape, len(saved_w)
        result: Tensor | tuple[Tensor, Tensor] = how.combined(y, Role.GRADIENT)
        of_result: list[Tensor] = []
        if groups.fusion is not None:
            result, of_result = fused_result(y, groups.fusion, token_weights, ctx.needs_input_grad[_TOKEN_WEIGHTS])
        ctx.result_count = len(of_result)
        return result, [*tiles[1:], *groups.y[2:], seeds, *saved_x, *saved_w, *of_result]

    @staticmethod
    def gradients(ctx: Any, saved: list[Any], grad: Tensor) -> tuple[Tensor | None, ...]:
        how: ProductOptions = ctx.how
        end_w = len(saved) - ctx.result_count
        end = end_w - ctx.w_count
        tiles, of_y = Tiles(ctx.tile_rows, *saved[:4]), Tiles(ctx.tile_rows, saved[0], *saved[4:7])
        seeds, saved_w = saved[7], saved[end:end_w]
        need_x, need_b = ctx.needs_input_grad[0], ctx.needs_input_grad[_BIAS]
        need_w = any(ctx.needs_input_grad[_FIRST_WEIGHT:])
        grad_x = grad_b = None
        of_weights: Sequence[Tensor | None] = [None] * (len(ctx.needs_input_grad) - _FIRST_WEIGHT)
        grad, row_amaxes, grad_token_weights = fused_gradients(saved[end_w:], grad)
        if need_b:
            grad_b = sums_by_expert(grad.detach(), of_y).to(ctx.bias_dtype)
        row, columns, stops = Usage.ROWWISE, Usage.COLUMNWISE, host_stops(how.sizes, tiles.tile_rows)
        sides: dict[Usage, GroupedOperand] = {}
        if need_x or need_w:
            usage = Usage.BOTH if need_x and need_w else row if need_x else columns
            sides = _quantize_rows(grad, how._replace(dtype=grad.dtype), usage, Role.GRADIENT, of_y, seeds, row_amaxes)
        if need_w:
            x = GroupedOperand(how.recipe.format(Role.ACTIVATION), columns, Plane(*saved[8:end]))
            shape = (tiles.stops.shape[0], *ctx.w_shape[-2:])
            dw = expert_products(sides.pop(columns), x, tiles, stops, shape, ctx.w_dtype)
            of_weights = [dw] if len(ctx.w_shape) == 3 else dw.unbind()
        saved.clear()
        if need_x:
            w: GroupedOperand | OperandList
            if how.is_gathered:
                w = gathered_weights(saved_w, columns)
            else:
                w = GroupedOperand(how.recipe.weight, how.backward_plane(grad.device), Plane(*saved_w))
            dx = row_product(sides.pop(row), w, columns, tiles, stops, ctx.w_shape[-1], how.dtype, fast=False)
            grad_x = how.combined(dx.to(ctx.x_dtype), Role.ACTIVATION)
        return grad_x, None, None, grad_b, None, grad_token_weights, None, *of_weights


_BIAS, _TOKEN_WEIGHTS, _FIRST_WEIGHT = 3, 5, 7
"""Positions among the inputs of `GroupedProduct`."""
_UNFIT_SIZES = (
    "grouped_linear: group_sizes are negative or exceed the rows of x; pass the number of rows of each expert"
)


def _quantize_rows(
    x: Tensor,
    how: ProductOptions,
    usage: Usage,
    role: Role,
    tiles: Tiles,
    seeds: Tensor | None,
    row_amaxes: Tensor | None,
) -> dict[Usage, GroupedOperand]:
    spec = operand_spec(how.recipe, role, usage)
    spec.layouts((tiles.rows.shape[0], x.shape[1]))
    if how.transfer is not None and how.transfer.role is role:
        return quantize_dispatched(x.detach().to(how.dtype), spec, tiles, how.transfer.exchange, seeds=seeds)
    row_amaxes = take_row_amaxes(x) if row_amaxes is None else row_amaxes
    if x.dtype != how.dtype:
        row_amaxes = None
    known: dict[str, Any] = {"seeds": seeds, "scale": how.scales(role), "row_amaxes": row_amaxes}
    sides, amaxes = quantize_experts(x.detach().to(how.dtype), spec, tiles, **known)
    how.observe(role, amaxes)
    return sides
