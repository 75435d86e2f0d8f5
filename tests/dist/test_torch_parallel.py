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


def codes_of(name, style):
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
    parallelize_module(many, mesh_of("tp"), style(input_layouts=Replicate(), output_layouts=Replicate()))
    assert isinstance(many.weight.to_local(), ShardedWeight)
    results = []
    for layer in (one, many):
        mine = x.clone().requires_grad_()
        with quantized() as found:
            y = layer(mine)
            y.backward(dy)
        results.append((found, y.detach(), mine.grad, layer.weight.grad, layer.bias.grad))
    (whole, *expected), (local, *got) = results
    got = [t.full_tensor() if isinstance(t, DTensor) else t for t in got]  # Before a rank can fail.
    assert [role for role, _ in local] == [role for role, _ in whole] == [Role.ACTIVATION, Role.WEIGHT, Role.GRADIENT]
    for (role, planes), (_, of_whole) in zip(local, whole, strict=True):
        assert_part(planes, of_whole, rank, world, CUT[style][role])
    for parameter, placement in ((many.weight, Shard(1)), (many.bias, Replicate())):
        placement = placement if style is RowwiseParallel else Shard(0)
        assert parameter.placements == parameter.grad.placements == (placement,)
    for a, b in zip(got, expected, strict=True):  # Sums in fp32, of which each order rounds otherwise.
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5 * b.abs().max().item())


@pytest.mark.parametrize("style", CUT, ids=lambda style: style.__name__)
@pytest.mark.parametrize(("world", "name"), [*((2, name) for name in ALL), *((4, name) for name in RECIPES)], ids=str)
def test_codes_are_those_of_one_process(world, name, style):
    """Of x, the weight and the gradient of y, also where they are drawn. Sums agree to the rounding of their order."""
    torch_ranks.run(world, codes_of, name=name, style=style)


class Block(nn.Module):
    """Of Llama: norms, attention with heads that are cut, and a gated MLP."""

    def __init__(self, width, heads=4):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (nn.Linear(*s) for s in ((width, 2 * width),) * 2 + ((2 * width, width),))
        self.head = width // heads

    def forward(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))

    def attention(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.o(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def mlp(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    """The same, as modules of their own, whose inputs a plan prepares."""


def transformer(recipe, width, blocks=2):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width) for _ in range(blocks)), nn.RMSNorm(width), nn.Linear(width, width))
    return convert(model, recipe)
