"""Moves of sharded models: what torch's own FSDP2 moves, ours move; what cannot move says so before anything has."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from qshard.recipes import CurrentScaling, DelayedScaling
from qshard.torch_bridge import Adam, ShardedWeight, WithMasters, convert, quantize
from support import torch_ranks
from support.formats import GATHERED, nearest
from support.pairs import each_value
from support.torch_models import batch, linears, losses_of, model_of, shard, sizes_for
from support.torch_ranks import on_ranks


def made(recipe, primary, **options):
    return convert(model_of(True, sizes=sizes_for(recipe), **options), recipe, primary=primary)


def load_from_first(model, state):
    """As accelerate loads a model that rank 0 alone has: broadcast, `distribute_tensor`, `load_state_dict`."""
    loaded = {}
    for name, sharded in model.state_dict().items():
        assert isinstance(sharded, DTensor)
        whole = torch.empty(sharded.shape, dtype=sharded.dtype, device=torch_ranks.device)
        if dist.get_rank() == 0:
            whole.copy_(state[name])
        dist.broadcast(whole, 0)
        loaded[name] = distribute_tensor(whole, sharded.device_mesh, sharded.placements)
    model.load_state_dict(loaded, assign=True)


@each_value(
    world=[1, 3, (2, 2)],
    primary={"values": False, "primary": True},
    name=[name for name in GATHERED if not name.startswith("MXFP6")],
)
@on_ranks()
def test_weights_of_one_rank(name, primary):
    """Converted, moved to meta, sharded, and loaded: the losses of a model that every rank has made."""
    recipe = nearest(GATHERED[name])
    ours, plain = made(recipe, primary, seed=dist.get_rank()), shard(made(recipe, primary))
    state = {key: value.clone() for key, value in ours.state_dict().items()}
    ours = shard(ours.to("meta"))
    load_from_first(ours, state)
    assert ours.to(torch.float32) is ours  # As accelerate does where it upcasts.
    assert not any(tensor.is_meta for tensor in (*ours.parameters(), *ours.buffers()))
    losses, want = (losses_of(model, Adam(model.parameters(), lr=1e-2), steps=3) for model in (ours, plain))
    assert losses == want
    assert losses[-1] < losses[0]


@pytest.mark.each_value
@on_ranks(1, 3)
@pytest.mark.parametrize("recipe", [CurrentScaling(), DelayedScaling()], ids=["current", "delayed"])
@pytest.mark.parametrize("run", [False, True], ids=["before forward", "after"])
def test_moves_of_sharded_models(recipe, run):
    model, same = (shard(made(recipe, False)) for _ in range(2))
    x = batch()
    for each in (model, same) if run else ():
        each(x)
    shards = [p.to_local() for p in model.parameters() if p.to_local().numel()]
    assert len({shard.data_ptr() for shard in shards} - {0}) == len(shards)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for swap in (False, True):
        torch.__future__.set_swap_module_params_on_conversion(swap)
        try:
            model.to(torch_ranks.device).float()
            model.to("meta").to_empty(device=torch_ranks.device)
            model.load_state_dict(state)
            model.to("meta").load_state_dict({name: value.clone() for name, value in state.items()}, assign=True)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        assert all(isinstance(layer.weight.to_local(), ShardedWeight) for layer in linears(model))
        assert torch.equal(model(x), same(x))
    if not run:  # FSDP2 itself takes another dtype before the first forward alone.
        model, same = (made(recipe, False) for _ in range(2))
        model, same = shard(model).bfloat16(), shard(same.bfloat16())
        assert torch.equal(model(x.bfloat16()), same(x.bfloat16()))


@pytest.mark.each_value
@on_ranks(1, 2)
@pytest.mark.parametrize("way", ["forward", "Adam", "WithMasters"])
def test_a_sealed_model_moves_not_at_all(way):
    """Not the layers before it either. What changes nothing is no move."""
    layers = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)).to(torch_ranks.device)
    model, same = (convert(copy.deepcopy(layers), "CurrentScaling", primary=True) for _ in range(2))
    for each in (model, same):
        fully_shard(each, mesh=torch_ranks.mesh())
    x = torch.ones(4, 16, device=torch_ranks.device)
    optimizers = [
        WithMasters(each.parameters(), torch.optim.SGD, lr=0.1) if way == "WithMasters" else Adam(each.parameters())
        for each in (model, same)
    ]
    if way != "WithMasters":
        for each in (model, same):
            each(x)
    for move in (model.half, model.double, lambda: model.to("meta"), lambda: model.to_empty(device=torch_ranks.device)):
        with pytest.raises(NotImplementedError, match=r"Linear: 1.weight \(primary\) has a master in its optimizer"):
            move()
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert not any(p.is_meta for p in model.parameters())
    assert model.to(torch_ranks.device).float() is model
    for _ in range(2):
        losses = []
        for each, optimizer in zip((model, same), optimizers, strict=True):
            loss = each(x).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[0] == losses[1]


@on_ranks(2)
def test_parts_of_tensor_parallelism():
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}

    def parts(prepare, then):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).to(torch_ranks.device)
        return then(parallelize_module(convert(prepare(model), "CurrentScaling"), torch_ranks.mesh(), plan))

    x = batch(columns=32)
    for move, dtype in (
        (lambda model: model.bfloat16(), torch.bfloat16),
        (lambda model: model.half().float(), torch.float32),
        (lambda model: model.to(torch_ranks.device), torch.float32),
    ):
        models = parts(move, lambda model: model), parts(lambda model: model, move)
        assert torch.equal(*(model(x.to(dtype)) for model in models))
        assert all(isinstance(layer.weight.to_local(), ShardedWeight) for layer in linears(models[1]))


@on_ranks(2)
def test_codes_are_not_loaded_in_the_place_of_shards():
    model = shard(made(CurrentScaling(), False))
    state = model.state_dict()
    codes = {**state, "0.weight": quantize(state["0.weight"].full_tensor(), CurrentScaling().weight)}
    for assign in (False, True):
        with pytest.raises(
            RuntimeError, match=r"0.weight \(FP8_E4M3.*\) is quantized, but the layer has sharded values"
        ):
            model.load_state_dict(codes, assign=assign)
    model(batch())
