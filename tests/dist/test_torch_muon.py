"""`qshard.torch_bridge.Muon` on shards: the bits of one process for every number of ranks and every sharding."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from qshard.recipes import CurrentScaling
from qshard.torch_bridge import Muon, convert
from support import torch_ranks
from support.torch_models import Wire, assert_gathers_the_whole, batch, model_of, shard
from support.torch_ranks import on_ranks, run

OPTIONS = {"lr": 0.02, "adamw": {"lr": 1e-3}}
SHAPES = {
    "wide": (32, 48),
    "tall": (37, 12),
    "few_rows": (3, 16),
    "stack": (10, 48, 16),
    "lm_head": (20, 16),
    "bias": (7,),
}


SHAPES_OF_MUON = ("wide", "tall", "few_rows", "stack")


def gradient(i, shape, step):
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + i))


def train(model, optimizer, steps=range(3)):
    """Take steps with gradients that do not depend on the number of ranks."""
    for step in steps:
        for i, p in enumerate(model.parameters()):
            grad = gradient(i, p.shape, step).to(p.dtype)
            p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if isinstance(p, DTensor) else grad
        optimizer.step()


class Parameters(nn.Module):
    """A module with a parameter for each of `SHAPES`, alike on all ranks."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        for i, (name, shape) in enumerate(SHAPES.items()):
            values = gradient(i, shape, -1).to(dtype)
            self.register_parameter(name, nn.Parameter(values))


def full(tensor):
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return getattr(tensor, "shard", tensor).detach()


def assert_same_bits(model, optimizer, alone, its_optimizer):
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert torch.equal(full(p), q), name
        states, its_states = optimizer.state[p], its_optimizer.state[q]
        assert states.keys() == its_states.keys()
        for key in states:
            assert torch.equal(full(states[key]), its_states[key]), (name, key)


IN_FP8 = {"ns_fp8_steps": 3, "ns_fp8_min_side": 16}
KINDS = {
    "float32": (torch.float32, {}),
    "bfloat16": (torch.bfloat16, {"adjust_lr_fn": "match_rms_adamw"}),
    "masters": (torch.bfloat16, {"master_weights": "float32", "nesterov": False}),
    "fp8": (torch.float32, IN_FP8),
}


@pytest.mark.each_value
@on_ranks(1, 2, 3, 4, (2, 2))
@pytest.mark.parametrize(("dtype", "options"), KINDS.values(), ids=KINDS)
def test_bits_do_not_depend_on_ranks(dtype, options):
    """Uneven and empty shards, stacks, and parameters of AdamW; a 2-D mesh has replicas.

    In FP8, `wide` and the two batches of `stack` fit.
    """
    model, alone = Parameters(dtype), Parameters(dtype)
    fully_shard(model, mesh=torch_ranks.mesh())
    optimizers = [Muon(each.named_parameters(), **OPTIONS, **options) for each in (model, alone)]
    for each, optimizer in zip((model, alone), optimizers, strict=True):
        train(each, optimizer)
    assert_same_bits(model, optimizers[0], alone, optimizers[1])


@on_ranks((2, 2))
@pytest.mark.parametrize(
    "placements", [(Shard(0), Shard(1)), (Shard(1), Shard(0)), (Replicate(), Shard(1)), (Shard(0), Shard(0))], ids=str
)
def test_bits_do_not_depend_on_the_sharding(placements):
    """Boxes of any mesh, as tensor and expert parallelism have: each matrix is joined from the boxes of all ranks."""
    mesh, alone, model = torch_ranks.mesh(), Parameters(), Parameters()
    for name, p in list(model.named_parameters()):
        own = placements if p.ndim > 1 else (Replicate(), Replicate())
        setattr(model, name, nn.Parameter(distribute_tensor(p.detach(), mesh, own)))
    optimizers = [Muon(each.named_parameters(), **OPTIONS) for each in (model, alone)]
    for each, optimizer in zip((model, alone), optimizers, strict=True):
        train(each, optimizer)
    assert_same_bits(model, optimizers[0], alone, optimizers[1])


@on_ranks(4)
def test_parameters_on_several_meshes():
    """Pairs of ranks own the matrices of their mesh, which has no group of all ranks."""
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    alone, model = Parameters(), Parameters()
    for i, (name, p) in enumerate(list(model.named_parameters())):
        mesh = whole["ab"[i % 2]]
        setattr(model, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])))
    optimizers = [Muon(each.named_parameters(), **OPTIONS) for each in (model, alone)]
    for each, optimizer in zip((model, alone), optimizers, strict=True):
        train(each, optimizer)
    assert_same_bits(model, optimizers[0], alone, optimizers[1])


@on_ranks(3)
def test_buckets_overlap():
    """Small buckets, so that messages of three run at a time: two all-to-alls a bucket, and the same bits."""
    model, alone = Parameters(), Parameters()
    fully_shard(model, mesh=torch_ranks.mesh())
    optimizers = [Muon(each.named_parameters(), **OPTIONS) for each in (model, alone)]
    optimizers[0].owned_elements = 1
    train(model, optimizers[0], range(2))
    with Wire() as wire:
        train(model, optimizers[0], range(2, 3))
    train(alone, optimizers[1])
    assert [name for name, *_ in wire.calls if "scatter" not in name] == ["alltoall"] * 2 * len(SHAPES_OF_MUON)
    assert_same_bits(model, optimizers[0], alone, optimizers[1])


@on_ranks(3)
def test_replicas_divide_the_work():
    """Under DistributedDataParallel with `group`, a matrix is sent once, as a result, to each other rank."""
    model, alone = Parameters(), Parameters()
    optimizers = [
        Muon(each.named_parameters(), **OPTIONS, group=g) for each, g in ((model, dist.group.WORLD), (alone, None))
    ]
    train(model, optimizers[0], range(2))
    with Wire() as wire:
        train(model, optimizers[0], range(2, 3))
    assert [name for name, *_ in wire.calls] == ["alltoall"]
    with Wire() as wire:
        train(alone, optimizers[1])
    assert not wire.calls
    assert_same_bits(model, optimizers[0], alone, optimizers[1])


@pytest.mark.parametrize("primary", [False, True])
@on_ranks(3)
def test_a_converted_model(primary):
    """Codes follow the step, of values and of primary weights; a step is two all-to-alls."""
    model, alone = (convert(model_of(True), CurrentScaling(), primary=primary and i == 0) for i in range(2))
    shard(model)
    optimizers = [Muon(each.named_parameters(), **OPTIONS) for each in (model, alone)]
    model(batch()).sum().backward()
    for each, optimizer in zip((model, alone), optimizers, strict=True):
        train(each, optimizer, range(2))
    with Wire() as wire:
        train(model, optimizers[0], range(2, 3))
    train(alone, optimizers[1], range(2, 3))
    assert [name for name, *_ in wire.calls if "scatter" not in name] == ["alltoall"] * 2 + ["allreduce"] * primary
    for p, q in zip(model.state_dict().values(), alone.parameters(), strict=True):
        assert torch.equal(full(p), full(q))
    if not primary:
        assert_gathers_the_whole(model)


def saves(folder):
    model = shard(convert(model_of(True), CurrentScaling()))
    optimizer = Muon(model.named_parameters(), **OPTIONS, **IN_FP8, rules={"0.weight": "adamw"})
    train(model, optimizer, range(2))
    dcp.save(
        {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder
    )


def loads(folder):
    model, alone = (convert(model_of(True), CurrentScaling()) for _ in range(2))
    shard(model)
    optimizer, its_optimizer = (
        Muon(each.named_parameters(), **OPTIONS, **options, rules={"0.weight": "adamw"})
        for each, options in ((model, {}), (alone, IN_FP8))
    )
    train(alone, its_optimizer)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    train(model, optimizer, range(2, 3))
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(full(p), full(q))
        assert optimizer.state[p].keys() == its_optimizer.state[q].keys()


@pytest.mark.parametrize(("saver", "loader"), [(3, (2, 2)), (2, 1)], ids=str)
def test_a_checkpoint_goes_to_other_ranks(saver, loader, tmp_path):
    run(saver, saves, folder=tmp_path)
    run(loader, loads, folder=tmp_path)


@on_ranks(2)
def test_ranks_that_differ_raise_on_every_rank():
    rank = dist.get_rank()
    model = Parameters()
    fully_shard(model, mesh=torch_ranks.mesh())
    optimizer = Muon(model.named_parameters(), **OPTIONS)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    if rank == 1:
        model.tall.grad = None
    before = copy.deepcopy(full(model.wide))
    text = r"Muon: rank 0 of 2 would update tall \(37, 12\) \(float32\) with a gradient, and rank 1 tall .* without a"
    with pytest.raises(ValueError, match=text):
        optimizer.step()
    model.tall.grad = torch.zeros_like(model.tall)
    for setting in ({"momentum": 0.9 + 0.05 * rank}, {"ns_fp8_steps": rank}, {"ns_fp8_min_side": rank}):
        other = Muon(model.named_parameters(), **OPTIONS, **setting)
        with pytest.raises(ValueError, match=r"rank 0 of 2 would update wide .* with settings .*, and rank 1 with"):
            other.step()
    optimizer.step()
    assert torch.equal(full(model.wide), before * (1 - 0.02 * 0.1))
