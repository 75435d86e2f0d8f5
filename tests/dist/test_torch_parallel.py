"""Tensor parallelism: `parallelize_module` over converted layers, alone and under FSDP2, against one process."""

import contextlib
import copy
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from qshard import pipeline
from qshard.formats import Usage
from qshard.pipeline import Scales
from qshard.recipes import CurrentScaling, Recipe, Role
from qshard.torch_bridge import Linear, QuantizedTensor, ShardedWeight, convert, linear, update_scales
from qshard.torch_bridge.ops import ops
from support import torch_ranks
from support.formats import GATHERED, MIXES, RECIPES, nearest
from support.torch_ranks import on_ranks

ALL = {**RECIPES, **MIXES}


def mesh_of(*names):
    _clear_sharding_prop_cache()  # It holds meshes of process groups of cases before.
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
    """`local` is what `rank` of `world` has of `whole`, to the bit: all of it, or an even part of an axis."""
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
                assert cut
                assert size * world == expected.shape[axis]
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


class Attention(nn.Module):
    def __init__(self, width, head):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.head = head

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.o(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention, self.mlp = Attention(width, width // 4), MLP(width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(width, width), nn.Sequential(Block(width), Block(width))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, width)

    def forward(self, tokens, targets):
        logits = self.head(self.norm(self.blocks(self.embedding(tokens))))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def llama(recipe, seed=0):
    torch.manual_seed(seed)
    return convert(Llama(2 * unit_of(recipe)), recipe)


def parallelized(model, tp):
    """As torchtitan does it: what is between layers is cut along the sequence."""
    into = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
    rowwise = RowwiseParallel(output_layouts=Shard(1))
    for block in model.blocks:
        plan = {
            "norm1": SequenceParallel(),
            "attention": PrepareModuleInput(**into),
            **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
            "attention.o": rowwise,
            "norm2": SequenceParallel(),
            "mlp": PrepareModuleInput(**into),
            "mlp.gate": ColwiseParallel(),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=Replicate(), use_local_output=False),
        }
        parallelize_module(block, tp, plan)
        out = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
        parallelize_module(block.mlp, tp, out)
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    return parallelize_module(model, tp, plan)


def sharded(model):
    """Over all axes of the mesh: the last is that of tensor parallelism."""
    *data, tp = MESHES[torch_ranks.shape]
    mesh = mesh_of(*data, tp)
    parallelized(model, mesh[tp])
    if data:
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh[tuple(data)])
    return model


def data_of(model, seed):
    size = model.embedding.num_embeddings
    tokens = torch.randint(size, (2, 33), generator=torch.Generator().manual_seed(seed)).to(torch_ranks.device)
    return tokens[:, :-1], (3 * tokens[:, :-1] + 1) % size


def trained(model, steps=4):
    """Losses and norms of gradients."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(*data_of(model, step))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        losses.append((loss.item(), (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()))
        optimizer.step()
        update_scales(model)
    return losses


def assert_gathers_parts_of_the_whole(model):
    """The law: what FSDP2 gathers, over its axes, is a part of what the cast of the whole weight is."""
    layers, groups = [layer for layer in model.modules() if isinstance(layer, Linear)], (*model.blocks, model)
    for module in groups:
        module.reshard()  # After a forward pass alone FSDP2 keeps the last ones.
    wholes = [layer.weight.full_tensor().detach() for layer in layers]
    for module in groups:
        module.unshard()
    for layer, w in zip(layers, wholes, strict=True):
        fmt, given = layer.recipe.weight, None
        if layer.recipe.stateful:
            state = layer.delayed[Role.WEIGHT.value]
            given = Scales(state.scale, state.scale_inv)
        mesh, unsharded = layer.weight.device_mesh, layer.weight.to_local()
        assert isinstance(unsharded, QuantizedTensor)
        expected = pipeline.quantize(ops, w, fmt, Usage.ROWWISE, given=given)
        found = {Usage.ROWWISE: unsharded.parts(Usage.ROWWISE)}
        assert_part(found, expected, mesh.get_local_rank(), mesh.size(), cut=True)
    for module in groups:
        module.reshard()


MESHES = {
    (2,): ("tp",),
    (2, 2): ("shard", "tp"),
    (2, 1, 2): ("replicate", "shard", "tp"),
    (1, 2, 2): ("replicate", "shard", "tp"),
}
TRAINED = [((2, 2), name) for name in GATHERED] + [(shape, "CurrentScaling") for shape in MESHES if shape != (2, 2)]


def trains_as_one_process(name):
    recipe = nearest(RECIPES[name])
    one, many = llama(recipe), sharded(llama(recipe))
    losses = [trained(model) for model in (one, many)]
    # Sums over ranks round in another order. Where that flips a code, numbers differ by a step of the format.
    assert losses[1][0] == pytest.approx(losses[0][0], rel=1e-5)
    assert np.array(losses[1]) == pytest.approx(np.array(losses[0]), rel=1e-2)
    if len(torch_ranks.shape) > 1:
        assert_gathers_parts_of_the_whole(many)
    with torch.no_grad():
        losses = [model(*data_of(model, 9)).item() for model in (one, many)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


@pytest.mark.parametrize(("shape", "name"), TRAINED, ids=str)
def test_training_is_that_of_one_process(shape, name):
    """Loss and norm of the gradients of each step; then a forward pass alone."""
    torch_ranks.run(shape, trains_as_one_process, name=name)


def saves_and_loads(folder):
    """From ranks to one process, and from there to a model that was made without memory."""
    recipe, folder = CurrentScaling(), Path(folder)
    many = sharded(llama(recipe))
    trained(many, steps=1)
    wholes = {name: p.full_tensor() for name, p in many.named_parameters()}
    dcp.save(get_model_state_dict(many), checkpoint_id=folder)
    one = llama(recipe, seed=1)
    state = one.state_dict()
    dcp.load(state, checkpoint_id=folder)
    one.load_state_dict(state)
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, wholes[name])
    with torch.device("meta"):
        other = Llama(2 * unit_of(recipe))
    other = sharded(convert(other, recipe)).to_empty(device=torch_ranks.device)
    set_model_state_dict(other, state, options=StateDictOptions(full_state_dict=True))
    batch = data_of(one, 5)
    assert other(*batch).item() == many(*batch).item() == pytest.approx(one(*batch).item(), rel=1e-5)
    assert_gathers_parts_of_the_whole(other)


def test_checkpoints(tmp_path):
    torch_ranks.run((2, 2), saves_and_loads, folder=str(tmp_path))


@pytest.mark.parametrize("name", ["CurrentScaling", "DelayedScaling"])
@pytest.mark.parametrize("style", CUT, ids=lambda style: style.__name__)
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
def test_uneven_parts(shape, style, name):
    torch_ranks.run(shape, trains_uneven_parts, style=style, name=name)


def trains_uneven_parts(style, name):
    """Formats without blocks: of 3 rows, four ranks hold one, one, one and none; of 7, two hold 4 and 3."""
    mesh, size = mesh_of(*MESHES.get(torch_ranks.shape, ("tp",))), {1: 3, 2: 14}[len(torch_ranks.shape)]
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
    for (_, planes), (_, of_whole) in zip(local, whole, strict=True):
        scales = [made[Usage.ROWWISE].scale_inv for made in (planes, of_whole)]
        assert torch.equal(*scales)
    pairs = ((many.weight.grad, one.weight.grad), (many.bias.grad, one.bias.grad), (part.grad, x.grad), (y, expected))
    for a, b in pairs:
        assert torch.allclose(a.full_tensor(), b, rtol=1e-5, atol=1e-5)


GRADIENTS = Recipe(weight="FP8_E4M3", activation="FP8_E4M3", gradient="FP8_1x128")
WITHIN = [
    ("MXFP8", ColwiseParallel, (64, 96), r"0.weight \(96, 64\) .*: shards of 48 rows meet weights in blocks of 32"),
    ("NVFP4", RowwiseParallel, (48, 32), r"shards of 24 columns meet weights in blocks of 16, of NVFP4_16x16"),
    (GRADIENTS, ColwiseParallel, (16, 128), r"shards of 64 rows meet gradients in blocks of 128"),
    ("BlockScaling", RowwiseParallel, (192, 128), r"shards of 96 columns meet weights in blocks of 128"),
]


@on_ranks(2)
@pytest.mark.parametrize(("recipe", "style", "size", "text"), WITHIN, ids=["weight", "x", "gradient", "squares"])
def test_cuts_within_blocks_are_refused(recipe, style, size, text):
    model = convert(nn.Sequential(nn.Linear(*size)), recipe)
    with pytest.raises(ValueError, match=text):
        parallelize_module(model, mesh_of("tp"), {"0": style()})


@on_ranks((2, 2))
def test_operands_that_do_not_belong_together():
    mesh = mesh_of("shard", "tp")
    model = convert(nn.Sequential(nn.Linear(32, 32)), CurrentScaling())
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    x, layer = torch.ones(2, 32), model[0]
    whole = distribute_tensor(x, mesh["tp"], [Replicate()])
    with pytest.raises(TypeError, match=r"weight .DTensor. is not a plain tensor; .* pass x as a DTensor"):
        layer.forward(x)
    with pytest.raises(TypeError, match=r"bias .Tensor. is not a DTensor, as weight is"):
        linear(whole, layer.weight, torch.ones(32), layer.recipe)
    with pytest.raises(ValueError, match=r"weight .* is cut as Partial.*use Shard.0., Shard.1. or Replicate"):
        linear(whole, DTensor.from_local(torch.ones(32, 32), mesh["tp"], [Partial()]), None, layer.recipe)
    fully_shard(model, mesh=mesh["shard"])
    with pytest.raises(ValueError, match=r"is not on the mesh of x.*call the module that fully_shard wraps"):
        layer.forward(whole)


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
        y = run(torch.randn(8, 64))
        y.square().sum().backward()
        results.append([y, *(p.grad.to_local() for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
