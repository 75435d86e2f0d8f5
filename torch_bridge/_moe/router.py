"""Token-choice routing: the experts of each token, and their weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qshard._core.layers import ScoreFunction, check_scores
from qshard.torch_bridge._quantized.validation import check_tensor


def topk_routing(
    logits: Tensor,
    top_k: int,
    *,
    score_function: ScoreFunction = "softmax",
    normalize: bool = True,
    scale: float = 1.0,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose `top_k` experts for each token, and compute their weights in fp32. Differentiable.

    | model | arguments |
    | --- | --- |
    | Mixtral, gpt-oss, Qwen3-MoE | the defaults: softmax of the `top_k` largest logits |
    | DeepSeek-V3 | `score_function="sigmoid"`, `scale=2.5`, `bias` |

    Args:
      logits: float32, bfloat16 or float16 `[..., E]`, the output of the router.
      top_k: number of experts of each token, at most E.
      score_function: "softmax" over all experts, or "sigmoid" of each.
      normalize: divide the chosen scores by their sum.
      scale: factor of the weights, after `normalize`.
      bias: `[E]`, added to the scores for the choice only, as in load balancing without an auxiliary loss. It gets no
        gradient.

    Returns:
      indices: int64 `[..., top_k]`, by falling score.
      weights: float32 `[..., top_k]`, with gradients of `logits`.

    Raises:
      TypeError: `logits` is not a tensor of such a dtype.
      ValueError: `top_k` or `score_function` is out of range, or `bias` does not fit.

    >>> indices, weights = topk_routing(torch.tensor([[1.0, 3.0, 2.0, 0.0]]), 2)
    >>> indices, weights
    (tensor([[1, 2]]), tensor([[0.7311, 0.2689]]))

    Sources: arXiv:2401.04088 (Mixtral); arXiv:2412.19437 (DeepSeek-V3).
    """
    check_tensor("topk_routing", "logits", logits)
    check_scores(tuple(logits.shape), top_k, score_function, None if bias is None else tuple(bias.shape))
    scores = logits.float().softmax(-1) if score_function == "softmax" else logits.float().sigmoid()
    indices = (scores.detach() if bias is None else scores.detach() + bias.detach().float()).topk(top_k, -1).indices
    weights = scores.gather(-1, indices)
    if normalize:
        # Sigmoids may all be 0 in fp32.
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    return indices, weights * scale


class Router(nn.Module):
    """The linear layer of a router. It is not an `nn.Linear`, because `convert` must not quantize it."""

    def __init__(self, num_experts: int, hidden_size: int, *, device: Any, dtype: torch.dtype | None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, device=device, dtype=dtype))
        nn.init.normal_(self.weight, std=hidden_size**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of each token."""
        return nn.functional.linear(x, self.weight)
