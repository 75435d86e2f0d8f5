"""Mixture of experts of the model in `step_torch.py`: as in torchtitan, and as a layer of qshard with its weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qshard.torch_bridge as qshard
from model_shapes import Shape
from qshard.recipes import Recipe


class Experts(nn.Module):
    """Experts in 3-D parameters, with the forward pass of torchtitan's `GroupedExperts`, which `convert` knows."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Parameter(torch.empty(shape.experts, shape.ffn, shape.width)) for _ in range(2))
        self.w2 = nn.Parameter(torch.empty(shape.experts, shape.width, shape.ffn))

    def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        return torch._grouped_mm(A, B_t, offs=offs)

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        """Apply expert e to `sizes[e]` rows of `x`, which are sorted by expert."""
        offs = sizes.cumsum(0, dtype=torch.int32)
        h = F.silu(self._grouped_mm(A=x, B_t=self.w1.transpose(1, 2), offs=offs))
        h = h * self._grouped_mm(A=x, B_t=self.w3.transpose(1, 2), offs=offs)
        return self._grouped_mm(A=h, B_t=self.w2.transpose(1, 2), offs=offs)


class Mixture(nn.Module):
    """A router and `Experts`, with PyTorch's own sorting and indexing of tokens."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, self.experts = shape, Experts(shape)
        self.router = nn.Linear(shape.width, shape.experts, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        tokens, k = x.flatten(0, -2), self.shape.top_k
        scores, indices = F.softmax(self.router(tokens), dim=-1, dtype=torch.float32).topk(k, -1)
        scores = (scores / scores.sum(-1, keepdim=True)).flatten()
        order = indices.flatten().argsort(stable=True)
        sizes = torch.histc(indices.float(), self.shape.experts, 0, self.shape.experts - 1)
        y = self.experts(tokens[order // k], sizes)
        y = (y.float() * scores[order][:, None]).to(x.dtype)
        return torch.zeros_like(tokens).index_add(0, order // k, y).view_as(x)

    def fused(self, recipe: Recipe) -> qshard.MoE:
        """Return the same layer as a module of qshard, with the weights of this one."""
        shape, made = self.shape, {"stacked": True, "device": self.router.weight.device}
        layer = qshard.MoE(shape.width, shape.ffn, num_experts=shape.experts, top_k=shape.top_k, recipe=recipe, **made)
        own = self.experts
        with torch.no_grad():
            layer.router.weight.copy_(self.router.weight)
            (w13,), (w2,) = layer.w13.weights, layer.w2.weights
            w13.copy_(torch.cat([own.w1, own.w3], 1))
            w2.copy_(own.w2)
        return layer
