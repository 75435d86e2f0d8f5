"""Recipes by layer under FSDP2 and ZeRO: each layer has the bits that it has alone, in one model of all of them."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from qshard.recipes import MXFP8
from qshard.torch_bridge import Adam, ZeroOptimizer, convert, load_scaling_state, scaling_state, update_scales
from support import torch_ranks
from support.conv1d import Conv1D
from support.torch_ranks import on_ranks

RECIPES = {"0": "DelayedScaling", "1": "BlockScaling", "*.head": None, "3": "CurrentScaling"}
RECIPES["*"] = MXFP8(wgrad="bf16")


class Head(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.head = nn.Linear(size, size)

    def forward(self, x):
        return self.head(x)


def model_of_all():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(128, 256), Conv1D(128, 256), nn.Linear(128, 128, bias=False), Conv1D(128, 128), Head(128)
    ).to(torch_ranks.device)


def trained(model, optimizer, steps=3, first=0):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        x = torch.randn(32, 128, generator=torch.Generator().manual_seed(step)).to(torch_ranks.device)
        model(x).square().mean().backward()
        optimizer.step()
        update_scales(model)
    return model


def values_of(model):
    state = model.state_dict()
    return {name: (v.full_tensor() if isinstance(v, DTensor) else v).detach().clone() for name, v in state.items()}


def assert_equal(got, want):
    assert list(got) == list(want)
    for name, value in want.items():
        assert torch.equal(got[name], value), name


def sharded(model):
    for layer in model:
        fully_shard(layer, mesh=torch_ranks.mesh())
    return fully_shard(model, mesh=torch_ranks.mesh())


@pytest.mark.each_value
@pytest.mark.parametrize("primary", [False, True], ids=["masters", "primary"])
@on_ranks(2, 3)
def test_a_mixed_model_trains_as_on_one_device(primary):
    """All ranks have one batch, and a mean of equal gradients is exact: so are all weights, but over 3 ranks."""
    plain = convert(model_of_all(), RECIPES)
    trained(plain, Adam(plain.parameters(), lr=1e-3))
    model = sharded(convert(model_of_all(), RECIPES, primary=primary))
    assert {type(layer.weight._local_tensor).__name__ for layer in model[:4]} == {"ShardedWeight"}
    optimizer = Adam(model.parameters(), lr=1e-3)
    trained(model, optimizer)
    got, want = values_of(model), values_of(plain)
    if torch_ranks.shape == (2,):
        assert_equal(got, want)
    for name, value in want.items():  # A third of three equal gradients rounds, and Adam divides by their size.
        torch.testing.assert_close(got[name], value, rtol=0, atol=2e-3)
    assert {name.partition(".")[0] for name in scaling_state(model)} == {"0"}


@on_ranks(2)
def test_checkpoints_of_a_mixed_model():
    """They load into a model without recipes, and into one with others; a run that goes on has its bits."""
    model = sharded(convert(model_of_all(), RECIPES))
    trained(model, torch.optim.SGD(model.parameters(), lr=0.1))
    values, scales = values_of(model), {name: v.clone() for name, v in scaling_state(model).items()}
    other = model_of_all()
    other.load_state_dict(values)
    convert(other, {"0": "DelayedScaling", "*": "CurrentScaling"})
    assert_equal(values_of(other), values)
    again = convert(model_of_all(), RECIPES)
    again.load_state_dict(values)
    load_scaling_state(again, scales)
    trained(again, torch.optim.SGD(again.parameters(), lr=0.1), first=3)
    trained(model, torch.optim.SGD(model.parameters(), lr=0.1), first=3)
    assert_equal(values_of(model), values_of(again))


@pytest.mark.parametrize("shard_weights", [False, True])
@on_ranks(2)
def test_a_mixed_model_under_zero(shard_weights):
    plain = convert(model_of_all(), RECIPES)
    trained(
        plain,
        ZeroOptimizer(
            plain,
            lr=1e-3,
            group=torch.distributed.new_group([torch.distributed.get_rank()], use_local_synchronization=True),
        ),
    )
    model = convert(model_of_all(), RECIPES)
    trained(model, ZeroOptimizer(model, lr=1e-3, shard_weights=shard_weights))
    x = torch.randn(8, 128, generator=torch.Generator().manual_seed(9)).to(torch_ranks.device)
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
