"""Experts of train_torch.py (`--experts`): tokens are sorted by expert, and one call of a layer multiplies them all.

`gpt.py` has the formulas.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qshard.torch_bridge as qshard
from gpt import BALANCE


class Router(nn.Module):
    """Probabilities of experts, in float32."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, experts))

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens [number, width] to [number, experts]."""
        return torch.softmax(x.float() @ self.weight.float(), -1)


class Experts(nn.Module):
    """The bf16 baseline of `qshard.GroupedLinear`, with the same weight names."""

    def __init__(self, experts: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(in_features, out_features, bias=False) for _ in range(experts))

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        """Multiply the tokens of each expert with its weight. `sizes` has the number of tokens of each expert."""
        weights = torch.stack([expert.weight for expert in self.experts]).to(x.dtype)
        return torch._grouped_mm(x, weights.transpose(1, 2), offs=sizes.cumsum(0, dtype=torch.int32))


def group(model: nn.Module) -> None:
    """Replace converted layers of experts by grouped layers, which multiply all experts in one call."""
    for module in [*model.modules()]:
        for name, layer in module.named_children():
            if isinstance(layer, Experts):
                setattr(module, name, qshard.GroupedLinear.of(layer.experts))


def routed(x: Tensor, router: nn.Module, up: nn.Module, down: nn.Module) -> Tensor:
    """Apply to each token [batch, context, width] the MLP of the expert that the router chooses."""
    tokens = x.flatten(0, -2)
    probabilities = router(tokens)
    chosen = probabilities.argmax(-1)
    # Counted on the device, so that nothing waits for a GPU.
    sizes = (chosen[:, None] == torch.arange(probabilities.shape[-1], device=x.device)).sum(0)
    probabilities = _Balanced.apply(probabilities, sizes)
    gate = probabilities.gather(-1, chosen[:, None])
    order = chosen.argsort(stable=True)
    hidden = F.relu(up(tokens.index_select(0, order), sizes)).square()
    y = down(hidden, sizes).index_select(0, order.argsort())
    return (gate * y).to(x.dtype).view_as(x)


class _Balanced(torch.autograd.Function):
    """Returns probabilities unchanged, and adds the gradient of the balancing loss to theirs."""

    @staticmethod
    def forward(ctx: Any, probabilities: Tensor, sizes: Tensor) -> Tensor:
        ctx.save_for_backward(sizes)
        return probabilities.view_as(probabilities)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (sizes,) = ctx.saved_tensors
        number, experts = grad.shape
        return grad + BALANCE * experts * (sizes / number) / number, None
