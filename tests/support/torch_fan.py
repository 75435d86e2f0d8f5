"""Layers that share x, and what goes forward and backward through them: for tests of what is saved."""

import pytest
import torch
from torch import nn

from qshard.recipes import CurrentScaling
from qshard.torch_bridge import convert
from qshard.torch_bridge._nn.module_calls import follow_calls, running
from support.formats import RECIPES

WIDTH = 64
RECIPE = CurrentScaling()
every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


class Fan(nn.Module):
    """Layers that share x."""

    def __init__(self, count=3, width=WIDTH, frozen=()):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))
        for i in frozen:
            self.layers[i].weight.requires_grad_(False)

    def forward(self, x, apart=False):
        return [layer(x * 1 if apart else x) for layer in self.layers]


def fan(recipe, **options):
    torch.manual_seed(0)
    return convert(Fan(**options), recipe)


def seeded(model, recipe):
    """Another model of the same values, which draws the random numbers that the last call of `model` has drawn."""
    other = fan(recipe, count=len(model.layers))
    for ours, theirs in zip(model.layers, other.layers, strict=True):
        if ours.seed is not None:
            theirs.seed.copy_(ours.seed)
            theirs.seed[0] -= 1
    return other


def batch(rows=40, seed=1, **options):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed), **options)


def casts(ops):
    """How often something was quantized."""
    return sum(name.startswith(("qshard.cast", "qshard.quantize")) for name in ops)


class Outer(nn.Module):
    """A module that runs a function, as `forward` of a converted one."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        follow_calls(self)

    def forward(self, function):
        return function()


during_a_call = Outer()


def remembered():
    (call,) = running()
    return call.codes


def gradients(model, ys, xs):
    torch.manual_seed(2)
    loss = sum((y.float() * torch.randn_like(y, dtype=torch.float32)).sum() for y in ys)
    loss.backward()
    return [*ys, *(x.grad for x in xs), *(p.grad for p in model.parameters() if p.requires_grad)]


def assert_equal(got, want):
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
