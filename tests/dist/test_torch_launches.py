"""What `update_scales` costs does not grow with the model, whatever its weights are cut into."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode

from qshard.recipes import MXFP8, NVFP4, BlockScaling, CurrentScaling
from qshard.torch_bridge import convert, update_scales
from support import torch_ranks
from support.torch_models import assert_gathers_the_whole, shard
from support.torch_ranks import run

RECIPES = [CurrentScaling(), BlockScaling(), MXFP8(), NVFP4()]


class Launches(TorchDispatchMode):
    """The names of ops that compute: all but views, allocations and collectives."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_view = any(result.alias_info is not None for result in func._schema.returns) and not func._schema.is_mutable
        if not is_view and func.namespace in ("aten", "qshard") and "empty" not in str(func):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def launches_of(recipe, layers, dtypes):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 96, bias=False, dtype=dtypes[i % len(dtypes)]) for i in range(layers))).to(
        torch_ranks.device
    )
    shard(convert(model, recipe))
    update_scales(model)  # Plans are made.
    with Launches() as launches, torch.no_grad():
        update_scales(model)
    for layer in model:
        assert_gathers_the_whole(nn.Sequential(layer))
    return launches.names


def counts(recipe, dtypes):
    few, many = (launches_of(recipe, layers * len(dtypes), dtypes) for layers in (2, 8))
    assert few == many
    assert few.count("qshard.amax_slices.default") == len(dtypes)


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_launches_do_not_grow_with_the_model(world, recipe):
    run(world, counts, recipe=recipe, dtypes=[torch.float32])


def test_weights_of_two_dtypes_are_two_calls():
    run(2, counts, recipe=MXFP8(), dtypes=[torch.float32, torch.bfloat16])


def rows_and_columns():
    """Weights cut along columns take part in the one reduction with those cut along rows."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(96, 96, bias=False) for _ in range(4))).to(torch_ranks.device)
    columns = {id(layer.weight) for layer in convert(model, NVFP4())[::2]}
    for layer in model:
        axis = 1 if id(layer.weight) in columns else 0
        shard(nn.Sequential(layer), shard_placement_fn=lambda _, axis=axis: Shard(axis))
    update_scales(model)
    for layer in model:
        assert_gathers_the_whole(nn.Sequential(layer))


@pytest.mark.parametrize("world", [2, 4])
def test_rows_and_columns_together(world):
    run(world, rows_and_columns)
