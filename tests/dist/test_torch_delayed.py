"""Delayed scaling over ranks: one reduction a step, the same scales everywhere, and gathered codes of the whole."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

from qshard import reference
from qshard.recipes import NVFP4, DelayedScaling
from qshard.torch_bridge import DelayedScale, convert, update_scales
from support import torch_ranks
from support.awkward import awkward_values
from support.fronts import TorchFront
from support.torch_ranks import run

FRONT = TorchFront("cpu")
RECIPE = DelayedScaling(history=2)
ROWS = (64, 5, 33)  # Uneven over two to four ranks; of 5 rows some hold one or none.


def sharded():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(20, rows) for rows in ROWS))
    with torch.no_grad():
        for seed, layer in enumerate(model):
            values = awkward_values(tuple(layer.weight.shape), seed, kinds=["normal", "zeros", "outlier"])
            layer.weight.copy_(FRONT.array(values))
    whole = [layer.weight.detach().clone() for layer in model]
    convert(model.to(torch_ranks.device), RECIPE)
    for layer in model:
        fully_shard(layer, mesh=torch_ranks.mesh())
    return model, whole


def trains():
    model, whole = sharded()
    rank, device = dist.get_rank(), torch_ranks.device
    states = [m for m in model.modules() if isinstance(m, DelayedScale)]
    reductions = []
    original = dist.all_reduce
    for step in range(3):
        xs = [torch.randn(6, 20, generator=torch.Generator().manual_seed(100 * step + r)) for r in range(4)]
        for layer in model:
            layer(xs[rank].to(device)).sum().backward()
        for layer, w in zip(model, whole, strict=True):
            noted = torch.stack([state.amax for state in layer.delayed.children()]).cpu()
            assert noted[1] == xs[rank].abs().max()
            assert noted[2] == 1
            assert noted[0] <= w.abs().max()  # Of this rank's rows.
        dist.all_reduce = lambda x, **options: (reductions.append((x.dtype, x.numel())), original(x, **options))
        try:
            update_scales(model)
        finally:
            dist.all_reduce = original
        largest = torch.stack([x.abs().max() for x in xs[: dist.get_world_size()]]).max()
        for layer, w in zip(model, whole, strict=True):
            weight, activation = layer.delayed["weight"], layer.delayed["activation"]
            assert weight.amax_history[-1] == w.abs().max()
            assert activation.amax_history[-1] == largest
            layer.unshard()
            q = layer.weight.rowwise
            expected = reference.quantize(w.numpy(), RECIPE.weight, scale=FRONT.numpy(weight.scale)).rowwise
            assert torch.equal(q.data.view(torch.uint8).clone().cpu(), torch.from_numpy(expected.data))
            assert q.scale_inv.item() == expected.scale_inv
            layer.reshard()
    one = [(torch.int32, len(states))] if dist.get_world_size() > 1 else []
    assert reductions == 3 * one


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_ranks_agree_on_scales_and_gather_the_whole(world):
    run(world, trains)


def stateful(recipe, seed):
    torch.manual_seed(seed)
    model = convert(nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)), recipe)
    return fully_shard(model.to(torch_ranks.device), mesh=torch_ranks.mesh())


def step(model, seed):
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(seed)).to(torch_ranks.device)
    loss = model(x).square().sum()
    loss.backward()
    update_scales(model)
    return loss.item()


def buffers_of(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def saves(folder, recipe):
    model = stateful(recipe, 0)
    for seed in range(3):
        step(model, seed)
    dcp.save(get_model_state_dict(model), checkpoint_id=f"{folder}/checkpoint")
    kept = buffers_of(model)
    if dist.get_rank() == 0:
        torch.save({"buffers": kept, "loss": step(model, 7)}, f"{folder}/expected")
    else:
        step(model, 7)


def loads(folder, recipe):
    expected = torch.load(f"{folder}/expected", weights_only=True)
    model = stateful(recipe, 1)
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=f"{folder}/checkpoint")
    set_model_state_dict(model, state)
    found = buffers_of(model)
    assert found.keys() == expected["buffers"].keys()
    assert all(torch.equal(found[name], expected["buffers"][name]) for name in found)
    assert step(model, 7) == expected["loss"]


@pytest.mark.parametrize("recipe", [RECIPE, NVFP4()], ids=lambda recipe: type(recipe).__name__)
def test_state_is_saved_and_loaded_by_other_ranks(tmp_path, recipe):
    """Delayed scales, and seeds of stochastic rounding: plain buffers, the same on every rank."""
    run(2, saves, folder=str(tmp_path), recipe=recipe)
    run(3, loads, folder=str(tmp_path), recipe=recipe)
