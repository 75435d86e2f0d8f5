"""The MLP of experts that ranks share: each rank has its own tokens, and other experts than the other ranks.

    rows by expert  --w13-->  gate, up  --SwiGLU-->  h  --w2-->  y
              dispatch                                  combine

Forward dispatches rows of tokens and combines rows of y; backward dispatches gradients of y and combines gradients of
rows. `_experts/expert_parallel.py` says when codes are dispatched. Results are combined as values.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from qshard.recipes import Recipe
from qshard.torch_bridge._distributed.token_exchange import TokenExchange
from qshard.torch_bridge._experts.expert_parallel import check_parallel_recipe, exchanged_rows
from qshard.torch_bridge._experts.tiles import tile_rows_of
from qshard.torch_bridge._moe.wrappers import check_wrappers
from qshard.torch_bridge._ops.autograd_node import Node, apply_node


@torch.compiler.disable
def parallel_experts(
    rows: Tensor,
    group_sizes: Tensor,
    recipes: tuple[Recipe, Recipe] | None,
    w13: Callable[[Tensor, Any], Tensor],
    w2: Callable[[Tensor, Any], Tensor],
    activation: Callable[[Tensor], Tensor],
    group: dist.ProcessGroup,
    weights: Sequence[Sequence[Tensor]],
    facts: Hashable,
) -> Tensor:
    """Apply the experts of all ranks of `group` to rows sorted by expert. `group_sizes` counts all experts, `[E]`.

    `weights` are the weights of both products. Ranks must agree on `facts`, and on what needs a gradient, because that
    decides which exchanges there are, and of what.
    """
    for recipe in recipes or ():
        check_parallel_recipe("MoE", recipe)  # Again, because `convert` changes recipes.
    check_wrappers(itertools.chain(*weights), group, group_sizes.shape[0])
    learns = [any(weight.requires_grad for weight in of_product) for of_product in weights]
    gradients = (rows.requires_grad, *learns) if torch.is_grad_enabled() else ()
    exchange = TokenExchange(group_sizes, rows.shape[0], group, (rows.shape[1], facts, ("gradients", gradients)))
    if recipes is None:
        sizes = exchange.group_sizes
        y = w2(activation(w13(apply_node(_Dispatch, rows, exchange), sizes)), sizes)
        combined: Tensor = apply_node(_Combine, y, exchange)
        return combined
    first, second = exchanged_rows(exchange, tile_rows_of(rows.device, *recipes))
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


class SumGradient(Node):
    """A parameter that all ranks have and use for different rows: its gradient is the sum over the ranks."""

    op, degree = "grouped_mlp", 1
    instead = "use the collectives of torch.distributed.nn"

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, list[Tensor]]:
        ctx.group = group
        return parameter.view_as(parameter), []

    @staticmethod
    def gradients(ctx: Any, saved: list[Tensor], grad: Tensor) -> tuple[Tensor | None, ...]:
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
