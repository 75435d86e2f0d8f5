"""DistributedDataParallel around converted layers: the bits of one process in every mode, and amaxes of each rank."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from qshard.recipes import DelayedScaling
from qshard.torch_bridge import ShardedWeight, convert, load_scaling_state, scaling_state, update_scales
from support import torch_ranks
from support.pairs import each_value
from support.torch_models import batch, linears, model_of, sizes_for
from support.torch_ranks import on_ranks
from support.torch_wrapped import RECIPES, follow, sgd

SMALL = 1e-3  # MB of a bucket, so that there are several.
OPTIONS = {
    "plain": {},
    "static graph": {"static_graph": True},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "small buckets": {"bucket_cap_mb": SMALL},
    "own buffers": {"broadcast_buffers": False},
    "all": {"static_graph": True, "gradient_as_bucket_view": True, "bucket_cap_mb": SMALL},
}


def pair(recipe, **options):
    """Build a model with different values on each rank and the model of one process."""
    options = {"bias": True, "sizes": sizes_for(recipe), **options}
    one = convert(model_of(**options), recipe)
    return convert(model_of(**options, seed=dist.get_rank()), recipe), one


def ddp(model, **options):
    ids = [torch.cuda.current_device()] if torch_ranks.device == "cuda" else None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        return DistributedDataParallel(model, device_ids=ids, **options)


@each_value(world=[2, 3], options=list(OPTIONS), recipe=list(RECIPES))
@on_ranks()
def test_trains_as_one_process(options, recipe):
    """Rank 0's weights are broadcast first."""
    model, one = pair(RECIPES[recipe])
    model = ddp(model, **OPTIONS[options])
    assert any(isinstance(p, ShardedWeight) for p in model.parameters())
    follow(model, sgd(model), one)


@pytest.mark.each_value
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("sync", [False, True])
@on_ranks(2)
def test_accumulation(sync, options):
    """Gradients and amaxes accumulate; the broadcast of rank 0's buffers does not overwrite other ranks' amaxes."""
    model, one = pair(RECIPES["delayed"])
    model = ddp(model, **OPTIONS[options])
    optimizer = sgd(model)
    if "static_graph" in OPTIONS[options]:  # DDP records the graph in a pass that reduces.
        follow(model, optimizer, one, steps=1)
    follow(model, optimizer, one, micro_batches=3, sync=sync)


@on_ranks(2, 3)
def test_amaxes_stay_with_their_ranks():
    """The amax is the last rank's, from the first of two passes; other buffers are those of rank 0."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model, _ = pair(RECIPES["delayed"])
    outer = ddp(nn.Sequential(model, nn.BatchNorm1d(20)).to(torch_ranks.device))
    for scale in (2.0**rank, 0.5):
        outer(scale * torch.ones(6, 20, device=torch_ranks.device)).sum().backward()
    assert linears(model)[0].delayed["activation"].amax == 2.0**rank
    outer.module[1].running_mean.fill_(rank)
    with torch.no_grad():
        outer.eval()(0 * batch())
    assert (outer.module[1].running_mean == 0).all()
    update_scales(outer)
    assert linears(model)[0].delayed["activation"].amax_history[-1] == 2.0 ** (world - 1)


class Branches(nn.Module):
    """Two layers, of which each call uses one, the same on all ranks."""

    def __init__(self):
        super().__init__()
        self.layers, self.used = nn.ModuleList([nn.Linear(20, 20) for _ in range(2)]), 0

    def forward(self, x):
        return self.layers[self.used](x)


@on_ranks(2)
def test_layers_that_are_not_used():
    model = ddp(convert(Branches().to(torch_ranks.device), RECIPES["delayed"]), find_unused_parameters=True)
    optimizer, (first, second) = sgd(model), model.module.layers
    for used in (0, 1, 0):
        model.module.used = used
        before = [layer.weight.detach() + 0 for layer in (first, second)]
        model(batch(dist.get_rank())).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        update_scales(model)
        for i, layer in enumerate((first, second)):
            assert torch.equal(layer.weight.detach() + 0, before[i]) is (i != used)
            of_first = layer.weight.detach() + 0
            dist.broadcast(of_first, 0)
            assert torch.equal(of_first, layer.weight.detach() + 0)


@on_ranks(2)
def test_gradients_are_views_of_buckets():
    model, _ = pair(RECIPES["current"])
    model = ddp(model, gradient_as_bucket_view=True)
    for _ in range(2):
        model(batch(dist.get_rank())).sum().backward()
    weights = [layer.weight for layer in linears(model)]
    assert {w.grad.untyped_storage().data_ptr() for w in weights} == {weights[0].grad.untyped_storage().data_ptr()}


@on_ranks(4)
@pytest.mark.parametrize("inner", [False, True])
def test_amaxes_are_those_of_the_group(inner):
    """Also if `update_scales` gets the inner model instead of the wrapper."""
    rank = dist.get_rank()
    pairs = init_device_mesh(torch_ranks.device, (2, 2), mesh_dim_names=("stage", "data"))
    model = ddp(pair(RECIPES["delayed"])[0], process_group=pairs["data"].get_group())
    model(torch.full((2, 20), 2.0**rank, device=torch_ranks.device)).sum().backward()
    update_scales(model.module if inner else model)
    assert linears(model)[0].delayed["activation"].amax_history[-1] == 2.0 ** (2 * (rank // 2) + 1)


@on_ranks(2)
def test_resumed_runs():
    def run():
        model = ddp(pair(DelayedScaling(history=3))[0])
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train(model, optimizer, steps):
        for i in steps:
            model(batch(2 * i + dist.get_rank())).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            update_scales(model)
        return {**model.state_dict(), **scaling_state(model)}

    first = run()
    train(*first, range(3))
    saved = copy.deepcopy([first[0].state_dict(), first[1].state_dict(), scaling_state(first[0])])
    went_on, again = train(*first, range(3, 6)), run()
    again[0].load_state_dict(saved[0])
    again[1].load_state_dict(saved[1])
    load_scaling_state(again[0], saved[2])
    resumed = train(*again, range(3, 6))
    assert went_on.keys() == resumed.keys()
    assert all(torch.equal(value, resumed[name]) for name, value in went_on.items())


@on_ranks(3)
def test_a_forgotten_update_is_an_error_on_every_rank():
    model = ddp(pair(DelayedScaling())[0])
    optimizer = sgd(model)
    for step in range(2):
        model(batch()).sum().backward()
        if step == 0:
            optimizer.step()
    with pytest.raises(RuntimeError, match=r"DelayedScaling: .*weight .* call update_scales\(model\)"):
        optimizer.step()
