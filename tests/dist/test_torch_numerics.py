"""`qshard.numerics` of DTensors, over gloo ranks: statistics reduced, and those of the whole tensor."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from qshard.formats import FORMATS, NVFP4, Usage
from qshard.numerics import compare, report, stats
from qshard.torch_bridge import convert
from support import torch_ranks
from support.awkward import TAME, awkward_values
from support.stats import assert_same_stats
from support.torch_ranks import on_ranks, rarely


def values(shape, seed=0):
    return awkward_values(shape, seed, kinds=TAME)


def assert_of_the_whole(x, whole, seed=3):
    """Of every format that can hold it, both planes."""
    for usage in Usage.BOTH.planes:
        rows = compare(x, None, usage, seed=seed)
        assert len(rows) >= 4
        for s in rows:
            assert_same_stats(s, stats(whole, s.format, usage, seed=seed))


@on_ranks(3, (2, 2), *rarely(1, 2, 4))
def test_dtensors():
    """Even and uneven cuts, empty ranks, within blocks and between them, replicas."""
    mesh = torch_ranks.mesh()
    for shape, dim in (((96, 64), 0), ((96, 96), 1), ((96, 96), 0), ((2, 32, 32), 0), ((1, 64), 0)):
        whole = values(shape)
        placements = [Replicate()] * (mesh.ndim - 1) + [Shard(dim)]
        assert_of_the_whole(distribute_tensor(torch.from_numpy(whole), mesh, placements), whole)


@on_ranks((2, 2))
def test_two_axes_cut_a_tensor():
    mesh = torch_ranks.mesh()
    whole = values((80, 96))
    for placements in ([Shard(0), Shard(1)], [Shard(0), Shard(0)], [Replicate(), Replicate()], [Shard(1), Replicate()]):
        assert_of_the_whole(distribute_tensor(torch.from_numpy(whole), mesh, placements), whole)


@on_ranks(3, (2, 2), *rarely(1))
def test_weights_of_a_sharded_model():
    """Before and after a step of FSDP2; the values that ranks have, in bfloat16 too."""
    for dtype in (torch.float32, torch.bfloat16):
        model = nn.Sequential(nn.Linear(64, 96, dtype=dtype), nn.Linear(96, 32, dtype=dtype))
        convert(model, "MXFP8")
        fully_shard(model, mesh=torch_ranks.mesh())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            for layer in model:
                whole = layer.weight.full_tensor().detach()
                whole = getattr(whole, "shard", whole)
                for fmt in ("FP8_E4M3", "MXFP8_32x32", "NVFP4", "NVFP4_16x16"):
                    assert_same_stats(stats(layer.weight, fmt), stats(whole, fmt))
            model(torch.ones(32, 64, dtype=dtype, device=torch_ranks.device)).sum().backward()
            gradient = model[0].weight.grad
            assert_same_stats(stats(gradient, "FP8_E5M2"), stats(gradient.full_tensor(), "FP8_E5M2"))
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(4)
def test_weights_of_fsdp_and_tensor_parallelism():
    """Of a weight that both cut by rows, a rank has one run of them."""
    mesh = init_device_mesh(torch_ranks.device, (2, 2), mesh_dim_names=("fsdp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96, bias=False), nn.Linear(96, 64, bias=False))
    whole = [layer.weight.detach().clone() for layer in model]
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["fsdp"])
    for layer, weight in zip(model, whole, strict=True):
        assert_of_the_whole(layer.weight, weight)


@on_ranks(2)
def test_what_one_rank_has_beyond_others_counts_for_all():
    """The largest element, a NaN and a number beyond float32 on the last rank alone."""
    mesh = torch_ranks.mesh()
    whole = np.ones((64, 64))
    whole[-1, -3:] = 1e4, np.nan, 1e200
    x = distribute_tensor(torch.from_numpy(whole), mesh, [Shard(0)])
    for fmt in ("FP8_E4M3", "NVFP4", NVFP4.with_options(global_scale="row"), "MXFP8_E4M3"):
        assert_same_stats(stats(x, fmt), stats(whole, fmt))
    assert report(x, ["FP8_E4M3"]).title == "64 x 64, float64"


@on_ranks(2)
def test_mistakes_are_the_same_on_all_ranks():
    mesh = torch_ranks.mesh()
    partial = DTensor.from_local(torch.ones(4, 4), mesh, [Partial()])
    with pytest.raises(ValueError, match="is a DTensor with Partial placement"):
        stats(partial, "FP8_E4M3")
    with pytest.raises(TypeError, match="not an array of real numbers"):
        stats(distribute_tensor(torch.ones(4, 4, dtype=torch.complex64), mesh, [Shard(0)]), "FP8_E4M3")
    cut = distribute_tensor(torch.ones(36, 32), mesh, [Shard(0)])
    with pytest.raises(ValueError, match="not a whole number of"):
        stats(cut, "MXFP8_32x32")
    one = init_device_mesh(torch_ranks.device, (1,))
    if dist.get_rank() == 0:
        stats(distribute_tensor(torch.ones(4, 4), one, [Shard(0)]), "FP8_E4M3")


@on_ranks(2)
def test_all_formats_are_there():
    x = distribute_tensor(torch.ones(64, 64), torch_ranks.mesh(), [Shard(0)])
    assert [str(s.format) for s in compare(x)] == list(FORMATS)
