"""Moves of converted models between a CPU and a GPU: a moved model has the bits of one that was there."""

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from qshard.torch_bridge import GroupedLinear, ZeroOptimizer, convert  # noqa: E402
from support.formats import RECIPES  # noqa: E402

WIDTH = 64


class Model(nn.Module):
    """Two linear layers and two experts, converted on `device`."""

    def __init__(self, recipe, device):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        convert(self.to(device), recipe)
        self.experts = GroupedLinear.of(self.experts)

    def forward(self, x):
        return self.experts(self.layers(x), torch.tensor([24, 40]))


def results(model):
    """The output of a step and its gradients, for the same random numbers. Delayed scales start from this step."""
    for module in model.modules():
        if getattr(module, "seed", None) is not None:
            module.seed.copy_(torch.tensor([3, 4], dtype=torch.int32))
    first = next(model.parameters())
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1)).to(first.device, first.dtype)
    y = model(x)
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), list(model.parameters()))]


def assert_same(model, other):
    for mine, its in zip(results(model), results(other), strict=True):
        assert mine.device == its.device
        assert torch.equal(mine, its)


@pytest.mark.parametrize("name", RECIPES)
def test_a_moved_model_has_the_bits_of_one_that_was_there(name):
    recipe = RECIPES[name]
    there = Model(recipe, "cuda")
    assert_same(Model(recipe, "cpu").cuda(), there)
    assert_same(Model(recipe, "cuda").cpu(), Model(recipe, "cpu"))
    assert_same(copy.deepcopy(there).cpu().cuda(), there)
    assert_same(Model(recipe, "cpu").to("cuda", torch.bfloat16), copy.deepcopy(there).bfloat16())


def test_a_model_that_zero_trains_does_not_move():
    model = Model("CurrentScaling", "cuda")
    ZeroOptimizer(model, lr=1e-3)
    with pytest.raises(RuntimeError, match="cannot be moved after the optimizer was made"):
        model.cpu()
    assert all(parameter.is_cuda for parameter in model.parameters())
