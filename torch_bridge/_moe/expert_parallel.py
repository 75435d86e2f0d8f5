"""The MLP of experts that ranks share: each rank has its own tokens, and other experts than the other ranks.

    rows by expert  --w13-->  gate, up  --SwiGLU-->  h  --w2-->  y
              dispatch                                  combine

Forward dispatches rows of tokens and combines rows of y; backward dispatches gradients of y and combines gradients of
rows. What is dispatched are codes, in formats with one scale for each expert (`_experts/expert_parallel.py`). What is
combined is never quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from qshard.recipes import RecipeLike, Role, as_recipe
from qshard.torch_bridge._distributed.token_exchange import TokenExchange
from qshard.torch_bridge._experts.expert_parallel import Transfer
from qshard.torch_bridge._nn.activations import swiglu_gate_up
from qshard.torch_bridge._ops.autograd_node import Node, apply_node

Product = Callable[[Tensor, Tensor, Transfer | None], Tensor]
"""A grouped product. Arguments: rows sorted by expert, the number for each expert, and the exchange of rows, if any."""


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


@torch.compiler.disable
def parallel_experts(
    rows: Tensor, group_sizes: Tensor, w13: Product, w2: Product, group: dist.ProcessGroup, facts: Hashable
) -> Tensor:
    """Apply the experts of all ranks of `group` to rows sorted by expert. `group_sizes` counts all experts, `[E]`."""
    exchange = TokenExchange(group_sizes, rows.shape[0], group, (rows.shape[1], facts))
    gate_up = w13(rows, exchange.group_sizes, Transfer(exchange, Role.ACTIVATION))
    return w2(swiglu_gate_up(gate_up), exchange.group_sizes, Transfer(exchange, Role.GRADIENT))


def value_product(
    x: Tensor, weights: Sequence[Tensor] | Tensor, group_sizes: Tensor, layout: str, transfer: Transfer | None
) -> Tensor:
    """Multiply rows by the weight of their expert, without quantization; rows of no expert by the last weight."""
    w = weights if isinstance(weights, Tensor) else torch.stack([*weights])
    if transfer is not None and transfer.role is Role.ACTIVATION:
        x = apply_node(_Dispatch, x, transfer.exchange)
    ends = group_sizes.cumsum(0, dtype=torch.int32)
    # `_grouped_mm` does not write rows after the last group, and writing zeros there would take another pass.
    ends[-1] = x.shape[0]
    y: Tensor = torch._grouped_mm(x, (w.transpose(1, 2) if layout == "NK" else w).to(x.dtype), offs=ends)
    if transfer is not None and transfer.role is Role.GRADIENT:
        y = apply_node(_Combine, y, transfer.exchange)
    return y


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
