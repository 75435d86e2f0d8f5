"""`MoE`: a mixture-of-experts layer, with the router, the experts and an optional shared expert."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from qshard._core.layers import ScoreFunction, check_scores
from qshard.recipes import RecipeLike
from qshard.torch_bridge._distributed.token_exchange import ExpertGroup, expert_group
from qshard.torch_bridge._experts.expert_parallel import local_experts
from qshard.torch_bridge._experts.layer import GroupedLinear
from qshard.torch_bridge._moe.grouped_mlp import apply_experts
from qshard.torch_bridge._moe.router import Router, topk_routing
from qshard.torch_bridge._nn.activations import swiglu_gate_up
from qshard.torch_bridge._nn.linear import Linear
from qshard.torch_bridge._nn.module_calls import has_hooks
from qshard.torch_bridge._ops.eager import is_compiling


class MoE(nn.Module):
    """A mixture-of-experts layer in place of an MLP: `topk_routing` and `grouped_mlp`, with parameters.

    Args:
      hidden_size: H, the width of tokens.
      intermediate_size: I, the width of each expert between its products.
      num_experts: E.
      top_k: number of experts of each token.
      recipe: the format of each role, or its name, for the products of experts. The router is not quantized.
      score_function: as for `topk_routing`.
      normalize: as for `topk_routing`.
      scale: as for `topk_routing`.
      expert_bias: add a buffer `expert_bias` to the scores for the choice of experts, as in load balancing without an
        auxiliary loss. It starts as zeros, and the training loop updates it.
      shared_intermediate_size: I of a shared expert, which takes every token with weight 1; None for no such expert.
      stacked: hold the weights of all experts in one parameter, as in `GroupedLinear`.
      ep_group: expert parallelism: the ranks that share the experts, as for `grouped_mlp`. Rank r of R has the weights
        of experts `r * E / R` to `(r + 1) * E / R`; other parameters are the same on all ranks.

    Attributes:
      router: the linear layer of the logits, with `weight` `[E, H]`. `convert` leaves it in high precision.
      w13: a `GroupedLinear` with the weights of gate and up, `[2 I, H]` per local expert.
      w2: a `GroupedLinear`, `[H, I]` per local expert.
      shared: an `nn.ModuleDict` with the layers "w13" and "w2" of the shared expert; None without one.

    Raises:
      ValueError: as for `topk_routing` and `Linear`, or the ranks of `ep_group` do not divide `num_experts`.
      NotImplementedError: as for `grouped_mlp`.

    FSDP2 and ZeRO gather codes, as for `GroupedLinear`. Every parameter gets a gradient in every step, so
    DistributedDataParallel needs no search for unused parameters.

    >>> layer = MoE(32, 64, num_experts=4, top_k=2, recipe="CurrentScaling")
    >>> y, logits = layer(torch.ones(3, 5, 32), return_router_logits=True)
    >>> y.shape, logits.shape
    (torch.Size([3, 5, 32]), torch.Size([3, 5, 4]))

    Sources: arXiv:2401.04088 (Mixtral); arXiv:2412.19437 (DeepSeek-V3); torchtitan (`MoE`).
    """

    expert_bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        num_experts: int,
        top_k: int,
        recipe: RecipeLike,
        score_function: ScoreFunction = "softmax",
        normalize: bool = True,
        scale: float = 1.0,
        expert_bias: bool = False,
        shared_intermediate_size: int | None = None,
        stacked: bool = False,
        ep_group: ExpertGroup | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.ep_group = None if ep_group is None else expert_group("MoE", ep_group)
        local_experts("MoE", num_experts, recipe, ep_group)
        experts: dict[str, Any] = {"recipe": recipe, "ep_group": ep_group, "stacked": stacked, **made}
        self.w13 = GroupedLinear(num_experts, hidden_size, 2 * intermediate_size, **experts)
        self.w2 = GroupedLinear(num_experts, intermediate_size, hidden_size, **experts)
        check_scores((num_experts,), top_k, score_function, None)
        self.num_experts, self.top_k = num_experts, top_k
        self.score_function, self.normalize, self.scale = score_function, normalize, scale
        self.router = Router(num_experts, hidden_size, **made)
        bias = torch.zeros(num_experts, dtype=torch.float32, device=device) if expert_bias else None
        self.register_buffer("expert_bias", bias)
        self.shared: nn.ModuleDict | None = None
        if shared_intermediate_size is not None:
            layer: dict[str, Any] = {"bias": False, "recipe": recipe, **made}
            w13 = Linear(hidden_size, 2 * shared_intermediate_size, **layer)
            w2 = Linear(shared_intermediate_size, hidden_size, **layer)
            self.shared = nn.ModuleDict({"w13": w13, "w2": w2})

    @overload
    def forward(self, x: Tensor, return_router_logits: Literal[False] = False) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, return_router_logits: Literal[True]) -> tuple[Tensor, Tensor]: ...
    def forward(self, x: Tensor, return_router_logits: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Apply the experts of each token of `x` `[..., H]`. Optionally also return the logits, `[..., E]`."""
        logits = self.router(x)
        options: dict[str, Any] = {"score_function": self.score_function, "normalize": self.normalize}
        indices, weights = topk_routing(logits, self.top_k, scale=self.scale, bias=self.expert_bias, **options)
        first, recipe = self.w13.layer_of_experts, self.w2.layer_of_experts.recipe
        assert first.recipe is not None
        assert recipe is not None
        facts = (tuple(first.weight.shape[-2:]), x.dtype, first.recipe, recipe)
        local: list[list[Tensor]] = []
        if self.ep_group is not None:  # Not `parameters()`: under FSDP1 weights are no parameters, but views of one.
            local = [product.weights for product in (self.w13, self.w2)]
        modules = (self.w13, self.w13.experts, self.w2, self.w2.experts) if is_compiling() else ()
        fuses = not any([has_hooks(module) for module in modules])  # noqa: C419  # Dynamo traces no generator here.
        how: dict[str, Any] = {"fuses": fuses, "group": self.ep_group, "local": local, "facts": facts}
        y = apply_experts(x, indices, weights, self.num_experts, (first.recipe, recipe), self.w13, self.w2, **how)
        if self.shared is not None:
            y = y + self.shared["w2"](swiglu_gate_up(self.shared["w13"](x)))
        return (y, logits) if return_router_logits else y

    def extra_repr(self) -> str:
        """Show the routing options."""
        return f"top_k={self.top_k}, score_function={self.score_function!r}, normalize={self.normalize}"
