"""`MoE` over ranks: under FSDP2 and DDP, against one process with the tokens of all ranks."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from qshard.torch_bridge import (
    MoE,
    QuantizedTensor,
    WithMasters,
    ZeroOptimizer,
    convert,
    scaling_state,
    update_scales,
)
from support import torch_ranks
from support.formats import GATHERED, nearest
from support.pairs import turns
from support.torch_models import Wire
from support.torch_ranks import on_ranks

WIDTH, HIDDEN, EXPERTS, TOKENS = 128, 256, 5, 48


class Block(nn.Module):
    """A residual block of experts."""

    def __init__(self, recipe, stacked):
        super().__init__()
        options = {"num_experts": EXPERTS, "top_k": 2, "shared_intermediate_size": 128, "stacked": stacked}
        self.moe = MoE(WIDTH, HIDDEN, recipe=recipe, **options)

    def forward(self, x):
        return x + self.moe(x)


def model_of(recipe, stacked=False):
    torch.manual_seed(0)
    return Block(recipe, stacked).to(torch_ranks.device)


def tokens(rank, step=0):
    """Return tokens of a rank, which the router sends to few experts: some get none."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(TOKENS, WIDTH, generator=generator) / 4 + torch.randn(WIDTH, generator=generator)
    return x.to(torch_ranks.device)


def loss_of(model, rank, step=0):
    return model(tokens(rank, step)).square().mean()


def wholes(model):
    return [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]


def mean_over_ranks(model, step):
    """The losses of all ranks in one process, with the mean of their gradients."""
    losses = []
    for rank in range(dist.get_world_size()):
        loss = loss_of(model, rank, step)
        loss.backward()
        losses.append(loss.item())
    for parameter in model.parameters():
        parameter.grad /= dist.get_world_size()
    return losses


# Relative to the norm. Sums over ranks are in another order, so a few codes of the next step move to a neighbour.
ERROR = 1e-3


@turns(1, name=list(GATHERED), world=[2, 3])
@on_ranks()
def test_fsdp2_is_one_process(name):
    recipe = nearest(GATHERED[name])
    one, many = model_of(recipe), model_of(recipe)
    for module in (many.moe, many):
        fully_shard(module, mesh=torch_ranks.mesh())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, many)]
    for step in range(2):
        losses = mean_over_ranks(one, step)
        loss = loss_of(many, dist.get_rank(), step)
        loss.backward()
        if not recipe.stateful or step == 0:
            assert loss.item() == pytest.approx(losses[dist.get_rank()], rel=ERROR)
            for a, b in zip(wholes(many), wholes(one), strict=True):
                assert (a - b).norm() <= ERROR * b.norm()
        for model, optimizer in zip((one, many), optimizers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            update_scales(model)


def losses_of(model, optimizer):
    """Return the losses of three steps, and the scaling state, with that of separate experts stacked."""
    losses = []
    for step in range(3):
        loss = loss_of(model, dist.get_rank(), step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        update_scales(model)
        losses.append(loss.item())
    state = scaling_state(model)
    found = {key: value for key, value in state.items() if ".experts.delayed." in key}
    for key in [key for key in state if ".experts.0." in key]:
        found[key.replace(".0.", ".")] = torch.stack([state[key.replace(".0.", f".{e}.")] for e in range(EXPERTS)])
    return losses, found


@on_ranks(2)
def test_delayed_scales_of_stacked_experts():
    """FSDP2, by experts, rows or columns, and both stages of ZeRO: bits of separate experts over three steps."""
    for wrap in (0, 1, 2, "zero", "zero 3"):
        found = []
        for stacked in (False, True):
            model = model_of("DelayedScaling", stacked)
            if isinstance(wrap, str):
                optimizer = ZeroOptimizer(model, lr=0.01, shard_weights=wrap == "zero 3")
            else:
                fully_shard(
                    model,
                    mesh=torch_ranks.mesh(),
                    shard_placement_fn=lambda p, axis=wrap: Shard(axis) if p.ndim == 3 else None,
                )
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            found.append(losses_of(model, optimizer))
        (losses, state), (others, other) = found
        assert losses == others
        assert len(state) == 2 * 3 * 4
        for key, value in state.items():
            assert torch.equal(value, other[key]), (wrap, key)


@turns(1, name=["CurrentScaling", "BlockScaling", "NVFP4"], world=[2, 3])
@on_ranks()
def test_stacked_experts_are_separate_ones(name):
    """FSDP2, both stages of ZeRO and DDP with one parameter for all experts: losses and gradients of a list."""
    recipe, rank = nearest(GATHERED[name]), dist.get_rank()
    one, many = model_of(recipe), [model_of(recipe, stacked=True) for _ in range(4)]
    for module in (many[0].moe, many[0]):
        fully_shard(module, mesh=torch_ranks.mesh())
    many[1] = DistributedDataParallel(many[1])
    optimizers = [ZeroOptimizer(model, lr=1e-3, shard_weights=i == 3) for i, model in enumerate(many[2:], 2)]
    with Wire() as wire:
        losses = [loss_of(model, rank) for model in many]
    assert torch.uint8 in {dtype for dtype, _ in wire.of("allgather")}
    means = mean_over_ranks(one, 0)
    for loss in losses:
        assert loss.item() == pytest.approx(means[rank], rel=ERROR)
        loss.backward()
    expected = {weight: p.grad for weight, p in one.named_parameters()}
    for layer in ("w13", "w2"):
        each = [expected.pop(f"moe.{layer}.experts.{i}.weight") for i in range(EXPERTS)]
        expected[f"moe.{layer}.experts.weight"] = torch.stack(each)
    for model in many[:2]:
        names = [each.removeprefix("module.") for each, _ in model.named_parameters()]
        found = dict(zip(names, wholes(model), strict=True))
        for weight, grad in expected.items():
            assert (found[weight] - grad).norm() <= ERROR * grad.norm(), weight
    for model, optimizer in zip(many[2:], optimizers, strict=True):
        optimizer.step()
        optimizer.zero_grad()
        assert loss_of(model, rank).item() < losses[0].item() + ERROR


@on_ranks(2)
def test_stacked_experts_as_primary_weights():
    """Codes as parameters, and a state dict with a weight for each expert."""
    found = []
    for primary in (False, True):
        model = model_of("MXFP8", stacked=True)
        if primary:
            convert(model, "MXFP8", primary=True)
        for module in (model.moe, model):
            fully_shard(module, mesh=torch_ranks.mesh())
        optimizer = WithMasters(model.parameters(), torch.optim.SGD, lr=0.1)
        found.append([])
        for step in range(3):
            loss = loss_of(model, dist.get_rank(), step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found[-1].append(loss.item())
    assert found[0] == found[1]
    model, listed = model_of("MXFP8", stacked=True), model_of("MXFP8")
    with torch.no_grad():
        for weight in listed.parameters():
            weight.mul_(0.5)
    model.load_state_dict(listed.state_dict())
    assert torch.equal(loss_of(model, 0), loss_of(listed, 0))


@on_ranks(2)
def test_codes_are_gathered():
    """Bytes on the wire: codes of all experts, and 4 bytes for each weight of the router."""
    model = model_of("CurrentScaling")
    for module in (model.moe, model):
        fully_shard(module, mesh=torch_ranks.mesh())
    with Wire() as wire:
        loss_of(model, 0)
    gathers = wire.of("allgather")  # The small ones are digests, once.
    assert {dtype for dtype, _ in gathers} == {torch.uint8}
    shards = sum(p.to_local().numel() for name, p in model.named_parameters() if "router" not in name)
    assert max(size for _, size in gathers) == shards + 4 * WIDTH * (EXPERTS + 1) // 2
    model.moe.unshard()
    assert all(isinstance(expert.weight, QuantizedTensor) for expert in model.moe.w13.experts)


@on_ranks(2)
def test_fsdp2_with_checkpointing():
    plain, saving = model_of("MXFP8"), model_of("MXFP8")
    for model in (plain, saving):
        fully_shard(model.moe, mesh=torch_ranks.mesh())
        fully_shard(model, mesh=torch_ranks.mesh())
    x = tokens(dist.get_rank())
    plain(x).square().mean().backward()
    checkpoint(saving, x, use_reentrant=False).square().mean().backward()
    for a, b in zip(wholes(saving), wholes(plain), strict=True):
        assert torch.equal(a, b)


@pytest.mark.each_value
@on_ranks(2, 3)
@pytest.mark.parametrize("name", ["CurrentScaling", "MXFP8"])
def test_ddp_with_accumulation(name):
    """Every parameter has a gradient on every rank, so nothing waits."""
    one = model_of(name)
    many = DistributedDataParallel(copy.deepcopy(one))
    for step in range(2):
        mean_over_ranks(one, 2 * step)
        first = [p.grad.clone() for p in one.parameters()]
        one.zero_grad()
        mean_over_ranks(one, 2 * step + 1)
        with many.no_sync():
            loss_of(many, dist.get_rank(), 2 * step).backward()
        loss_of(many, dist.get_rank(), 2 * step + 1).backward()
        for a, b, c in zip(wholes(many.module), wholes(one), first, strict=True):
            assert (a - b - c).norm() <= ERROR * (b + c).norm()
        for model in (one, many):
            model.zero_grad()


@on_ranks(2)
def test_zero():
    """Units of experts, and of the layers of the shared expert."""
    found = []
    for shard in (False, True):
        model = model_of("CurrentScaling")
        units = [model.moe.w13, model.moe.w2] if shard else None
        optimizer = ZeroOptimizer(model, lr=1e-3, shard_weights=shard, units=units)
        losses = []
        for _ in range(3):
            loss = loss_of(model, 0)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < losses[0]
        found.append(losses)
    assert found[0] == found[1]
