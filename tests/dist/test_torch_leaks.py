"""A model that nobody holds is gone, with its memory: tensors keep none alive, as they would never be freed."""

import gc
import weakref

import pytest
from torch import nn

from qshard.recipes import CurrentScaling, DelayedScaling
from qshard.torch_bridge import AdamW, ZeroOptimizer, convert, update_scales
from support import torch_ranks
from support.torch_models import batch, shard
from support.torch_ranks import on_ranks


def train(recipe, kind):
    """A weak reference to the model, and to the memory of a weight."""
    model = nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Linear(32, 20)).to(torch_ranks.device)
    convert(model, recipe, primary=kind == "primary")
    if kind == "zero":
        optimizer = ZeroOptimizer(model, lr=1e-3, shard_weights=True)
    else:
        optimizer = AdamW(shard(model).parameters(), lr=1e-3)
    for step in range(2):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if kind != "zero":
            update_scales(model)
    states = [weakref.ref(value) for value in optimizer.state[next(iter(optimizer.state))].values()]
    for layer in (model[0], model[2]) if kind == "primary" else ():
        states.append(weakref.ref(layer.weight.to_local().scale_state.primary.master))
    return [weakref.ref(model), *(weakref.ref(layer.weight) for layer in (model[0], model[2])), *states]


@on_ranks(2)
@pytest.mark.parametrize("recipe", [CurrentScaling(), DelayedScaling()], ids=["current", "delayed"])
@pytest.mark.parametrize("kind", ["shard", "primary", "zero"])
def test_nothing_outlives_a_model(recipe, kind):
    found = train(recipe, kind)
    gc.collect()
    assert [ref() for ref in found] == [None] * len(found)
