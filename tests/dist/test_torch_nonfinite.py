"""An infinity in one rank's shard of a weight shows in the loss of every rank."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from qshard.torch_bridge import convert, update_scales
from support import torch_ranks
from support.formats import RECIPES
from support.torch_ranks import run

SHARDED = {name: recipe for name, recipe in RECIPES.items() if recipe.weight.gather_refusal is None}


def shows(recipe):
    torch.manual_seed(0)
    model = convert(nn.Sequential(nn.Linear(64, 64, bias=False)).to(torch_ranks.device), recipe)
    fully_shard(model, mesh=torch_ranks.mesh())
    x = torch.ones(32, 64, device=torch_ranks.device)
    losses = []
    for bad in (False, True):
        if bad and dist.get_rank() == 1:
            with torch.no_grad():
                model[0].weight.to_local()[1, 2] = float("inf")
        update_scales(model)
        losses.append(model(x).square().mean())
        losses[-1].backward()
    assert [bool(loss.isfinite()) for loss in losses] == [True, False]


@pytest.mark.parametrize("recipe", SHARDED.values(), ids=SHARDED)
def test_an_infinity_in_one_shard_shows_on_all_ranks(recipe):
    run(2, shows, recipe=recipe)
