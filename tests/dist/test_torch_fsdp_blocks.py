"""Training with FSDP2 and weights in blocks that ranks cut: parity with one process, what travels, compiled layers."""

import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from qshard.recipes import MXFP8, NVFP4, BlockScaling, CurrentScaling
from qshard.torch_bridge import convert
from support import torch_ranks
from support.torch_models import Wire, assert_gathers_the_whole, linears, losses_of, model_of, shard
from support.torch_ranks import run

BLOCK_SIZES = (32, 96, 64, 32)  # Over 3 ranks, which cut blocks all the same, the first weight is even, the others not.
# One seed a forward would be another on each rank, and in each model: here gradients are rounded to nearest.
IN_BLOCKS = [BlockScaling(), MXFP8(), NVFP4(gradient=NVFP4().activation)]
every_block_recipe = pytest.mark.parametrize("recipe", IN_BLOCKS, ids=lambda recipe: type(recipe).__name__)


def trains_in_blocks_like_one_process(recipe, reshard):
    models = [convert(model_of(True, sizes=BLOCK_SIZES), recipe) for _ in range(2)]
    models[1] = shard(models[1], reshard_after_forward=reshard)
    losses = [losses_of(m, torch.optim.AdamW(m.parameters(), lr=1e-2), micro_batches=2) for m in models]
    if dist.get_world_size() != 3:  # An average over three equal gradients is not exact.
        assert losses[0] == losses[1]
        for mine, other in zip(*(m.parameters() for m in models), strict=True):
            assert torch.equal(mine.detach().clone(), other.full_tensor().clone())
    assert_gathers_the_whole(models[1])


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@every_block_recipe
def test_training_in_blocks_is_that_of_one_process(world, recipe):
    run(world, trains_in_blocks_like_one_process, recipe=recipe, reshard=world != 4)


def counts_blocks(recipe):
    """Codes of 4 bits take half a byte where all ranks hold the same number of rows, else one, on all alike."""
    world = dist.get_world_size()
    model = shard(convert(model_of(sizes=BLOCK_SIZES), recipe))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    losses_of(model, optimizer, steps=1)
    with Wire() as wire:
        losses_of(model, optimizer, steps=1)
    gathers, amaxes = [], 0
    for layer in linears(model):
        rows, columns = layer.out_features, layer.in_features
        packed = 2 if recipe.weight.element.bits == 4 and rows % world == 0 else 1
        gathers.append((torch.uint8, -(-rows // world) * columns // packed))
        blocks = [-(-size // unit) for size, unit in zip((rows, columns), recipe.weight.block, strict=True)]
        amaxes += math.prod(blocks) + (recipe.weight.scaling.global_scale is not None)
    assert wire.of("allgather") == [*gathers, *reversed(gathers)]
    assert wire.of("allreduce") == [(torch.int32, amaxes)]


@pytest.mark.parametrize("world", [2, 3])
@every_block_recipe
def test_what_travels_for_blocks(world, recipe):
    run(world, counts_blocks, recipe=recipe)


def compiles_each_layer(backend, recipe):
    torch._dynamo.reset()
    eager, compiled = (convert(model_of(True, sizes=BLOCK_SIZES), recipe) for _ in range(2))
    # Layers of other shapes make sizes symbols, and dynamo of torch 2.11 fails on those in an autograd.Function.
    dynamic = None if torch.__version__ >= "2.13" else False  # Compares versions, not strings.
    for i, layer in enumerate(compiled):
        compiled[i] = torch.compile(layer, fullgraph=True, backend=backend, dynamic=dynamic)
    # What dynamo of torch 2.13 does against torch 2.13's own advice.
    warnings.filterwarnings("ignore", ".* should not be instantiated", DeprecationWarning)
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
    losses = []
    for model in (eager, compiled):
        for layer in model:
            if linears(layer):
                fully_shard(layer, mesh=torch_ranks.mesh())
        fully_shard(model, mesh=torch_ranks.mesh())
        losses.append(losses_of(model, torch.optim.AdamW(model.parameters(), lr=1e-2)))
    assert losses[0] == losses[1]
    assert_gathers_the_whole(eager)


@pytest.mark.parametrize(
    ("world", "recipe"), [(1, CurrentScaling()), (2, CurrentScaling()), (3, MXFP8()), (3, IN_BLOCKS[2])], ids=str
)
def test_compiled_layers(world, recipe):
    run(world, compiles_each_layer, backend="aot_eager", recipe=recipe)
