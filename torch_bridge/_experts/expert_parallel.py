"""Operands of grouped products under expert parallelism: rows come from other ranks.

Rows are quantized on the source rank, and codes are sent, in two cases:

- Formats with one scale. Ranks reduce the amax of each expert first. Both planes have the same numbers, so the
  columnwise plane is the transpose of the received one.
- Formats with 1-D blocks and no other scale, if no product reads the columnwise plane: without gradients, and if the
  weights of all local experts are frozen.

Otherwise values are sent, and quantized where they arrive, because blocks along columns join rows of several ranks.
Codes of both planes would be as many bytes as values in bfloat16. Codes and scales are always the same as on one device
that has all experts, and the tokens of rank 0 first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from qshard._core import quantize_steps
from qshard._core.operands import OperandSpec, quantize_rows
from qshard._core.quantize_steps import Plane
from qshard.formats import Usage
from qshard.layout import rows_are_independent
from qshard.recipes import RecipeLike, Role, as_recipe
from qshard.torch_bridge._distributed.token_exchange import ExpertGroup, TokenExchange, expert_group
from qshard.torch_bridge._experts.operands import GroupedOperand
from qshard.torch_bridge._experts.tiles import GroupedRows, Tiles, Transfer, quantize_experts, tiles_of
from qshard.torch_bridge._ops.bind import ops


def exchanged_rows(exchange: TokenExchange, tile_rows: int) -> tuple[GroupedRows, GroupedRows]:
    """Return the padded rows of a product that dispatches activations, and of a product that combines results.

    Between the two products are padded rows.
    """
    tiles, _ = tiles_of(tile_rows, exchange.received, exchange.group_sizes)
    received = place_received(tiles, exchange)
    row = torch.arange(tiles.rows.shape[0], dtype=torch.int32, device=tiles.rows.device)
    of_padding = tiles.rows >= exchange.received
    own = tiles._replace(ends=tiles.stops, rows=row.masked_fill(of_padding, row.shape[0]), place=None)
    first = GroupedRows(received, own, Transfer(exchange, Role.ACTIVATION))
    return first, GroupedRows(own, received, Transfer(exchange, Role.GRADIENT))


def place_received(tiles: Tiles, exchange: TokenExchange) -> Tiles:
    """Return tiles for received rows, from the tiles of rows sorted by expert.

    Received rows are sorted by rank first, so they have no `ends`.
    """
    assert tiles.place is not None
    order = torch.nn.functional.pad(exchange.order, (0, 1), value=exchange.received)
    rows = order.to(torch.int32).index_select(0, tiles.rows)
    return tiles._replace(ends=None, rows=rows, place=tiles.place.index_select(0, exchange.position))


def quantize_dispatched(
    x: Tensor, spec: OperandSpec, tiles: Tiles, exchange: TokenExchange, *, seeds: Tensor | None
) -> dict[Usage, GroupedOperand]:
    """Quantize and dispatch source rows `[M, K]`. Return planes of the padded rows of the local experts."""
    fmt, usage = spec.format, spec.usage
    if usage is Usage.ROWWISE and rows_are_independent(fmt):
        plane = quantize_steps.quantize(ops, x.contiguous(), fmt, usage)[usage]
        received = (None if part is None else _dispatch_part(part, tiles, exchange) for part in plane)
        return {usage: GroupedOperand(fmt, usage, Plane(*received))}
    if not fmt.per_tensor:
        return quantize_experts(exchange.dispatch(x), spec, tiles, seeds=seeds)[0]
    source = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
    rowwise = spec._replace(usage=Usage.ROWWISE)
    planes, _ = quantize_rows(ops, x.contiguous(), rowwise, source, exchange.ends, reduce_max=exchange.reduce_max)
    sent = planes[Usage.ROWWISE]
    codes = _dispatch_part(sent.data, tiles, exchange)
    plane = sent._replace(data=codes, scale_inv=exchange.own(sent.scale_inv).contiguous())
    found = {Usage.ROWWISE: plane}
    if Usage.COLUMNWISE in usage:
        found[Usage.COLUMNWISE] = quantize_steps.transpose_plane(ops, plane, fmt)
    return {each: GroupedOperand(fmt, each, found[each]) for each in usage.planes}


def _dispatch_part(part: Tensor, tiles: Tiles, exchange: TokenExchange) -> Tensor:
    """Dispatch rows of codes or scales, and copy them to padded rows, eight bytes at a time where they fit."""
    received, rows = exchange.dispatch(part, spare=1), tiles.rows
    if received.shape[1] * received.itemsize % torch.int64.itemsize:
        return received.index_select(0, rows)
    return received.view(torch.int64).index_select(0, rows).view(part.dtype)


def local_experts(op: str, num_experts: int, recipe: RecipeLike, ep_group: ExpertGroup | None) -> range:
    """Return the experts of this rank; raise ValueError or NotImplementedError if ranks cannot share them."""
    if ep_group is None:
        return range(num_experts)
    check_parallel_recipe(op, recipe)
    group = expert_group(op, ep_group)
    count, rest = divmod(num_experts, group.size())
    if rest or not count:
        raise ValueError(
            f"{op}: ep_group has {group.size()} ranks, which do not divide num_experts ({num_experts}); pass a group "
            "of as many ranks as divide it"
        )
    return range(group.rank() * count, (group.rank() + 1) * count)


def check_parallel_recipe(op: str, recipe: RecipeLike | None) -> None:
    """Raise NotImplementedError for delayed scaling: its update would merge the amaxes of different experts."""
    if recipe is not None and as_recipe(recipe, op, by_product=False).stateful:
        raise NotImplementedError(
            f"{op}: DelayedScaling is not supported with ep_group, because its update reduces amaxes over ranks that "
            "have different experts; pass CurrentScaling"
        )


class LocalExperts(nn.ModuleList):
    """The layers of the experts of this rank, with the names of their indices among all experts."""

    def __init__(self, layers: Iterable[nn.Module], first: int):
        super().__init__()
        for index, layer in enumerate(layers, first):
            self.add_module(str(index), layer)

    def __getitem__(self, index: Any) -> Any:
        """Return the layer of a local expert, counted from 0."""
        return [*self._modules.values()][index]
