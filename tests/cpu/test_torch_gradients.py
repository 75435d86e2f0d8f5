"""Gradients of a model of `Linear` are as far from those in high precision as rounding takes them, and no farther.

The same model is run with the reference's codes, multiplied in float32. It has every rounding that the formats have
and nothing else, so the distance of its gradients from exact ones is what rounding costs.
"""

import copy
import itertools

import numpy as np
import pytest
import torch
from torch import nn

from qshard import reference
from qshard.formats import Usage
from qshard.recipes import NVFP4, ROLE_SEEDS, CurrentScaling, Role
from qshard.torch_bridge import Linear, convert
from support.formats import RECIPES, STATELESS

ROWS, COLUMNS = Usage.ROWWISE, Usage.COLUMNWISE
every_recipe = pytest.mark.parametrize("name", sorted(set(RECIPES) & set(STATELESS)))


class Reference(torch.autograd.Function):
    """The three products of a layer, from the reference's planes."""

    @staticmethod
    def forward(ctx, x, w, recipe, seed):
        ctx.x, ctx.w, ctx.recipe, ctx.seed = x, w, recipe, seed
        return product(values(x, recipe, Role.ACTIVATION, ROWS, seed), values(w, recipe, Role.WEIGHT, ROWS, seed).T)

    @staticmethod
    def backward(ctx, dy):
        of = {(role, usage): values(t, ctx.recipe, role, usage, ctx.seed) for t, role, usage in (
            (dy, Role.GRADIENT, ROWS), (dy, Role.GRADIENT, COLUMNS),
            (ctx.w, Role.WEIGHT, COLUMNS), (ctx.x, Role.ACTIVATION, COLUMNS),
        )}  # fmt: skip
        dx = product(of[Role.GRADIENT, ROWS], of[Role.WEIGHT, COLUMNS])
        return dx, product(of[Role.GRADIENT, COLUMNS].T, of[Role.ACTIVATION, COLUMNS]), None, None


def values(t, recipe, role, usage, seed):
    q = reference.quantize(t.detach().numpy(), recipe.format(role), usage, seed=seed ^ ROLE_SEEDS[role])
    return q.dequantize(np.float32, usage=usage)


def product(a, b):
    return torch.mm(*(torch.from_numpy(np.ascontiguousarray(t)) for t in (a, b)))


class ReferenceLinear(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.weight, self.recipe = nn.Parameter(layer.weight.shard.clone()), layer.recipe
        low, high = (0, 0) if layer.seed is None else (int(word) % 2**32 for word in layer.seed)
        self.seed = high << 32 | low

    def forward(self, x):
        return Reference.apply(x, self.weight, self.recipe, self.seed)


def model_of():
    torch.manual_seed(0)
    sizes = (128, 256, 256, 128)
    layers = [nn.Linear(*pair, bias=False) for pair in itertools.pairwise(sizes)]
    return nn.Sequential(layers[0], nn.GELU(), layers[1], nn.GELU(), layers[2])


def gradients(model):
    generator = torch.Generator().manual_seed(1)
    x, target = torch.randn(2, 256, 128, generator=generator)
    (model(x) - target).square().mean().backward()
    return [layer.weight.grad for layer in model if hasattr(layer, "weight")]


def distances(gradients, others):
    return [((a - b).norm() / b.norm()).item() for a, b in zip(gradients, others, strict=True)]


@every_recipe
def test_gradients_are_off_by_rounding_alone(name):
    """What may be left is the order of sums, and codes that it tips over: less than a fiftieth of what codes cost.

    With MKL nothing is left: the gradients are the same bits.
    """
    exact = gradients(model_of())
    model = convert(model_of(), RECIPES[name])
    rounded = copy.deepcopy(nn.Sequential(*(ReferenceLinear(m) if isinstance(m, Linear) else m for m in model)))
    ours, rounded = gradients(model), gradients(rounded)
    for beyond, by_rounding in zip(distances(ours, rounded), distances(rounded, exact), strict=True):
        assert beyond < by_rounding / 50


@pytest.mark.parametrize(("recipe", "least", "most"), [(CurrentScaling(), 0.05, 0.07), (NVFP4(), 0.15, 0.3)], ids=str)
def test_one_layer_is_off_by_the_roundings_of_both_operands(recipe, least, most):
    """The errors of x and dy are independent, so dw is off by the root of the sum of their squares."""
    torch.manual_seed(0)
    x, dy = torch.randn(2, 1024, 128)
    layer = Linear(128, 128, bias=False, recipe=recipe)
    layer(x).backward(dy)
    (found,) = distances([layer.weight.grad], [dy.T @ x])
    errors = []
    for t, role in ((x, Role.ACTIVATION), (dy, Role.GRADIENT)):
        fmt = recipe.format(role).with_options(hadamard=False) if recipe.format(role).hadamard else recipe.format(role)
        q = reference.quantize(t.T.contiguous().numpy(), fmt, ROWS, seed=7).dequantize(np.float32)
        errors.append(np.linalg.norm(q - t.T.numpy()) / np.linalg.norm(t.numpy()))
    assert found == pytest.approx(np.hypot(*errors), rel=0.05)
    assert least < found < most
