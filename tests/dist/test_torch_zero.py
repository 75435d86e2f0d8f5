"""ZeRO on real ranks, each with batches of its own: the bits of one process that has everything, for both stages."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from qshard import reference
from qshard.recipes import NVFP4, CurrentScaling
from qshard.torch_bridge import Adam, QuantizedTensor, ZeroOptimizer, convert
from qshard.torch_bridge._zero.placeholders import GradientPlaceholder
from support import torch_ranks
from support.awkward import assert_bits_equal
from support.formats import ZEROED as RECIPES
from support.pairs import turns
from support.torch_models import FRONT, Wire
from support.torch_ranks import on_ranks
from support.zero import FEW_BITS, OPTIONS, STAGES, every_stage, in_one_process, loss_of, model_of, train, with_zero


def same_bits(name, steps=3, dtype="float32", **options):
    recipe, dtype = RECIPES[name], getattr(torch, dtype)
    losses, weights = in_one_process(recipe, steps, dtype, **options)
    assert len(set(losses)) > 1
    for stage in STAGES:
        own_losses, own_weights = with_zero(recipe, steps, dtype, shard_weights=stage, **options)
        assert own_losses == losses, stage
        assert own_weights.keys() == weights.keys()
        for key, weight in weights.items():
            assert torch.equal(own_weights[key].view(torch.int32), weight.detach().view(torch.int32)), (stage, key)


@turns(1, name=list(RECIPES), world=[2, 3, 1])
@on_ranks()
def test_bits_of_one_process(name):
    """Losses and masters, unsharded, with sharded states, and fully sharded."""
    same_bits(name)


@on_ranks(2)
@pytest.mark.parametrize("name", ["CurrentScaling", "DelayedScaling", "NVFP4"])
def test_bits_of_one_process_in_few_bits(name):
    """Of weights, and of states."""
    same_bits(name, dtype="bfloat16", **FEW_BITS)


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("name", RECIPES)
def test_bits_over_many_steps(name):
    same_bits(name, steps=500 if name == "NVFP4" else 100)


@on_ranks(3)
@every_stage
def test_blocks_of_states_are_not_cut(stage):
    """Gradients so wide that a block of a state that a cut had split would round otherwise."""
    torch.manual_seed(0)
    plain_model = convert(nn.Linear(41, 24, bias=False).to(torch_ranks.device), CurrentScaling())
    model = copy.deepcopy(plain_model)
    master = nn.Parameter(plain_model.weight.detach().clone().view(1, -1))
    alone = Adam([master], **OPTIONS, **FEW_BITS)
    optimizer = ZeroOptimizer(model, **OPTIONS, **FEW_BITS, shard_weights=stage)
    for step in range(3):
        x = torch.logspace(-4 + step, 1, 41, device=torch_ranks.device).repeat(2, 1)
        dy = torch.logspace(-1, 1, 24, device=torch_ranks.device).repeat(2, 1)
        for layer in (plain_model, model):
            layer(x).backward(dy)
        grad = plain_model.weight.grad
        three = torch.tensor(3.0, device=grad.device)
        master.grad, plain_model.weight.grad = ((grad + grad + grad) / three).view(1, -1), None
        alone.step()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(optimizer.full_weights()["weight"].view(1, -1), master), step


@on_ranks(2)
@every_stage
@pytest.mark.parametrize("name", ["BlockScaling", "DelayedScaling"])
def test_collectives(name, stage):
    model = model_of(RECIPES[name])
    # Units: the embedding, two blocks, the last layer.
    optimizer = ZeroOptimizer(model, **OPTIONS, shard_weights=stage, units=list(model))
    for step in range(2):
        with Wire() as forward:
            loss = loss_of(model, step, dist.get_rank())
        with Wire() as backward:
            loss.backward()
        with Wire() as update:
            optimizer.step()
        optimizer.zero_grad()
        names = [[call for call, _, _ in wire.calls] for wire in (forward, backward, update)]
        # In the first step ranks gather digests of their delayed states, and reduce the amaxes of the first scales.
        reduces = ["allgather", "allreduce", "allreduce"] if name == "DelayedScaling" and step == 0 else ["allreduce"]
        if not stage:
            assert names == [[], [], ["alltoall", *reduces, "allgather"]]
            continue
        assert names[0] == ["allgather"] * 4
        # From the second step on the last unit stays for backward, and each gather begins before it is needed.
        later = ["allgather", "alltoall", "allgather", "alltoall", "allgather", "alltoall", "alltoall"]
        assert names[1] == (later if step else ["allgather", "alltoall"] * 4)
        assert names[2] == reduces
        sent = sum(elements for _, dtype, elements in forward.calls if dtype == torch.uint8)
        assert sent == sum(flat.part for flat in optimizer._flats), "bytes, those of this rank alone"


@pytest.mark.timeout(60)
@on_ranks(3)
@every_stage
def test_ranks_without_elements_take_part(stage):
    model = convert(nn.Linear(2, 2, bias=False).to(torch_ranks.device), CurrentScaling())
    optimizer = ZeroOptimizer(model, lr=0.25, shard_weights=stage)
    assert [flat.lengths for flat in optimizer._flats] == [[4, 0, 0]]
    before = optimizer.full_weights()["weight"]
    for _ in range(2):
        model(torch.ones(1, 2, device=torch_ranks.device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.allclose(optimizer.full_weights()["weight"], before - 0.5)  # Steps are lr but for eps, 1e-8.
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.step()  # Without any gradient: momentum alone.


@on_ranks(2)
@every_stage
def test_state_is_exact(stage):
    recipe = RECIPES["DelayedScaling"]
    model = model_of(recipe)
    optimizer = ZeroOptimizer(model, **OPTIONS, shard_weights=stage)
    train(model, optimizer, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    losses = train(model, optimizer, range(2, 5))
    other = model_of(recipe, seed=1)
    resumed = ZeroOptimizer(other, **OPTIONS, shard_weights=stage)
    for name, buffer in other.named_buffers():
        buffer.copy_(buffers[name])
    resumed.load_state_dict(state)
    assert train(other, resumed, range(2, 5)) == losses
    if dist.get_rank() == 1:
        state["zero"]["rank"] = 0
    with pytest.raises(ValueError, match=r"rank 0\) does not match layout|cannot load its state"):
        resumed.load_state_dict(state)


@on_ranks(1, 2)
@pytest.mark.parametrize("stage", [1, 3])
def test_weights_of_4_bits_beside_each_other(stage):
    """Codes of the first end where a unit of memory ends, and the second has its own."""
    layers = nn.Sequential(nn.Linear(128, 128, bias=False), nn.Linear(128, 64, bias=False)).to(torch_ranks.device)
    wanted = [reference.quantize(FRONT.numpy(layer.weight.detach()), NVFP4().weight).rowwise for layer in layers]
    model = nn.Sequential(convert(layers, NVFP4()))
    units = {"units": [model[0]]} if stage == 3 else {}
    ZeroOptimizer(model, shard_weights=stage == 3, **units)
    seen = []
    for layer in layers:
        layer.register_forward_pre_hook(lambda layer, _: seen.append(layer.weight.rowwise.data.clone()))
    with torch.no_grad():
        model(torch.ones(2, 128, device=torch_ranks.device))
    for got, want in zip(seen, wanted, strict=True):
        assert_bits_equal(FRONT.numpy(got), want.data, "codes")


@on_ranks(2)
def test_units():
    """Units of one layer, of several, of all; recomputed activations; a weight that two layers share."""
    recipe = RECIPES["MXFP8"]
    losses = with_zero(recipe, 3, torch.float32)[0]
    model = model_of(recipe)
    optimizer = ZeroOptimizer(model, **OPTIONS, shard_weights=True, units=[*model[1:3], model[1].up])
    assert len(optimizer._flats) == 4
    seen = []
    handle = model[1].up.register_forward_hook(lambda module, *_: seen.append(module.weight), prepend=True)
    loss_of(model, 0, 0)
    handle.remove()
    assert isinstance(seen[0], QuantizedTensor)
    codes = seen[0].rowwise.data.untyped_storage()
    assert codes.size() == 0, "nothing of the whole is kept"
    assert train(model, optimizer, range(3)) == losses
    assert codes.size() == 0
    with torch.no_grad():
        loss_of(model, 0, 0)
    assert codes.size() == 0
    for module in (model, *model):
        model = model_of(recipe)
        for i in (1, 2):
            block, forward = model[i], model[i].forward
            block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
        optimizer = ZeroOptimizer(model, **OPTIONS, shard_weights=True, units=None if module is model else list(model))
        assert train(model, optimizer, range(3)) == losses
    shared = []
    for stage, units in [(False, None), (True, [])]:
        model = model_of(recipe)
        model[2].up.weight = model[1].up.weight
        optimizer = ZeroOptimizer(model, **OPTIONS, shard_weights=stage, units=units)
        assert model[2].up.weight is model[1].up.weight
        shared.append(train(model, optimizer, range(3)))
    assert shared[0] == shared[1]
    model = model_of(recipe)
    model[2].up.weight = model[1].up.weight
    with pytest.raises(ValueError, match=r"1.up.weight \(shared\) is shared by several units"):
        ZeroOptimizer(model, shard_weights=True)


@on_ranks(2)
@every_stage
def test_settings(stage):
    """Groups are the same on all ranks, so that schedules act on all alike."""
    model = model_of(RECIPES["CurrentScaling"])
    optimizer = ZeroOptimizer(
        model, 0.5, shard_weights=stage, settings=lambda name, p: {"lr": 0.0} if p.ndim < 2 else {}, weight_decay=0.1
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = optimizer.full_weights()
    train(model, optimizer, range(1))
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.0]
    for name, weight in optimizer.full_weights().items():
        assert torch.equal(weight, before[name]) == (weight.ndim < 2), name
    rates = [torch.tensor(0.0) for _ in range(2)]  # They are equal now, and a warm-up may change each in its own way.
    optimizer = ZeroOptimizer(
        model_of(RECIPES["CurrentScaling"]), shard_weights=stage, settings=lambda name, p: {"lr": rates[p.ndim < 2]}
    )
    assert [group["lr"] is rate for group, rate in zip(optimizer.param_groups, rates, strict=True)] == [True] * 2


@pytest.mark.timeout(60)
@on_ranks(2)
def test_refusals():
    rank = dist.get_rank()
    width = 64 if rank == 1 else 32
    with pytest.raises(ValueError, match=r"rank [01] differs from rank [01]: it has another model or other options"):
        ZeroOptimizer(model_of(RECIPES["CurrentScaling"], width=width))
    recipe, options = RECIPES["CurrentScaling"], {"parity": "weight"} if rank == 1 else {}
    with pytest.raises(ValueError, match=r"parity \('weight'\) is not|rank 1 differs from rank 0"):
        ZeroOptimizer(model_of(recipe), **options)
    with pytest.raises(ValueError, match=r"lr \(-1\) must be a number|rank 1 differs from rank 0"):
        ZeroOptimizer(model_of(recipe), lr=-1 if rank == 1 else 1)
    for bad, error, message in [
        ({"units": [nn.Linear(1, 1)], "shard_weights": True}, ValueError, r"units \(Linear\) is not a module"),
        ({"betas": (1.0, 0.9)}, ValueError, r"betas\[0\] \(1.0\) must be a number"),
        ({"exp_avg_dtype": torch.int8}, TypeError, r"exp_avg_dtype"),
        ({"settings": 3}, TypeError, r"settings \(3\) is not a function"),
        ({"settings": lambda name, p: {"params": [p]}}, ValueError, r"settings \('params'\) is not an option of Adam"),
    ]:
        with pytest.raises(error, match=message):
            ZeroOptimizer(model_of(recipe), **bad)
    frozen = model_of(recipe).requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter that requires grad"):
        ZeroOptimizer(frozen)


@on_ranks(2)
@every_stage
def test_several_backward_passes(stage):
    """Gradients of two backward passes are added, and a layer without one does not stop a step."""
    model = model_of(RECIPES["BlockScaling"])
    optimizer = ZeroOptimizer(model, **OPTIONS, shard_weights=stage)
    for step in range(2):
        optimizer.zero_grad()
        for micro in range(2):
            loss_of(model, 2 * step + micro, dist.get_rank()).backward()
        model[1].up(torch.ones(2, 32, device=torch_ranks.device)).sum().backward()
        optimizer.step()
    assert all(w.isfinite().all() for w in optimizer.full_weights().values())
    assert all(type(parameter.grad) is GradientPlaceholder for parameter in model.parameters()), (
        "no memory is left there"
    )
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
