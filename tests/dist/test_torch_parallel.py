"""Tensor parallelism of layers: `parallelize_module` over converted ones, against one process."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from qshard.formats import Usage
from qshard.recipes import CurrentScaling, Recipe, Role
from qshard.torch_bridge import ShardedWeight, convert, linear, update_scales
from support import torch_ranks
from support.formats import MIXES, RECIPES, nearest
from support.pairs import turns
from support.torch_models import Wire
from support.torch_parallel import assert_part, mesh_of, quantized, unit_of
from support.torch_ranks import on_ranks

ALL = {**RECIPES, **MIXES}


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
    assert local.keys() == whole.keys() == set(Role)
    for role, planes in local.items():
        assert_part(planes, whole[role], rank, world, CUT[style][role])
    for parameter, placement in ((many.weight, Shard(1)), (many.bias, Replicate())):
        placement = placement if style is RowwiseParallel else Shard(0)
        assert parameter.placements == parameter.grad.placements == (placement,)
    for a, b in zip(got, expected, strict=True):  # Sums in fp32, of which each order rounds otherwise.
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5 * b.abs().max().item())


@pytest.mark.each_value
@turns(
    1,
    [(2, name) for name in RECIPES],
    case={f"{world}-{name}": (world, name) for world, names in ((2, ALL), (4, RECIPES)) for name in names},
    style=list(CUT),
)
def test_codes_are_those_of_one_process(case, style):
    """Of x, the weight and the gradient of y, also where they are drawn. Sums agree to the rounding of their order."""
    world, name = case
    torch_ranks.run(world, codes_of, name=name, style=style)


@pytest.mark.each_value
@pytest.mark.parametrize("name", ["CurrentScaling", "DelayedScaling"])
@pytest.mark.parametrize("style", CUT, ids=lambda style: style.__name__)
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
def test_uneven_parts(shape, style, name):
    torch_ranks.run(shape, trains_uneven_parts, style=style, name=name)


def trains_uneven_parts(style, name):
    """Formats without blocks: of 3 rows, four ranks hold one, one, one and none; of 7, two hold 4 and 3."""
    mesh, size = (
        mesh_of(*(("tp",) if len(torch_ranks.shape) == 1 else ("shard", "tp"))),
        {1: 3, 2: 14}[len(torch_ranks.shape)],
    )
    torch.manual_seed(0)
    one = convert(nn.Linear(*((20, size) if style is ColwiseParallel else (size, 6))), name)
    many = copy.deepcopy(one)
    style = style(input_layouts=Replicate(), output_layouts=Replicate(), use_local_output=False)
    parallelize_module(many, mesh["tp"], style)
    if mesh.ndim > 1:
        fully_shard(many, mesh=mesh["shard"])
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (one, many)]
    for step in range(3):
        x = torch.randn(5, one.in_features, generator=torch.Generator().manual_seed(step))
        results = []
        for layer, optimizer in zip((one, many), optimizers, strict=True):
            optimizer.zero_grad()
            y = layer(x)
            y = y.to_local() if isinstance(y, DTensor) else y
            y.square().mean().backward()
            grads = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in layer.parameters()]
            results.append([y.detach(), *grads])
            optimizer.step()
            update_scales(layer)
        for a, b in zip(*results, strict=True):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_a_weight_on_every_rank():
    """Neither colwise nor rowwise: each rank takes other rows of x, and scales are of all of them."""
    mesh = mesh_of("tp")
    one = convert(nn.Linear(32, 32), CurrentScaling())
    many = distribute_module(copy.deepcopy(one), mesh)
    x, dy = torch.randn(2, 6, 32), torch.randn(2, 6, 32)
    with quantized() as whole:
        expected = one(x.requires_grad_())
        expected.backward(dy)
    part = distribute_tensor(x.detach(), mesh, [Shard(1)]).requires_grad_()
    with quantized() as local:
        y = many(part)
        y.backward(distribute_tensor(dy, mesh, [Shard(1)]))
    assert y.placements == part.grad.placements == (Shard(1),)
    for role, planes in local.items():
        scales = [made[Usage.ROWWISE].scale_inv for made in (planes, whole[role])]
        assert torch.equal(*scales)
    pairs = ((many.weight.grad, one.weight.grad), (many.bias.grad, one.bias.grad), (part.grad, x.grad), (y, expected))
    for a, b in pairs:
        assert torch.allclose(a.full_tensor(), b, rtol=1e-5, atol=1e-5)


GRADIENTS = Recipe(weight="FP8_E4M3", activation="FP8_E4M3", gradient="FP8_1x128")
WITHIN = [
    (
        "MXFP8",
        ColwiseParallel,
        (64, 96),
        r"weight \(96, 64\) has shards of 48 rows, which split the weight blocks of 32",
    ),
    ("NVFP4", RowwiseParallel, (48, 32), r"shards of 24 columns, which split the weight blocks of 16 of NVFP4_16x16"),
    (GRADIENTS, ColwiseParallel, (16, 128), r"shards of 64 rows, which split the gradient blocks of 128"),
    ("BlockScaling", RowwiseParallel, (192, 128), r"shards of 96 columns, which split the weight blocks of 128"),
]


@on_ranks(2)
@pytest.mark.parametrize(("recipe", "style", "size", "text"), WITHIN, ids=["weight", "x", "gradient", "squares"])
def test_cuts_within_blocks_are_refused(recipe, style, size, text):
    model = convert(nn.Sequential(nn.Linear(*size)), recipe)
    parallelize_module(model, mesh_of("tp"), {"0": style()})
    x = torch.ones(4, size[0] // 2 if style is RowwiseParallel else size[0], device=torch_ranks.device)
    with pytest.raises(ValueError, match=text):
        model(x)


@on_ranks((2, 2))
def test_operands_that_do_not_belong_together():
    mesh = mesh_of("shard", "tp")
    model = convert(nn.Sequential(nn.Linear(32, 32)), CurrentScaling())
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    x, layer = torch.ones(2, 32), model[0]
    whole = distribute_tensor(x, mesh["tp"], [Replicate()])
    with pytest.raises(TypeError, match=r"weight .DTensor. is not a plain tensor; .* pass x as a DTensor"):
        layer.forward(x)
    with pytest.raises(TypeError, match=r"bias is not a DTensor, but weight is"):
        linear(whole, layer.weight, torch.ones(32), layer.recipe)
    with pytest.raises(ValueError, match=r"weight .* has placement Partial.*use Shard.0., Shard.1. or Replicate"):
        linear(whole, DTensor.from_local(torch.ones(32, 32), mesh["tp"], [Partial()]), None, layer.recipe)
    fully_shard(model, mesh=mesh["shard"])
    with pytest.raises(ValueError, match=r"is not on the mesh of x.*call the module that fully_shard wraps"):
        layer.forward(whole)


@pytest.mark.slow
@on_ranks(2)
def test_compiled_layers():
    # What dynamo of torch 2.13 does against torch 2.13's own advice.
    warnings.filterwarnings("ignore", ".* should not be instantiated", DeprecationWarning)
    torch._dynamo.reset()
    recipe, results = nearest(RECIPES["NVFP4"]), []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = convert(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), recipe)
        parallelize_module(model, mesh_of("tp"), {"0": ColwiseParallel(), "2": RowwiseParallel()})
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        x = torch.randn(8, 64, requires_grad=True)
        y = run(x)
        y.square().sum().backward()
        results.append([y, x.grad, *(p.grad.to_local() for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@on_ranks(2)
@pytest.mark.parametrize("name", ["CurrentScaling", "NVFP4", "MXFP8"])
def test_only_scales_of_whole_tensors_travel(name):
    """An amax takes 4 bytes: of both weights together, of the second x (NVFP4: also rotated), of the first dy."""
    model = convert(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), name)
    parallelize_module(model, mesh_of("tp"), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    sizes = {"CurrentScaling": [2, 1, 1], "NVFP4": [2, 2, 1], "MXFP8": []}[name]
    for _ in range(2):
        with Wire() as wire:
            model(torch.randn(8, 64)).square().sum().backward()
        assert wire.calls == [("allreduce", torch.int32, size) for size in sizes]


@on_ranks(2)
def test_amax_of_a_weight_that_forward_writes_to():
    """A layer after a write within the pass reduces the new amax, and a write before backward raises.

    Before torch 2.13 the local shard of a parameter is no parameter. Then codes are saved, and a write changes nothing.
    """
    torch.manual_seed(0)
    model = convert(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), "CurrentScaling")
    parallelize_module(model, mesh_of("tp"), {"0": ColwiseParallel(output_layouts=Replicate()), "1": ColwiseParallel()})
    first, second = model
    x, bias = torch.randn(8, 64), second.bias.to_local()

    def scale(*_):
        with torch.no_grad():
            second.weight.mul_(8)

    hook = first.register_forward_hook(scale)
    y = model(x)
    hook.remove()
    assert torch.equal(y, model(x))
    gradient = lambda: torch.autograd.grad(y.sum(), first.bias, retain_graph=True)[0].to_local()  # noqa: E731
    want = gradient()
    scale()
    if isinstance(second.weight.to_local(), nn.Parameter):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradient()
    else:
        assert torch.equal(gradient(), want)
    assert torch.allclose(model(x) - bias, 8 * (y - bias), rtol=1e-4, atol=1e-4)
