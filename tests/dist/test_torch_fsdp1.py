"""FSDP1 around converted layers: the codes of one device, in every strategy; scales, memory, checkpoints, refusals."""

import contextlib
import copy
import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy

from qshard.recipes import MXFP8, NVFP4, CurrentScaling, DelayedScaling
from qshard.torch_bridge import convert, prepare_modules_for_fsdp1, update_scales
from support import torch_ranks
from support.torch_models import FRONT, SIZES, batch, linears, model_of, sizes_for
from support.torch_ranks import on_ranks

FULL, GRAD_OP, NO_SHARD = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD
HYBRID, HYBRID_2 = ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2
STRATEGIES = {"full": FULL, "grad_op": GRAD_OP, "no_shard": NO_SHARD}
RECIPES = [CurrentScaling(), DelayedScaling(), MXFP8(), NVFP4()]


def wrapped(model, orig=True, strategy=FULL, units=True, **options):
    """Each child that has parameters is a unit, and the model another one."""
    options = {"use_orig_params": orig, "sharding_strategy": strategy, **options}
    options.setdefault("device_id", torch.device(torch_ranks.device, dist.get_rank() if FRONT.device != "cpu" else None) if torch_ranks.device == "cuda" else torch.device("cpu"))
    if strategy in (HYBRID, HYBRID_2):
        options["device_mesh"] = torch_ranks.mesh()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*NO_SHARD.*", FutureWarning)
        if units:
            for name, child in model.named_children():
                if next(child.parameters(), None) is not None:
                    setattr(model, name, FullyShardedDataParallel(child, **options))
        return FullyShardedDataParallel(model, **options)


def of_sizes(sizes, recipe=None, bias=True):
    model = model_of(bias=bias, sizes=sizes)
    return model if recipe is None else prepare_modules_for_fsdp1(convert(model, recipe))


def values(model):
    """Whole parameters, as copies, by the names of a plain model."""
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return {
            name.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for name, p in model.named_parameters()
        }
    

@pytest.mark.parametrize("orig", [True, False], ids=["orig", "flat"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2, 3)
def test_try(strategy, orig):
    recipe = CurrentScaling()
    model = wrapped(of_sizes(SIZES, recipe), orig, STRATEGIES[strategy])
    one = convert(model_of(bias=True), recipe)
    x = batch(dist.get_rank())
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(3):
        one.load_state_dict(values(model))
        xs = [x.clone().requires_grad_() for _ in range(2)]
        ys = [m(each) for m, each in zip((model, one), xs)]
        assert torch.equal(*ys)
        for y in ys: y.square().sum().backward()
        assert torch.equal(xs[0].grad, xs[1].grad)
        opt.step()
        opt.zero_grad()
