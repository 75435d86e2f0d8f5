"""`convert` with FSDP2 and wrappers: subclasses of `nn.Linear`, DistributedDataParallel, FSDP1."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from qshard.recipes import NVFP4, BlockScaling, CurrentScaling, DelayedScaling
from qshard.torch_bridge import Linear, ShardedWeight, convert, update_scales
from support import torch_ranks
from support.torch_models import assert_gathers_the_whole, batch, losses_of, shard, whole
from support.torch_ranks import on_ranks


class Named(nn.Linear):
    """A subclass as in torchtitan: other constructor arguments, initialized after sharding."""

    def __init__(self, inputs, outputs, seed):
        super().__init__(inputs, outputs, bias=False)
        self.seed_of_values = seed

    def init_weights(self):
        nn.init.constant_(self.weight, self.seed_of_values)


def model_of_class():
    return nn.Sequential(Named(128, 256, 0.25), nn.GELU(), Named(256, 128, -0.5))


@pytest.mark.each_value
@pytest.mark.parametrize("recipe", [CurrentScaling(), BlockScaling(), DelayedScaling(), NVFP4()], ids=repr)
@on_ranks(2, 3)
def test_classes_of_users_are_sharded(recipe):
    """Built on meta and initialized after sharding: gathered codes are those of the whole weight, and it trains."""
    with torch.device("meta"):
        model = convert(model_of_class(), recipe)
    shard(model)
    model.to_empty(device="cpu")
    for layer in (model[0], model[2]):
        assert isinstance(layer, Named)
        assert isinstance(layer, Linear)
        layer.init_weights()
    update_scales(model)
    assert all((w == layer.seed_of_values).all() for w, layer in zip(whole(model).values(), model[::2], strict=True))
    if not recipe.stateful:
        assert_gathers_the_whole(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = whole(model)
    losses_of(model, optimizer, steps=2)
    assert not any(torch.equal(w, before[name]) for name, w in whole(model).items())
    if not recipe.stateful:
        assert_gathers_the_whole(model)


def wrapped(kind, model):
    if kind == "DDP":
        return DistributedDataParallel(model)
    if kind == "replicate":
        return replicate(model)
    return FullyShardedDataParallel(model, use_orig_params=kind == "FSDP1, parameters", device_id=torch.device("cpu"))


@pytest.mark.parametrize("kind", ["DDP", "replicate", "FSDP1", "FSDP1, parameters"])
@on_ranks(2)
def test_wrapped_models_are_refused_and_stay_as_they_are(kind):
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    wrapper = wrapped(kind, model)
    types = [type(module) for module in wrapper.modules()]
    parameters = list(map(id, wrapper.parameters()))
    if kind == "replicate":
        wrapper(batch(0, 32))  # `replicate` wraps on the first call.
    for each in (wrapper, model, nn.Sequential(wrapper)):
        with pytest.raises(
            ValueError, match=r"^convert: .* (has already taken the weights|cannot be replaced).*; convert .*wrap"
        ):
            convert(each, CurrentScaling())
    assert [type(module) for module in wrapper.modules()] == types
    assert list(map(id, wrapper.parameters())) == parameters
    assert not any(isinstance(p, ShardedWeight) for p in wrapper.parameters())
    wrapper(batch(0, 32)).sum().backward()


@pytest.mark.parametrize("recipe", [CurrentScaling(), DelayedScaling(), NVFP4()], ids=repr)
@on_ranks(2)
def test_a_model_that_is_converted_before_trains_under_ddp(recipe):
    """Ranks with different batches have the same weights; an optimizer created before `convert` trains them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), Named(64, 64, 0.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    convert(model, recipe)
    before = [p.detach().clone() for p in model.parameters()]
    ddp, losses = DistributedDataParallel(model), []
    for step in range(6):
        x = batch(2 * (step % 2) + dist.get_rank(), 64)
        optimizer.zero_grad()
        loss = (ddp(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        update_scales(model)
        losses.append(loss.item())
    for p, old in zip(model.parameters(), before, strict=True):
        of_rank_0 = p.detach() + 0
        dist.broadcast(of_rank_0, 0)
        assert torch.equal(p.detach() + 0, of_rank_0)
        assert not torch.equal(of_rank_0, old)
    assert losses[-1] < losses[1]


@on_ranks(2)
def test_a_tied_head_is_sharded_with_its_embedding():
    """The head stays in high precision, grouped with its embedding as in a plain model; the rest is converted."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.body, self.head = nn.Embedding(64, 32), nn.Linear(32, 32), nn.Linear(32, 64, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.body(self.embed(x)))

    torch.manual_seed(0)
    model = Tied()
    with pytest.warns(UserWarning, match=r"1 of 2 layers were not converted: head \(tied to embed.weight\)"):
        convert(model, CurrentScaling())
    plain = copy.deepcopy(model.embed.weight)
    mesh = torch_ranks.mesh()
    fully_shard(model.body, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.head.weight.full_tensor(), plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.arange(64)).square().mean().backward()
    optimizer.step()
    assert model.head.weight is model.embed.weight
    assert not torch.equal(model.head.weight.full_tensor(), plain)
