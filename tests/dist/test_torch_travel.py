"""Models that travelled before they are sharded, and what a sharded one says."""

import copy
import pickle

import pytest
import torch

from qshard.recipes import NVFP4, CurrentScaling, DelayedScaling
from qshard.torch_bridge import convert
from support.torch_models import BLOCK_SIZES, linears, losses_of, model_of, shard
from support.torch_ranks import on_ranks


@pytest.mark.parametrize("recipe", [CurrentScaling(), DelayedScaling(), NVFP4()], ids=["current", "delayed", "seeds"])
@on_ranks(2)
def test_copies_are_sharded_and_train_as_the_original(recipe):
    """A copy refreshes the scales of its own weights; one that was loaded does so weight by weight, then together."""
    model = convert(model_of(sizes=BLOCK_SIZES), recipe)
    others = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    assert linears(others[0])[0].weight.scale_state.passes.root is others[0]
    assert linears(others[1])[0].weight.scale_state.passes.root is None
    made = []
    for each in (model, *others):
        shard(each)
        made.append([*losses_of(each, torch.optim.AdamW(each.parameters(), lr=1e-2))])
        if each is not model:
            assert linears(each)[0].weight.to_local().scale_state.passes.root is each
    assert made[2] == made[1] == made[0]


@on_ranks(2)
def test_a_sharded_model_says_that_it_cannot():
    """As FSDP2 has it of any model."""
    model = shard(convert(model_of(), CurrentScaling()))
    with pytest.raises(AssertionError, match=r"FSDP does not support deepcopy. Please use state dict"):
        copy.deepcopy(model)
    with pytest.raises(pickle.PicklingError, match="FSDPSequential"):
        pickle.dumps(model)
