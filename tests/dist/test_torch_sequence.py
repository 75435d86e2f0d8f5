"""Sequence parallelism: ranks gather codes of row shards, compared with one process."""

import contextlib
import copy
import gc
import itertools
import warnings
import weakref
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from qshard.formats import Usage
from qshard.recipes import MXFP8, CurrentScaling, Role
from qshard.torch_bridge import convert, linear, update_scales
from qshard.torch_bridge._distributed import sequence_parallel
from qshard.torch_bridge.tensor_parallel import ColwiseParallel, RowwiseParallel
from support import torch_ranks
from support.formats import MIXES, RECIPES, nearest
from support.observe import calls_of
from support.pairs import turns
from support.torch_models import Wire
from support.torch_parallel import assert_part, llama, mesh_of, parallelized, quantized, unit_of
from support.torch_ranks import on_ranks

ALL = {**RECIPES, **MIXES}
CUT = {
    ColwiseParallel: {Role.WEIGHT: True, Role.ACTIVATION: True, Role.GRADIENT: True},
    RowwiseParallel: {Role.WEIGHT: True, Role.ACTIVATION: True, Role.GRADIENT: True},
}


def styled(style, dim=1, **options):
    """Create a style whose input (colwise) or output (rowwise) is sharded along `dim`."""
    name = "input_layouts" if style is ColwiseParallel else "output_layouts"
    return style(**{name: Shard(dim)}, use_local_output=False, **options)


@contextlib.contextmanager
def gathered():
    """Record the calls that cache gathered planes."""
    with torch.autograd.set_multithreading_enabled(False), calls_of(sequence_parallel.cache_plane) as calls:
        yield calls


def by_usage(calls):
    """Return the gathered planes of each usage."""
    found = {}
    for call in calls:
        found.setdefault(call.arguments["own"].usage, []).append(call.arguments["whole"])
    return found


def codes_of(name, style, batch, overlap):
    recipe, rank, world = ALL[name], dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    size = unit_of(recipe) * world
    x, dy = (t.to(torch_ranks.device) for t in (torch.randn(batch, size, size), torch.randn(batch, size, 2 * size)))
    x[-1, -1, -1], dy[0, 1, 3] = 30, 300  # One rank has the largest elements.
    one = convert(nn.Linear(size, 2 * size), recipe).to(torch_ranks.device)
    many = copy.deepcopy(one)
    if one.seed is not None:
        one.seed[1] -= rank  # An unsharded layer adds the rank to its seed.
    parallelize_module(many, mesh_of("tp"), styled(style, overlap=overlap))
    mine = x.clone().requires_grad_()
    with quantized() as whole:
        y = one(mine)
        y.backward(dy)
    expected = [y.detach(), mine.grad, one.weight.grad, one.bias.grad]
    cut = Shard(1 if style is ColwiseParallel else 2)
    mine = DTensor.from_local(
        x.chunk(world, cut.dim)[rank].contiguous(), many.weight.device_mesh, [cut]
    ).requires_grad_()
    out = Shard(2 if style is ColwiseParallel else 1)
    with quantized() as local, gathered() as calls:
        y = many(mine)
        y.backward(DTensor.from_local(dy.chunk(world, out.dim)[rank].contiguous(), y.device_mesh, [out]))
    assert y.placements == (out,)
    assert mine.grad.placements == (cut,)
    got = [t.full_tensor() for t in (y.detach(), mine.grad, many.weight.grad, many.bias.grad)]
    role = Role.ACTIVATION if style is ColwiseParallel else Role.GRADIENT
    if batch == 1:  # With larger batches, the rows of a shard are not contiguous.
        for each, planes in local.items():
            assert_part(planes, whole[each], rank, world, True)
    found = by_usage(calls)
    for usage, (plane,) in found.items():  # Once each.
        for mine, theirs in zip(plane, whole[role][usage], strict=True):
            if usage is Usage.ROWWISE and mine is not None and mine.ndim:
                mine = mine.unflatten(0, (world, batch, -1)).transpose(0, 1).flatten(0, 2)
            is_random = batch > 1 and recipe.format(role).stochastic
            assert (mine is None) == (theirs is None)
            assert (
                mine is None
                or is_random
                or torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (mine, theirs)))
            )
    assert set(found) == {Usage.ROWWISE, Usage.COLUMNWISE}
    random = batch > 1 and recipe.stochastic
    # fp32 sums round differently in another order; tensor cores keep fewer bits of them.
    error = 1e-1 if random else 1e-5 if torch_ranks.device == "cpu" else 1e-2
    for a, b in zip(got, expected, strict=True):
        assert torch.allclose(a, b, rtol=error, atol=error * b.abs().max().item())


def often(name):
    """Mark two thirds of the format mixes as slow; qshard's recipes always run."""
    return [] if name in RECIPES or list(MIXES).index(name) % 3 == 0 else [pytest.mark.slow]


@pytest.mark.each_value
@pytest.mark.parametrize("style", CUT, ids=lambda style: style.__name__)
@pytest.mark.parametrize(
    ("world", "batch", "name", "overlap"),
    [
        *(pytest.param(2, 1, name, False, marks=often(name)) for name in ALL),
        *((2, 2, name, True) for name in RECIPES),
        *((4, 1, name, True) for name in ("BlockScaling", "NVFP4", "DelayedScaling")),
        *((3, 2, name, False) for name in ("CurrentScaling", "MXFP8")),
    ],
    ids=str,
)
def test_what_is_gathered_is_the_whole(world, batch, name, overlap, style):
    """Codes and scales of x, or of dy, are bit-exact; sums agree up to rounding, as their order differs."""
    torch_ranks.run(world, codes_of, name=name, style=style, batch=batch, overlap=overlap)


def results_of(run, x, dy, model=None):
    mine, model = x.detach().clone().requires_grad_(), model or run
    y = run(mine)
    y.backward(dy)
    gradients = [mine.grad, *(p.grad for p in model.parameters())]
    model.zero_grad()
    return [t.to_local() if isinstance(t, DTensor) else t for t in (y.detach(), *gradients)]


def an_mlp(name, rows, overlap=False, dim=1):
    """Build two layers: the first takes row shards, the second returns them."""
    torch.manual_seed(0)
    recipe = nearest(ALL[name])
    hidden = 128 * dist.get_world_size()
    model = convert(nn.Sequential(nn.Linear(256, hidden), nn.GELU(), nn.Linear(hidden, 256)), recipe)
    model = model.to(torch_ranks.device)
    plan = {"0": ColwiseParallel(input_layouts=Shard(dim), overlap=overlap)}
    plan["2"] = RowwiseParallel(output_layouts=Shard(dim), overlap=overlap)
    return parallelize_module(model, mesh_of("tp"), plan), torch.randn(*rows, 256, device=torch_ranks.device)


@turns(1, name=list(RECIPES), case=[(2, (1, 256), 1), (3, (2, 384), 1), (4, (512,), 0)])
def test_overlapped_is_the_same(name, case):
    world, rows, dim = case
    torch_ranks.run(world, overlaps, rows=rows, dim=dim, name=name)


def overlaps(rows, dim, name):
    """Codes have the same bits (`test_what_is_gathered_is_the_whole`); products of all rows may round differently."""
    results = []
    for overlap in (False, True):
        model, x = an_mlp(name, rows, overlap, dim)
        results.append(results_of(model, x, torch.ones_like(x) * torch.arange(256, device=x.device)))
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-2 * b.abs().max().item())  # A code of x may round up or down.


@on_ranks(2)
def test_what_travels():
    """Forward gathers codes of x; backward gathers its columnwise codes and those of dy, each plane in one call.

    Only amaxes and sums are values.
    """
    for name, scales in (("CurrentScaling", 0), ("MXFP8", 256 * 64 // 32)):
        model, x = an_mlp(name, (1, 64))
        x.requires_grad_()
        with Wire() as wire:
            y = model(x)
            seen = len(wire.calls)
            y.sum().backward()
        codes = [("allgather_into_tensor_coalesced", torch.uint8, 64 * 256 + scales)]
        sums = ("alltoall", torch.float32, 2 * 64 * 256)
        travelled = [call for call in wire.calls if call[0] != "allreduce"]
        assert travelled[: len(codes)] == codes
        assert travelled[len(codes)] == sums
        assert len([call for call in wire.calls[:seen] if call[0] != "allreduce"]) == len(codes) + 1
        assert sorted(map(str, travelled[len(codes) + 1 :])) == sorted(map(str, [*codes * 3, sums]))


class Collectives(TorchDispatchMode):
    """Counts collectives by kind: those of `torch.distributed`, and DTensor's."""

    def __init__(self):
        super().__init__()
        self.kinds = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0].strip("_")
        if func.namespace in ("c10d", "_c10d_functional") and not name.startswith(("wait", "wrap")):
            self.kinds[name] += 1
        return func(*args, **(kwargs or {}))


# Two blocks of 7 layers, and a head. Amaxes: of all weights together; of x of o and down; of the gradients of y of q,
# k, v, gate, up and head. With codes also of x of q, gate and head, which others share, and of the gradients of y of o
# and down. Codes of x are gathered in forward and in backward, those of gradients as two planes.
COLLECTIVES = {
    None: {
        "allreduce": 1 + 2 * 2 + 2 * 5 + 1,
        "all_gather_into_tensor": 11,
        "reduce_scatter_tensor": 8,  # As many as in bfloat16: gradients of x are summed before.
        "all_reduce": 2,
    },
    False: {
        "allreduce": 1 + 2 * 4 + 1 + 2 * 7 + 1,
        "allgather_into_tensor_coalesced": 2 * (2 * 2 + 1) + 2 * 2 * 2,
        "alltoall_base": 2 * 2 + 2 * 5 + 1,
        "all_gather_into_tensor": 2,
        "reduce_scatter_tensor": 1,
    },
}


@on_ranks(2)
@pytest.mark.parametrize(("name", "overlap"), [("CurrentScaling", None), ("NVFP4", False)])
def test_collectives_of_a_step(name, overlap):
    """None: PyTorch's styles. False: qshard's, which send codes."""
    model = parallelized(llama(nearest(ALL[name])), mesh_of("tp"), overlap)
    tokens = torch.zeros(1, 128, dtype=torch.int64)
    for _ in range(2):
        with Collectives() as found:
            model(tokens, tokens).backward()
        assert found.kinds == COLLECTIVES[overlap]


class Projections(nn.Module):
    """q, k and v: codes are shared within one call of a converted module."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x):
        return [layer(x) for layer in self.layers]


@on_ranks(2)
@pytest.mark.parametrize("overlap", [False, True])
def test_layers_share_what_is_gathered(overlap):
    """q, k and v: one gather in forward and one in backward."""
    torch.manual_seed(0)
    model = convert(Projections(), CurrentScaling())
    mesh = mesh_of("tp")
    for layer in model.layers:
        parallelize_module(layer, mesh, styled(ColwiseParallel, overlap=overlap))
    for _ in range(2):
        x = DTensor.from_local(torch.randn(1, 32, 64), mesh, [Shard(1)]).requires_grad_()
        with gathered() as calls:
            ys = model(x)
            assert {usage: len(planes) for usage, planes in by_usage(calls).items()} == {Usage.ROWWISE: 1}
            sum(y.to_local().sum() for y in ys).backward()
            planes = by_usage(calls)
        assert {usage: len(each) for usage, each in planes.items()} == dict.fromkeys(Usage.BOTH.planes, 1)
        assert x.grad.placements == (Shard(1),)
        codes = [weakref.ref(plane.data) for each in planes.values() for plane in each]
        del x, ys, planes, calls
        gc.collect()
        assert not any(plane() is not None for plane in codes)  # Gathered codes are freed with their source.


@on_ranks(2)
def test_a_write_in_place_is_seen():
    model, x = an_mlp("CurrentScaling", (1, 64))
    with torch.no_grad():
        before = model(x)
        x.mul_(2)
        assert torch.equal(model(x), model(x.clone()))
        assert not torch.equal(model(x), before)


@pytest.mark.each_value
@on_ranks(2, 3)
@pytest.mark.parametrize(
    ("name", "rows"), [("CurrentScaling", (1, 31)), ("MXFP8", (2, 24)), ("BlockScaling", (1, 128))]
)
def test_rows_that_codes_cannot_be_cut_as(name, rows):
    """Values are gathered instead, and results are those of PyTorch's styles."""
    torch.manual_seed(0)
    recipe, mesh = nearest(ALL[name]), mesh_of("tp")
    world, rank = dist.get_world_size(), dist.get_rank()
    one = convert(nn.Sequential(nn.Linear(256 * 3, 256 * 3), nn.GELU(), nn.Linear(256 * 3, 256 * 3)), recipe)
    many = copy.deepcopy(one)
    parallelize_module(many, mesh, {"0": styled(ColwiseParallel), "2": styled(RowwiseParallel)})
    x = torch.randn(*rows, 256 * 3)
    part = x.split(-(-rows[1] // world), 1)[rank].contiguous()  # torch.chunk's shards: the last may be the shortest.
    mine = DTensor.from_local(part, mesh, [Shard(1)], shape=x.shape, stride=x.stride())
    with gathered() as calls:
        y = many(mine)
        y.sum().backward()
    assert not calls
    assert y.placements == (Shard(1),)
    assert torch.allclose(y.full_tensor(), one(x), rtol=1e-5, atol=1e-4)


TRAINED = [((2, 2), True, "DelayedScaling")]


@pytest.mark.parametrize(
    ("world", "overlap", "name"),
    [
        pytest.param(*case, marks=[] if case in TRAINED else pytest.mark.slow)
        for case in itertools.product(
            (2, (2, 2)), (True, False), ("CurrentScaling", "DelayedScaling", "MXFP8", "NVFP4")
        )
    ],
    ids=str,
)
@on_ranks()
def test_training_is_that_of_pytorchs_styles(name, overlap):
    """Also with FSDP2 over the other axis: codes are the same, and sums differ in their order."""
    trains(name, overlap)


def trains(name, overlap):
    recipe, losses = nearest(RECIPES[name]), []
    for ours in (False, True):
        model = llama(recipe)
        mesh = mesh_of("shard", "tp") if len(torch_ranks.shape) > 1 else mesh_of("tp")
        tp = mesh["tp"] if mesh.ndim > 1 else mesh
        parallelized(model, tp, overlap if ours else None)
        if mesh.ndim > 1:
            for module in (*model.blocks, model):
                fully_shard(module, mesh=mesh["shard"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
        losses.append([])
        for step in range(3):
            size, generator = model.embedding.num_embeddings, torch.Generator().manual_seed(step)
            tokens = torch.randint(size, (2, 65), generator=generator).to(torch_ranks.device)
            optimizer.zero_grad()
            loss = model(tokens[:, :-1], (3 * tokens[:, :-1] + 1) % size)
            loss.backward()
            optimizer.step()
            update_scales(model)
            losses[-1].append(loss.item())
    a, b = (torch.tensor(each) for each in losses)
    assert torch.allclose(a, b, rtol=3e-3), (a, b)  # A sum that rounds differently flips a code here and there.
    assert b[-1] < b[0]


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("name", [pytest.param("CurrentScaling", marks=pytest.mark.slow), "NVFP4"])
def test_compiled_layers(name):
    # Dynamo of torch 2.13 triggers torch 2.13's own deprecation warning.
    warnings.filterwarnings("ignore", ".* should not be instantiated", DeprecationWarning)
    torch._dynamo.reset()
    results = []
    for compiled in (False, True):
        model, x = an_mlp(name, (1, 64), overlap=True)
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        y = run(x)
        y.square().sum().backward()
        results.append([y.detach(), *(p.grad.to_local() for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.each_value
@on_ranks(1, 2)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", ["CurrentScaling", "MXFP8"])
def test_what_may_not_change_bits(name, overlap):
    """Checkpointing, bfloat16 autocast, one rank, and inputs of which some need no gradient."""
    model, x = an_mlp(name, (1, 64), overlap)
    dy = torch.randn_like(x)
    expected = results_of(model, x, dy)
    again = results_of(lambda x: checkpoint(model, x, use_reentrant=False), x, dy, model)
    assert all(torch.equal(a, b) for a, b in zip(expected, again, strict=True))
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    assert y.dtype == torch.bfloat16
    assert torch.allclose(y.float(), expected[0], atol=5e-2 * expected[0].abs().max().item())  # 2^-8, and other codes.
    with torch.no_grad():
        assert torch.equal(model(x), expected[0])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name != "0.weight")
    model(x).backward(dy)
    assert model[0].weight.grad is None
    assert torch.equal(model[2].weight.grad.to_local(), expected[-2])


@on_ranks(2)
def test_what_is_refused():
    mesh = mesh_of("tp")
    layer, x = convert(nn.Linear(64, 64), MXFP8()), torch.ones(1, 64, 64)
    with pytest.raises(ValueError, match=r"scatter_dim \(1\) needs DTensors; pass x and weight as DTensors"):
        linear(x, layer.weight, None, layer.recipe, scatter_dim=1)
    parallelize_module(layer, mesh, ColwiseParallel())
    with pytest.raises(
        ValueError, match=r"scatter_dim \(1\) does not apply to y .*; pass a row axis of y, with the weight sharded"
    ):
        linear(DTensor.from_local(x, mesh, [Replicate()]), layer.weight, None, layer.recipe, scatter_dim=1)
    layer = parallelize_module(convert(nn.Linear(64, 64), MXFP8()), mesh, RowwiseParallel(output_layouts=Shard(2)))
    with pytest.raises(ValueError, match=r"scatter_dim \(2\) does not apply to y \(1, 64, 64\)"):
        layer(x.chunk(2, -1)[0])
