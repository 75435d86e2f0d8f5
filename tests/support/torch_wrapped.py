"""Models in FSDP1 or DistributedDataParallel beside one process that has the batches of all ranks."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from qshard import formats
from qshard.recipes import MXFP8, NVFP4, CurrentScaling, DelayedScaling
from qshard.torch_bridge import scaling_state, update_scales
from support import torch_ranks
from support.torch_models import batch, linears

LR = 0.125  # A power of two: a step rounds once, with fused multiply-adds or without.
NEAREST = NVFP4(gradient=formats.NVFP4.with_options(hadamard=True))
RECIPES = {"current": CurrentScaling(), "delayed": DelayedScaling(history=2), "mxfp8": MXFP8(), "nvfp4": NEAREST}
FLAT = {"orig": True, "flat": False}
ORIG = pytest.mark.parametrize("orig", FLAT.values(), ids=FLAT)
HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


def device():
    return torch.device("cuda", torch.cuda.current_device()) if torch_ranks.device == "cuda" else torch.device("cpu")


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=LR)


def in_fsdp1(model, orig=True, strategy=ShardingStrategy.FULL_SHARD, units=True, **options):
    """With `units` each child that has parameters is one, and the model another one."""
    options = {"use_orig_params": orig, "sharding_strategy": strategy, "device_id": device(), **options}
    if strategy in HYBRID:
        options["device_mesh"] = torch_ranks.mesh()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*NO_SHARD.* is deprecated", FutureWarning)
        for name, child in model.named_children():
            if units and next(child.parameters(), None) is not None:
                setattr(model, name, FullyShardedDataParallel(child, **options))
        return FullyShardedDataParallel(model, **options)


def values(model):
    """Whole parameters, as copies, by the names of a plain model."""
    is_sharded = isinstance(model, FullyShardedDataParallel)
    # On GPUs autograd says so of plain layers too, once their flat parameter has been summoned.
    warnings.filterwarnings("ignore", ".*AccumulateGrad node's stream does not match", UserWarning)
    whole = FullyShardedDataParallel.summon_full_params(model, writeback=False) if is_sharded else None
    with whole or contextlib.nullcontext():
        return {
            name.replace("_fsdp_wrapped_module.", "")
            .replace("_checkpoint_wrapped_module.", "")
            .removeprefix("module."): (p.detach() + 0)
            for name, p in model.named_parameters()
        }


def follow(model, optimizer, one, *, steps=3, micro_batches=1, clip=None, dtype=torch.float32, sync=True):
    """Train `model` by SGD, and assert that it matches `one`, a model of one process with the same recipe.

    Outputs and gradients of x have the same bits, and so do codes of weights after each step. With two ranks the sum of
    gradients has no order, so weights and the scaling state have the same bits too.

    `one` has the dtype in which layers compute, and takes its weights from `model` in each step. With `sync=False`
    gradients are reduced in the last micro-batch only.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    columns = linears(one)[0].in_features
    for step in range(steps):
        masters = values(model)
        one.load_state_dict(masters)
        sums = {name: torch.zeros_like(p) for name, p in masters.items()}
        optimizer.zero_grad()
        for each in range(world):
            one.zero_grad()
            for micro in range(micro_batches):
                x = batch((step * micro_batches + micro) * world + each, columns).to(dtype).requires_grad_()
                y = one(x)
                y.square().mean().backward()
                if each == rank:
                    mine, last = x.detach().clone().requires_grad_(), micro == micro_batches - 1
                    with contextlib.nullcontext() if sync or last else model.no_sync():
                        made = model(mine)
                        made.square().mean().backward()
                    assert torch.equal(made, y), f"y of step {step}"
                    assert torch.equal(mine.grad, x.grad), f"gradient of x of step {step}"
            for name, p in one.named_parameters():
                sums[name] += p.grad
        means = {name: total / world for name, total in sums.items()}
        if clip is not None:
            norm = model.clip_grad_norm_(clip) if hasattr(model, "clip_grad_norm_") else None
            if norm is None:
                norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
            total = torch.stack([mean.norm() for mean in means.values()]).norm()
            assert total > clip, "else nothing is clipped"
            torch.testing.assert_close(norm, total, rtol=1e-5, atol=0)  # Sums of squares in another order.
            means = {name: mean * (clip / (total + 1e-6)) for name, mean in means.items()}
        optimizer.step()
        for update in (model, one):
            update_scales(update)
        expected = {name: p - LR * means[name] for name, p in masters.items()}
        exact = world == 2 and clip is None and not (sync and micro_batches > 1)
        # Of more ranks, of a clipped step and of sums of means, last bits are of the order in which gradients add up.
        tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-7}
        for name, p in values(model).items():
            torch.testing.assert_close(p, expected[name], **tolerance)
            assert not torch.equal(p, masters[name]), name
        states, others = scaling_state(model), scaling_state(one)
        assert states.keys() == others.keys()
        for name, state in states.items():
            assert torch.equal(state, others[name]), name
