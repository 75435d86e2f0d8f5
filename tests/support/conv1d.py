"""Layers as GPT-2 of Hugging Face's transformers has them, for tests without that package."""

import torch
from torch import nn


class Conv1D(nn.Module):
    """As `transformers.pytorch_utils.Conv1D`: the same attributes, shapes and call."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.nx = nx
        self.weight = nn.Parameter(torch.empty(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))
        nn.init.normal_(self.weight, std=0.02)

    def __repr__(self):
        return f"Conv1D(nf={self.nf}, nx={self.nx})"

    def forward(self, x):
        size_out = (*x.size()[:-1], self.nf)
        x = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return x.view(size_out)


def gpt2_mlp(size=64):
    return nn.Sequential(Conv1D(2 * size, size), nn.GELU(), Conv1D(size, 2 * size))


def as_linears(model):
    """The same function with an `nn.Linear` for each `Conv1D`."""
    made = []
    for layer in model:
        if isinstance(layer, Conv1D):
            linear = nn.Linear(*layer.weight.shape)
            linear.weight.data.copy_(layer.weight.detach().t())
            linear.bias.data.copy_(layer.bias.detach())
            layer = linear
        made.append(layer)
    return nn.Sequential(*made)
