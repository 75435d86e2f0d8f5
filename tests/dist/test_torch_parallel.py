"""Tensor parallelism: `parallelize_module` over converted layers, alone and under FSDP2, against one process."""

import contextlib
import copy
import sys

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from qshard.formats import Usage
from qshard.recipes import MXFP8, NVFP4, BlockScaling, CurrentScaling, DelayedScaling, Recipe, Role
from qshard.torch_bridge import Linear, QuantizedTensor, ShardedWeight, convert, quantize, update_scales
from support import torch_ranks
from support.formats import GATHERED, MIXES, RECIPES, nearest
from support.torch_ranks import on_ranks

ALL = {**RECIPES, **MIXES}
every_recipe = pytest.mark.parametrize("name", ALL)


def tp_mesh():
    return mesh_of("tp")


def mesh_of(*names):
    return init_device_mesh(torch_ranks.device, torch_ranks.shape, mesh_dim_names=names)


def unit_of(recipe):
    """Cuts between these are between blocks, of all roles."""
    return 128 if any(recipe.format(role).block and 128 in recipe.format(role).block for role in Role) else 32


@contextlib.contextmanager
def quantized():
    """What layers quantize meanwhile: a role and its planes for each time."""
    linear_module = sys.modules["qshard.torch_bridge.linear"]  # The package has a function of this name.
    found, real = [], linear_module._planes

    def noting(x, recipe, usage, role, *others):
        made = real(x, recipe, usage, role, *others)
        found.append((role, {one: operand.parts for one, operand in made[0].items()}))
        return made

    linear_module._planes = noting
    try:
        yield found
    finally:
        linear_module._planes = real


def assert_part(local, whole, rank, world, cut):
    """`local` is what `rank` of `world` has of `whole`, to the bit: all of it, or an even part of the axis that is cut."""
    assert set(local) == set(whole)
    for usage, plane in local.items():
        for mine, expected in zip(plane, whole[usage], strict=True):
            if mine is None:
                assert expected is None
                continue
            if mine.shape == expected.shape:
                assert not cut or mine.ndim == 0
            else:
                (axis,) = [i for i in range(mine.ndim) if mine.shape[i] != expected.shape[i]]
                size = mine.shape[axis]
                assert cut and size * world == expected.shape[axis]
                expected = expected.narrow(axis, rank * size, size)
            assert torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (mine, expected)))


CUT = {
    ColwiseParallel: {Role.WEIGHT: True, Role.ACTIVATION: False, Role.GRADIENT: True},
    RowwiseParallel: {Role.WEIGHT: True, Role.ACTIVATION: True, Role.GRADIENT: False},
}


@on_ranks(2, 4)
@pytest.mark.parametrize("style", CUT, ids=lambda style: style.__name__)
@every_recipe
def test_codes_are_those_of_one_process(name, style):
    """Of x, the weight and the gradient of y, stochastic rounding too; sums agree to the rounding of their order."""
    recipe, rank, world = ALL[name], dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    size = unit_of(recipe) * world
    x, dy = torch.randn(2, 20, size), torch.randn(2, 20, 2 * size) * 1e-3
    x[0, 0, -1] = 30  # The largest are of one rank.
    dy[0, 1, 3], one = 1, convert(nn.Linear(size, 2 * size), recipe)
    with torch.no_grad():
        one.weight[-1, -1] = 2
    many = copy.deepcopy(one)
    if one.seed is not None:
        one.seed[1] -= rank  # Which a layer that is not cut adds.
    parallelize_module(many, tp_mesh(), style(input_layouts=Replicate(), output_layouts=Replicate()))
    assert isinstance(many.weight.to_local(), ShardedWeight)
    results = []
    for layer in (one, many):
        mine = x.clone().requires_grad_()
        with quantized() as found:
            y = layer(mine)
            y.backward(dy)
        results.append((found, y.detach(), mine.grad, layer.weight.grad, layer.bias.grad))
    (whole, *expected), (local, *got) = results
    assert [role for role, _ in local] == [role for role, _ in whole] == [Role.ACTIVATION, Role.WEIGHT, Role.GRADIENT]
    for (role, planes), (_, of_whole) in zip(local, whole, strict=True):
        assert_part(planes, of_whole, rank, world, CUT[style][role])
    grad = many.weight.grad
    assert (grad.placements, grad.shape) == (many.weight.placements, one.weight.shape)
    for a, b in zip(got, expected, strict=True):
        a = a.full_tensor() if isinstance(a, DTensor) else a
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5 * b.abs().max().item())
