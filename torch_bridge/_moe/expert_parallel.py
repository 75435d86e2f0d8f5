"""The MLP of experts that ranks share: each rank has its own tokens, and other experts than the other ranks.

    rows by expert  --w13-->  gate, up  --SwiGLU-->  h  --w2-->  y
              dispatch                                  combine

Forward dispatches rows of tokens and combines rows of y; backward dispatches gradients of y and combines gradients of
rows. Formats with one scale for each expert dispatch codes (`_experts/expert_parallel.py`). Results are combined as
values.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from qshard.recipes import Recipe, RecipeLike, as_recipe
from qshard.torch_bridge._distributed.token_exchange import TokenExchange
from qshard.torch_bridge._experts.expert_parallel import exchanged_rows
from qshard.torch_bridge._experts.tiles import unit_of
from qshard.torch_bridge._ops.autograd_node import Node, apply_node
from qshard.torch_bridge._torch_internals import active_ddp


def check_parallel_recipe(op: str, recipe: RecipeLike | None) -> None:
    """Raise NotImplementedError for delayed scaling: its update would merge the amaxes of different experts."""
    if recipe is not None and as_recipe(recipe, op).stateful:
        raise NotImplementedError(
            f"{op}: DelayedScaling is not supported with ep_group, because its update reduces amaxes over ranks that "
            "have different experts; pass CurrentScaling"
        )


def local_experts(num_experts: int, group: dist.ProcessGroup, recipe: RecipeLike) -> range:
    """Return the experts of this rank; raise ValueError or NotImplementedError if ranks cannot share them."""
    check_parallel_recipe("MoE", recipe)
    count, rest = divmod(num_experts, group.size())
    if rest or not count:
        raise ValueError(
            f"MoE: ep_group has {group.size()} ranks, which do not divide num_experts ({num_experts}); pass a group of "
            "as many ranks as divide it"
        )
    return range(group.rank() * count, (group.rank() + 1) * count)


def check_not_averaged(weights: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Raise ValueError if the DistributedDataParallel in its forward pass averages weights over ranks of `group`.

    Such ranks have different experts. DistributedDataParallel has overwritten them by the experts of its first rank.
    """
    ddp = active_ddp()
    if ddp is None:
        return
    averaged = _AVERAGED.get(ddp)
    if averaged is None:
        ignored = ddp.parameters_to_ignore
        averaged = {id(own): name for name, own in ddp.module.named_parameters() if name not in ignored}
        _AVERAGED[ddp] = averaged
    names = [averaged[id(weight)] for weight in weights if id(weight) in averaged]
    ranks = {*dist.get_process_group_ranks(ddp.process_group)} & {*dist.get_process_group_ranks(group)}
    if names and len(ranks) > 1:
        raise ValueError(
            f"grouped_mlp: DistributedDataParallel averages {names[0]} over {len(ranks)} ranks that have different "
            "experts; build the model again, and use FSDP2, or exclude experts with "
            "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)"
        )


_AVERAGED: weakref.WeakKeyDictionary[Any, dict[int, str]] = weakref.WeakKeyDictionary()
"""The names of the parameters that a DistributedDataParallel averages, by id."""


@torch.compiler.disable
def parallel_experts(
    rows: Tensor,
    group_sizes: Tensor,
    recipes: tuple[Recipe, Recipe] | None,
    w13: Callable[[Tensor, Any], Tensor],
    w2: Callable[[Tensor, Any], Tensor],
    activation: Callable[[Tensor], Tensor],
    group: dist.ProcessGroup,
    weights: Iterable[Tensor],
    facts: Hashable,
) -> Tensor:
    """Apply the experts of all ranks of `group` to rows sorted by expert. `group_sizes` counts all experts, `[E]`."""
    check_not_averaged(weights, group)
    exchange = TokenExchange(group_sizes, rows.shape[0], group, (rows.shape[1], facts))
    if recipes is None:
        sizes = exchange.group_sizes
        y = w2(activation(w13(apply_node(_Dispatch, rows, exchange), sizes)), sizes)
        combined: Tensor = apply_node(_Combine, y, exchange)
        return combined
    first, second = exchanged_rows(exchange, unit_of(*recipes))
    return w2(activation(w13(rows, first)), second)


class _Dispatch(Node):
    """Source rows to rows of the local experts, sorted by expert."""

    op, degree = "grouped_mlp", 1
    instead = "use the collectives of torch.distributed.nn"

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: TokenExchange) -> tuple[Tensor, list[Tensor]]:
        ctx.exchange = exchange
        return exchange.dispatch(x).index_select(0, exchange.order), []

    @staticmethod
    def gradients(ctx: Any, saved: list[Tensor], grad: Tensor) -> tuple[Tensor | None, ...]:
        exchange: TokenExchange = ctx.exchange
        return exchange.combine(grad.index_select(0, exchange.position)), None


class _Combine(Node):
    """Rows of the local experts, sorted by expert, to source rows."""

    op, degree = "grouped_mlp", 1
    instead = "use the collectives of torch.distributed.nn"

    @staticmethod
    def forward(ctx: Any, y: Tensor, exchange: TokenExchange) -> tuple[Tensor, list[Tensor]]:
        ctx.exchange = exchange
        return exchange.combine(y.index_select(0, exchange.position)), []

    @staticmethod
    def gradients(ctx: Any, saved: list[Tensor], grad: Tensor) -> tuple[Tensor | None, ...]:
        exchange: TokenExchange = ctx.exchange
        return exchange.dispatch(grad).index_select(0, exchange.order), None
