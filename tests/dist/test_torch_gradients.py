"""Gradients in one process, under DDP and under FSDP2 are the same bits: the codes are, and so are the products."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from qshard.torch_bridge import convert
from support.formats import GATHERED
from support.torch_models import batch, linears, model_of, shard, sizes_for
from support.torch_ranks import on_ranks


@pytest.mark.each_value
@pytest.mark.parametrize("name", GATHERED)
@on_ranks(1, 2)
def test_gradients_of_one_process_of_ddp_and_of_fsdp2(name):
    """Each rank has rows of its own, whose scales are its own: what is reduced is the mean of what ranks find alone.

    Of two numbers, the mean is the same in any order.
    """
    recipe = GATHERED[name]
    sizes = sizes_for(recipe)
    alone = convert(model_of(sizes=sizes), recipe)
    parallel, sharded = copy.deepcopy(alone), shard(copy.deepcopy(alone))
    with warnings.catch_warnings():
        parallel = DistributedDataParallel(parallel)
    x, made = batch(dist.get_rank(), sizes[0]), []
    for model in (alone, parallel, sharded):
        model(x).square().sum().backward()
        made.append([layer.weight.grad for layer in linears(model)])
    for mine, of_ddp, of_fsdp in zip(*made, strict=True):
        dist.all_reduce(mine)
        mean = mine / dist.get_world_size()
        assert torch.equal(of_ddp, mean)
        assert torch.equal(of_fsdp.full_tensor(), mean)
