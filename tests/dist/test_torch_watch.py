"""`numerics_of` of sharded models, over gloo ranks: rows are those of one process that has all of it."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from qshard.recipes import Role
from qshard.torch_bridge import convert, numerics_of, update_scales
from support import torch_ranks
from support.formats import RECIPES
from support.torch_ranks import on_ranks, rarely

SHAPE = (48, 64)  # of x, on all ranks together


def make_model(recipe, features=(64, 96, 32)):
    torch.manual_seed(0)
    layers = [nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(features)]
    return convert(nn.Sequential(*layers), recipe).to(torch_ranks.device)


def assert_alike(rows, want, counts=("elements", "zeros_made", "subnormal", "saturated", "amax")):
    assert [(row.layer, row.role, row.format) for row in rows] == [(row.layer, row.role, row.format) for row in want]
    for row, whole in zip(rows, want, strict=True):
        for name in (*counts, "scale_low", "scale_high"):
            assert getattr(row, name) == pytest.approx(getattr(whole, name), rel=1e-6), (row.layer, row.role, name)
        assert row.sqnr_db == pytest.approx(whole.sqnr_db, rel=1e-4, nan_ok=True)


@on_ranks(3, (2, 2), *rarely(1, 2))
def test_fsdp2():
    """All ranks have x that differ; each is scaled by its own amax, but for blocks. Weights are those of the whole."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for recipe in RECIPES.values():
        if recipe.weight.gather_refusal is not None:
            continue
        model, whole = make_model(recipe), make_model(recipe)
        fully_shard(model, mesh=torch_ranks.mesh())
        torch.manual_seed(1)
        x = torch.randn(SHAPE).to(torch_ranks.device)
        part = x[rank * 48 // ranks : (rank + 1) * 48 // ranks]
        with numerics_of(model) as seen:
            (model(part).square().sum() * ranks).backward()
        with numerics_of(whole, group=dist.new_group([rank], use_local_synchronization=True)) as alone:
            whole(x).square().sum().backward()
        rows, want = seen.stats(), alone.stats()
        weights = [[row for row in each.rows if row.role is Role.WEIGHT] for each in (rows, want)]
        assert_alike(*weights)
        assert sum(row.elements for row in rows.rows) == sum(row.elements for row in want.rows)
        assert rows.of("0", Role.ACTIVATION).amax == x.abs().max()
        gathered = [None] * ranks
        dist.all_gather_object(gathered, rows)
        for other in gathered:
            assert repr(other) == repr(rows)  # On all ranks the same; a NaN is itself.
        if ranks == 1 or recipe.activation.block is not None and recipe.activation.scaling.global_scale is None:
            assert_alike([rows.of("0", Role.ACTIVATION)], [want.of("0", Role.ACTIVATION)])
        if recipe.stateful:
            update_scales(model)


@on_ranks(2)
def test_tensor_parallelism():
    """DTensors: one scale serves all parts of x and of a gradient."""
    mesh = init_device_mesh(torch_ranks.device, (2,))
    for recipe in ("CurrentScaling", "MXFP8"):
        model, whole = make_model(recipe, (64, 128, 64)), make_model(recipe, (64, 128, 64))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        torch.manual_seed(1)
        x = torch.randn(SHAPE).to(torch_ranks.device)
        with numerics_of(model) as seen:
            model(x).square().sum().backward()
        with numerics_of(whole, group=dist.new_group([dist.get_rank()], use_local_synchronization=True)) as alone:
            whole(x).square().sum().backward()
        rows, want = seen.stats(), alone.stats()
        assert_alike([rows.of(i, Role.WEIGHT) for i in "01"], [want.of(i, Role.WEIGHT) for i in "01"])
        cut = rows.of("1", Role.ACTIVATION)  # of which each rank has half
        assert cut.scale_high == pytest.approx(want.of("1", Role.ACTIVATION).scale_high, rel=1e-6)
        assert cut.elements == want.of("1", Role.ACTIVATION).elements
        assert rows.of("0", Role.ACTIVATION).elements == 2 * x.numel()  # which both have


@on_ranks(2)
def test_a_layer_that_one_rank_alone_calls():
    model = make_model("MXFP8")
    with numerics_of(model) as seen:
        if dist.get_rank():
            model(torch.ones(32, 64))
    assert seen.stats().of("0", Role.ACTIVATION).calls == 1
