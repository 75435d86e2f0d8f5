"""Linear layers as users have them, and what tests of converted ones share."""

import copy

import torch
from torch import nn


class Named(nn.Linear):
    """As of libraries: other arguments, states, methods, and `forward` of nn.Linear."""

    def __init__(self, size, name):
        super().__init__(size, size, bias=False)
        self.name, self.resets = name, 0
        self.register_buffer("own", torch.arange(3.0), persistent=False)

    def init_weights(self):
        nn.init.constant_(self.weight, 0.5)

    def reset_parameters(self):
        super().reset_parameters()
        self.resets = getattr(self, "resets", 0) + 1

    def extra_repr(self):
        return f"name={self.name}, {super().extra_repr()}"


def x_of(rows=32, columns=32, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def value(weight):
    return weight.detach() + 0


def plain_copy(model):
    """The same layers, not converted, beside ones that are."""
    return copy.deepcopy(model)
