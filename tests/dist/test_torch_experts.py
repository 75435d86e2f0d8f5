"""Converted experts in 3-D parameters under FSDP2, DDP and ZeRO: the rows of a rank, as in one process."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from qshard.torch_bridge import ZeroOptimizer, convert
from support import torch_ranks
from support.experts import GatedExperts, GroupedExperts, Mixture, OpenExperts
from support.torch_models import Wire
from support.torch_ranks import on_ranks

KINDS = [GatedExperts, OpenExperts, GroupedExperts]


def model_of(kind, recipe):
    torch.manual_seed(0)
    model = Mixture(kind, sizes=(6, 128, 128)).to(torch_ranks.device)
    if kind is GroupedExperts:  # It casts weights to bfloat16 before the product, and FSDP2 gathers codes of shards.
        with torch.no_grad():
            for weight in model.experts.parameters():
                weight.copy_(weight.bfloat16())
    return convert(model, {"router": None, "head": None, "*": recipe})


def loss_of(model, rank):
    x = torch.randn(32, 128, generator=torch.Generator().manual_seed(rank)).to(torch_ranks.device)
    return model(x).square().mean()


def gradients_of(kind, recipe):
    """The mean over ranks, in one process."""
    model, world = model_of(kind, recipe), dist.get_world_size()
    for rank in range(world):
        (loss_of(model, rank) / world).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def assert_near(model, expected):
    for name, parameter in model.named_parameters():
        grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        want = expected[name.removeprefix("module.")]
        assert (grad - want).norm() <= 1e-5 * want.norm(), name


@on_ranks(2, 4)
@pytest.mark.parametrize("recipe", ["CurrentScaling", "MXFP8"])
@pytest.mark.parametrize("kind", KINDS)
def test_fsdp2(kind, recipe):
    """FSDP2 shards experts evenly or not, and gathers codes of the experts' weights."""
    model, rank, mesh = model_of(kind, recipe), dist.get_rank(), torch_ranks.mesh()
    for module in (model.experts, model):
        fully_shard(module, mesh=mesh)
    with Wire() as wire:
        loss = loss_of(model, rank)
    assert torch.uint8 in {dtype for dtype, _ in wire.of("allgather")}
    assert torch.equal(loss, loss_of(model_of(kind, recipe), rank))
    loss.backward()
    assert_near(model, gradients_of(kind, recipe))


@on_ranks(2)
def test_fsdp2_with_mixed_precision():
    """Codes are of the float32 shards, and the products have the dtype of the policy."""
    model, mesh = model_of(GatedExperts, "CurrentScaling"), torch_ranks.mesh()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for module in (model.experts, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    x = torch.randn(32, 128).to(torch_ranks.device)
    with Wire() as wire:
        y = model(x)
    sent = wire.of("allgather")  # The router and the head are gathered as values.
    assert {dtype for dtype, _ in sent} == {torch.uint8, torch.bfloat16}
    assert sum(size for dtype, size in sent if dtype == torch.uint8) >= 6 * 3 * 128 * 128 // 2
    assert y.dtype == torch.bfloat16


@on_ranks(2)
def test_seeds_of_ranks_differ():
    """Ranks with equal buffers draw different bits for the same rows."""
    model = model_of(GatedExperts, "NVFP4")
    loss_of(model, 0).backward()
    grads = [torch.empty_like(model.experts.gate_up_proj) for _ in range(2)]
    dist.all_gather(grads, model.experts.gate_up_proj.grad)
    assert not torch.equal(*grads)


@on_ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_ddp(kind):
    model = DistributedDataParallel(model_of(kind, "CurrentScaling"))
    loss_of(model, dist.get_rank()).backward()
    assert_near(model, gradients_of(kind, "CurrentScaling"))


@on_ranks(1, 2)
@pytest.mark.parametrize("kind", KINDS)
def test_zero(kind):
    """Both stages have the same bits; experts are a unit."""
    results = []
    for stage in (False, True):
        model = model_of(kind, "CurrentScaling")
        optimizer = ZeroOptimizer(model, lr=1e-2, shard_weights=stage)
        losses = []
        for _ in range(3):
            loss = loss_of(model, dist.get_rank())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < losses[0]
        results.append((losses, optimizer.full_weights()))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(value, results[1][1][name]) for name, value in results[0][1].items())
