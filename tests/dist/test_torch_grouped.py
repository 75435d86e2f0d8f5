"""Experts over ranks: `GroupedLinear` under FSDP2, DDP and ZeRO, and with expert parallelism."""

import copy
import pickle
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from qshard.formats import Usage
from qshard.recipes import BlockScaling, CurrentScaling
from qshard.torch_bridge import (
    GroupedLinear,
    QuantizedTensor,
    WithMasters,
    ZeroOptimizer,
    convert,
    quantize,
    quantized_state_dict,
    update_scales,
)
from support import torch_ranks
from support.formats import GATHERED, ZEROED, nearest
from support.pairs import turns
from support.torch_models import Wire
from support.torch_ranks import on_ranks

WIDTH, HIDDEN, ROWS = 128, 256, 96


class Experts(nn.Module):
    """Two expert layers; sizes are an argument of forward."""

    def __init__(self, experts, recipe):
        super().__init__()
        self.up = GroupedLinear(experts, WIDTH, HIDDEN, recipe=recipe)
        self.down = GroupedLinear(experts, HIDDEN, WIDTH, recipe=recipe)

    def forward(self, x, sizes):
        return x + self.down(torch.relu(self.up(x, sizes)), sizes)


def model_of(experts, recipe):
    torch.manual_seed(0)
    return Experts(experts, recipe).to(torch_ranks.device)


def rows_of(rank, experts, step=0):
    """Return a rank's rows and expert sizes; the empty experts differ on each rank and in each step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    sizes = torch.zeros(experts, dtype=torch.int64)
    sizes[(rank + step) % experts] = ROWS // 2
    sizes[(rank + step + 2) % experts] += ROWS // 3
    # FSDP2 moves inputs to its GPU; sizes on the device take other products than sizes on the host.
    return x.to(torch_ranks.device), sizes.to(torch_ranks.device)


def loss_of(model, rank, experts, step=0):
    return model(*rows_of(rank, experts, step)).square().mean()


def wholes(model):
    return [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]


@turns(1, name=list(GATHERED), world=[2, 3])
@on_ranks()
def test_fsdp2_is_one_process(name):
    """Gathered codes are those of the whole weight, and gradients the mean over ranks."""
    fsdp2_is_one_process(name)


def fsdp2_is_one_process(name):
    # Relative to the norm. Tensor cores keep fewer bits of sums, so a few gradient codes move to a neighbour.
    error = 1e-4 if torch_ranks.device == "cpu" else 5e-2
    recipe, world, experts = nearest(GATHERED[name]), dist.get_world_size(), 5
    one, many = model_of(experts, recipe), model_of(experts, recipe)
    mesh = torch_ranks.mesh()
    for module in (many.up, many.down, many):
        fully_shard(module, mesh=mesh)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, many)]
    for step in range(3):
        losses = []
        for rank in range(world):
            loss = loss_of(one, rank, experts, step)
            loss.backward()
            losses.append(loss.item())
        for parameter in one.parameters():
            parameter.grad /= world
        mine = loss_of(many, dist.get_rank(), experts, step)
        mine.backward()
        if not recipe.stateful or step == 0:
            assert mine.item() == pytest.approx(losses[dist.get_rank()], rel=10 * error)
        for number, (a, b) in enumerate(zip(wholes(many), wholes(one), strict=True)):
            assert (a - b).norm() <= error * b.norm(), (step, number, (a - b).norm(), b.norm())
        for model, optimizer in zip((one, many), optimizers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            update_scales(model)
    if not recipe.stateful:
        many.up.unshard()
        for expert, source in zip(many.up.experts, one.up.experts, strict=True):
            assert isinstance(expert.weight, QuantizedTensor)
            assert expert.weight.shape == source.weight.shape


@on_ranks(2)
@pytest.mark.parametrize("recipe", [CurrentScaling(), BlockScaling()], ids=["tensor", "blocks"])
def test_what_is_gathered(recipe):
    """Codes of each expert, with one reduction of amaxes for all of them."""
    model = model_of(4, recipe)
    values = [expert.weight.detach().clone() for expert in model.up.experts]
    mesh = torch_ranks.mesh()
    for module in (model.up, model.down, model):
        fully_shard(module, mesh=mesh)
    for reductions in (2, 1):  # One for each layer until the root is known.
        for _ in range(2):  # The first time, ranks exchange digests too.
            with Wire() as wire:
                loss = loss_of(model, 0, 4)
            loss.backward()
        assert len(wire.of("allreduce")) == reductions
        update_scales(model)
    gathers = wire.of("allgather")
    assert {dtype for dtype, _ in gathers} == {torch.uint8}
    assert sum(size for _, size in gathers) * 2 == sum(p.numel() for p in model.parameters())
    model.up.unshard()
    for expert, value in zip(model.up.experts, values, strict=True):
        expected = quantize(value, recipe.weight).parts(Usage.ROWWISE)
        for a, b in zip(expert.weight.parts(Usage.ROWWISE), expected, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (a, b)))


@pytest.mark.each_value
@on_ranks(2, 3)
@pytest.mark.parametrize("name", ["CurrentScaling", "MXFP8", "DelayedScaling"])
def test_ddp_with_accumulation(name):
    """Experts without a token on any rank have zero gradients; nothing hangs."""
    recipe, world, experts = nearest(GATHERED.get(name) or name), dist.get_world_size(), 7
    one = model_of(experts, recipe)
    many = DistributedDataParallel(model_of(experts, recipe))
    for step in range(2):
        if not recipe.stateful:
            for rank in range(world):
                for part in range(2):
                    loss_of(one, rank, experts, 2 * step + part).backward()
            for parameter in one.parameters():
                parameter.grad /= world
        with many.no_sync():
            many(*rows_of(dist.get_rank(), experts, 2 * step)).square().mean().backward()
        many(*rows_of(dist.get_rank(), experts, 2 * step + 1)).square().mean().backward()
        assert all(p.grad is not None for p in many.parameters())
        if not recipe.stateful:
            for a, b in zip(wholes(many.module), wholes(one), strict=True):
                assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)
        update_scales(many)
        one.zero_grad()
        many.zero_grad()


@on_ranks(1, 2)
def test_zero():
    """The bits do not depend on the stage or the units; by default a layer is one unit with all of its experts."""
    recipe, experts = CurrentScaling(), 5
    made = []
    for stage, units in [(False, None), (True, None), (True, lambda model: [model.up, model.down])]:
        model = model_of(experts, recipe)
        optimizer = ZeroOptimizer(model, lr=1e-2, shard_weights=stage, units=units and units(model))
        losses = []
        for _ in range(3):
            loss = loss_of(model, 0, experts)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < losses[0]
        made.append((losses, optimizer.full_weights()))
    for losses, weights in made[1:]:
        assert losses == made[0][0]
        assert all(torch.equal(weights[name], value) for name, value in made[0][1].items())
    model = model_of(experts, recipe)
    with pytest.raises(ValueError, match=r"units \(Linear\) is in a GroupedLinear, which reads its weight"):
        ZeroOptimizer(model, shard_weights=True, units=[*model.up.experts])


class Mixtures(nn.Module):
    """Two mixtures of experts, each recomputed in backward if `reentrant` is a bool."""

    def __init__(self, experts, recipe, reentrant):
        super().__init__()
        self.layers = nn.ModuleList(Experts(experts, recipe) for _ in range(2))
        self.reentrant = reentrant

    def forward(self, x, sizes):
        x = x.clone().requires_grad_()  # A reentrant checkpoint has a gradient only if its input has.
        for layer in self.layers:
            x = layer(x, sizes) if self.reentrant is None else checkpoint(layer, x, sizes, use_reentrant=self.reentrant)
        return x


def mixtures_of(experts, recipe, reentrant=None, *, seed=0, **options):
    torch.manual_seed(seed)
    model = Mixtures(experts, recipe, reentrant).to(torch_ranks.device)
    return model, ZeroOptimizer(model, lr=1e-2, **options)


def train_mixtures(model, optimizer, experts, steps, parts=2):
    losses = []
    for step in steps:
        for part in range(parts):
            loss = loss_of(model, dist.get_rank(), experts, 10 * step + part)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


ACCUMULATED = [("CurrentScaling", 1), ("DelayedScaling", 2), ("NVFP4", 2)]


@pytest.mark.parametrize(
    ("name", "world"),
    [
        pytest.param(name, world, marks=[] if (name, world) in ACCUMULATED else pytest.mark.slow)
        for name in ZEROED
        for world in (1, 2)
    ],
)
@on_ranks()
def test_zero_accumulates_and_recomputes(name):
    """Sharded weights in default units: two backward passes a step, and both kinds of activation checkpointing.

    The bits are those of stage 1 with one backward pass. With two, sums over ranks have another order.
    """
    recipe, experts = nearest(ZEROED[name]), 5
    for parts, near in ((1, 0.0), (2, 1e-4)):
        model, optimizer = mixtures_of(experts, recipe)
        expected = train_mixtures(model, optimizer, experts, range(2), parts), optimizer.full_weights()
        for reentrant in (None, False, True):
            model, optimizer = mixtures_of(experts, recipe, reentrant, shard_weights=True)
            assert len(optimizer._flats) == 4  # A unit for each GroupedLinear.
            losses = train_mixtures(model, optimizer, experts, range(2), parts)
            assert losses == pytest.approx(expected[0], rel=near, abs=0)
            for weight, value in optimizer.full_weights().items():
                assert (value - expected[1][weight]).norm() <= near * value.norm(), (weight, reentrant, parts)


@pytest.mark.each_value
@on_ranks(1, 2)
@pytest.mark.parametrize("stage", [False, True])
def test_zero_checkpoint(stage):
    """A run of sharded weights resumes in either stage, and a plain model loads its weights."""
    recipe, experts = CurrentScaling(), 5
    model, optimizer = mixtures_of(experts, recipe, shard_weights=True)
    train_mixtures(model, optimizer, experts, range(2))
    saved = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    dcp.save(saved, checkpoint_id=f"{folder[0]}/saved")
    expected = train_mixtures(model, optimizer, experts, [2], parts=1)
    again, resumed = mixtures_of(experts, recipe, seed=1, shard_weights=stage)
    states = dict(zip(("model", "optimizer"), get_state_dict(again, resumed), strict=True))
    dcp.load(states, checkpoint_id=f"{folder[0]}/saved")
    set_state_dict(again, resumed, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    assert train_mixtures(again, resumed, experts, [2], parts=1) == expected
    for name, value in optimizer.full_weights().items():
        assert torch.equal(resumed.full_weights()[name], value)
    plain = Mixtures(experts, recipe, None)
    plain.load_state_dict(optimizer.full_weights())
    x, sizes = rows_of(0, experts)
    assert torch.equal(plain(x, sizes), again(x, sizes))


@on_ranks(2, 3)
def test_experts_of_a_rank():
    """`all_to_all` sends tokens to the rank of their expert; some experts, or a whole rank, may get none."""
    world, rank, each = dist.get_world_size(), dist.get_rank(), 2
    recipe = CurrentScaling()
    whole = model_of(each * world, recipe)
    mine = Experts(each, recipe)
    with torch.no_grad():
        for layer, of_all in ((mine.up, whole.up), (mine.down, whole.down)):
            for i, expert in enumerate(layer.experts):
                expert.weight.copy_(of_all.experts[rank * each + i].weight)
    # Rank r has tokens for experts r and r + 1 only, so ranks may have none.
    sizes = torch.zeros(each * world, dtype=torch.int64)
    sizes[rank], sizes[(rank + 1) % (each * world)] = 24, 40
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(rank))
    order = torch.argsort(
        torch.repeat_interleave(torch.tensor([rank, (rank + 1) % (each * world)]), torch.tensor([24, 40]))
    )
    x = x[order]
    counts = sizes.view(world, each).sum(1).tolist()
    from_others = torch.empty(world * each, dtype=torch.int64)
    dist.all_to_all_single(from_others, sizes)
    received = from_others.view(world, each)
    came = x.new_empty(int(received.sum()), WIDTH)
    dist.all_to_all_single(came, x, received.sum(1).tolist(), counts)
    by_expert = torch.argsort(
        torch.repeat_interleave(torch.arange(each).repeat(world), received.flatten()), stable=True
    )
    came = came[by_expert].requires_grad_()
    y = mine(came, received.sum(0))
    y.square().sum().backward()
    assert all(p.grad is not None for p in mine.parameters())
    for i, layer in enumerate((mine.up, mine.down)):
        for expert, count in zip(layer.experts, received.sum(0).tolist(), strict=True):
            assert bool(expert.weight.grad.any()) == bool(count), i


@on_ranks(2)
def test_a_converted_list_of_layers():
    """`GroupedLinear.of` takes converted layers and shards like plain ones."""
    layers = convert(nn.ModuleList(nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(3)), "MXFP8")
    alone = copy.deepcopy(layers)
    grouped = GroupedLinear.of(layers)
    fully_shard(grouped, mesh=torch_ranks.mesh())
    x, sizes = torch.randn(40, WIDTH), torch.tensor([8, 0, 32])
    expected = torch.cat([alone[0](x[:8]), alone[2](x[8:])])
    assert torch.allclose(grouped(x, sizes), expected, rtol=1e-5, atol=1e-5)


@on_ranks(2)
@pytest.mark.parametrize("name", ["CurrentScaling", "MXFP8", "NVFP4"])
def test_primary_weights(name):
    """Codes as parameters: the losses of masters quantized in each pass."""
    losses, recipe = [], nearest(GATHERED[name])
    for primary in (False, True):
        model = model_of(3, recipe)
        if primary:
            convert(model, recipe, primary=True)
        mesh = torch_ranks.mesh()
        for module in (model.up, model.down, model):
            fully_shard(module, mesh=mesh)
        if primary:
            optimizer = WithMasters(model.parameters(), torch.optim.SGD, lr=0.1)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses.append([])
        for step in range(3):
            loss = loss_of(model, dist.get_rank(), 3, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[0] == losses[1]


@on_ranks(2)
def test_a_checkpoint_and_copies():
    model = model_of(3, CurrentScaling())
    x, sizes = rows_of(0, 3)
    expected = model(x, sizes)
    again = model_of(3, CurrentScaling())
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    again.load_state_dict(model.state_dict())
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    for other in (again, copied):
        assert torch.equal(other(x, sizes), expected)
    exported = quantized_state_dict(model)
    assert isinstance(exported["up.experts.0.weight"], QuantizedTensor)
    with torch.device("meta"):
        bare = Experts(3, CurrentScaling())
    bare.to_empty(device="cpu")
    bare.load_state_dict(model.state_dict())
    assert torch.equal(bare(x, sizes), expected)
