"""Training with FSDP2: parity with one process, collectives, scale updates and stale scales."""

import copy
import gc
import math
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from qshard.formats import FP8_E4M3, FP8_E5M2
from qshard.recipes import MXFP8, CurrentScaling, DelayedScaling
from qshard.torch_bridge import QuantizedTensor, ShardedWeight, convert, update_scales
from support import torch_ranks
from support.awkward import awkward_values
from support.formats import GATHERED, nearest
from support.pairs import turns
from support.torch_models import (
    FRONT,
    SIZES,
    Wire,
    assert_gathers_the_whole,
    batch,
    linears,
    losses_of,
    model_of,
    shard,
    side_by_side,
    sizes_for,
    whole,
)
from support.torch_ranks import on_ranks, rarely
from support.weight_path import path_of

# bias, reshard_after_forward, micro-batches, foreach
WAYS = [(False, True, 1, True), (True, True, 2, False), (True, False, 1, True), (False, False, 2, True)]
TRAINED = [
    *(("CurrentScaling", way) for way in WAYS),
    *((name, WAYS[1 + i % 3]) for i, name in enumerate(GATHERED) if name != "CurrentScaling"),
]


WORLDS = [1, 2, 3, 4, (2, 2), (4, 1)]


def current(bias=False, **options):
    return shard(convert(model_of(bias), CurrentScaling()), **options)


def reductions_in(wire_of):
    with Wire() as wire:
        wire_of()
    return wire.of("allreduce")


def assert_parity(models, exact=True, **options):
    """Every rank has the same batch: the mean of 1, 2 or 4 equal gradients is exact, so all bits are the same."""
    foreach = options.pop("foreach", None)
    losses = [losses_of(m, torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=foreach), **options) for m in models]
    if exact:
        assert losses[0] == losses[1]
        for mine, other in zip(*(whole(model).values() for model in models), strict=True):
            assert torch.equal(mine, other)


@turns(1, trained={f"{name}-{i}": (name, way) for i, (name, way) in enumerate(TRAINED)}, world=WORLDS)
@on_ranks()
def test_training_is_that_of_one_process(trained):
    """Over 3 ranks the mean of equal gradients is not exact, so only the gathered codes are compared."""
    name, (bias, reshard, micro_batches, foreach) = trained
    recipe = nearest(GATHERED[name])  # A seed for each forward would differ on each rank and in each model.
    models = [convert(model_of(bias, sizes=sizes_for(recipe)), recipe) for _ in range(2)]
    shard(models[1], reshard_after_forward=reshard)
    assert_parity(models, dist.get_world_size() != 3, micro_batches=micro_batches, foreach=foreach)
    if not recipe.stateful:
        assert_gathers_the_whole(models[1])


def compiles_each_layer(recipe, backend="aot_eager"):
    torch._dynamo.reset()
    models = [convert(model_of(True, sizes=sizes_for(recipe)[:3]), recipe) for _ in range(2)]
    # Layers of other shapes turn sizes into symbols; dynamo of torch 2.11 fails on those in an autograd.Function.
    dynamic = None if torch.__version__ >= "2.13" else False  # Compares versions, not strings.
    for i, layer in enumerate(models[1]):
        models[1][i] = torch.compile(layer, fullgraph=True, backend=backend, dynamic=dynamic)
    # Dynamo of torch 2.13 triggers torch 2.13's own deprecation warning.
    warnings.filterwarnings("ignore", ".* should not be instantiated", DeprecationWarning)
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
    assert_parity([shard(model) for model in models])
    assert_gathers_the_whole(models[0])


@pytest.mark.parametrize(
    ("world", "name"),
    [
        (2, "NVFP4"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((1, "CurrentScaling"), (2, "CurrentScaling"), (3, "MXFP8"), (3, "NVFP4"))
        ),
    ],
    ids=str,
)
def test_compiled_layers(world, name):
    torch_ranks.run(world, compiles_each_layer, recipe=nearest(GATHERED[name]))


@pytest.mark.each_value
@on_ranks(2, 3, 4)
@pytest.mark.parametrize(
    ("clip", "fused", "dtype"),
    [(True, False, torch.float32), (True, True, torch.float32), (False, False, torch.bfloat16)],
    ids=["clip", "fused", "bfloat16"],
)
def test_optimizers_and_clipping(clip, fused, dtype):
    """No parity here: a norm over ranks sums in another order, and a mean over three ranks is not exact."""
    model = shard(convert(model_of(True, dtype), CurrentScaling()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = (model(batch().to(dtype)) - 1).square().mean()
        loss.backward()
        if clip:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            assert norm.full_tensor().isfinite()
        optimizer.step()
        update_scales(model)
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    states = [value for state in optimizer.state.values() for value in state.values()]
    assert {type(getattr(value, "_local_tensor", value)) for value in states} == {torch.Tensor}
    assert_gathers_the_whole(model)


@turns(1, recipe=GATHERED, world=[1, 2, 3, 4])
@on_ranks()
def test_what_travels_in_a_step(recipe):
    """Codes in forward and backward, a vector of amaxes before each, and gradients; biases are gathered as values."""
    world = dist.get_world_size()
    bias = world % 2 == 1
    model = shard(convert(model_of(bias, sizes=sizes_for(recipe)), recipe))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    losses_of(model, optimizer, steps=2)  # Then ranks know that there are delayed scales.
    with Wire() as wire:
        losses_of(model, optimizer, steps=1)
    if world == 1:
        assert wire.calls == []
        return
    gathers, amaxes = [], 0
    for layer in linears(model):
        rows, columns = layer.out_features, layer.in_features
        most = -(-rows // world)
        packed = recipe.weight.element.codes_per_byte
        gathers.append((torch.uint8, most * columns // packed + 4 * bias * most))
        unit_rows, unit_columns = recipe.weight.block or (rows, columns)
        blocks = math.ceil(rows / unit_rows) * math.ceil(columns / unit_columns)
        amaxes += 3 if recipe.stateful else blocks + (recipe.weight.scaling.global_scale is not None)
    assert wire.of("allgather") == [*gathers, *reversed(gathers)]
    # Forward and backward each compute current scales; delayed scales are computed between steps.
    reductions = [(torch.int32, amaxes)] * (1 if recipe.stateful else 2)
    assert wire.of("allreduce") == reductions
    assert [dtype for dtype, _ in wire.of("reduce_scatter")] == [torch.float32] * len(gathers)
    assert len(wire.calls) == 3 * len(gathers) + len(reductions)


@on_ranks(1, 2, 3, 4)
def test_delayed_scales_are_those_of_all_ranks():
    """Uneven weights; with 5 rows some ranks have one or none."""
    recipe, rank, world = DelayedScaling(history=2), dist.get_rank(), dist.get_world_size()
    values = [awkward_values((rows, 20), i, kinds=["normal", "zeros", "outlier"]) for i, rows in enumerate((64, 5, 33))]
    model = shard(convert(side_by_side(values), recipe))
    for step in range(3):
        xs = [torch.randn(6, 20, generator=torch.Generator().manual_seed(100 * step + r)) for r in range(4)]
        model(xs[rank].to(torch_ranks.device)).sum().backward()
        for layer, w in zip(model, values, strict=True):
            weight, activation, gradient = (state.amax for state in layer.delayed.children())
            assert (activation, gradient) == (xs[rank].abs().max(), 1)
            assert weight <= np.abs(w).max()  # Local rows only.
        update_scales(model)
        largest = torch.stack(xs[:world]).abs().max()
        for layer, w in zip(model, values, strict=True):
            assert layer.delayed["weight"].amax_history[-1] == np.abs(w).max()
            assert layer.delayed["activation"].amax_history[-1] == largest
        assert_gathers_the_whole(model, values, [FRONT.numpy(layer.delayed["weight"].scale) for layer in model])


@on_ranks(1, 3, *rarely(2, 4))
def test_one_reduction_a_pass():
    """Also after writes to weights; a manual gather outside a pass costs one reduction a weight."""
    model = current()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    one = [(torch.int32, len(linears(model)))] if dist.get_world_size() > 1 else []
    for _ in range(3):
        assert reductions_in(lambda: losses_of(model, optimizer, steps=1)) == 2 * one
    assert reductions_in(lambda: assert_gathers_the_whole(model)) == [(torch.int32, 1)] * len(linears(model)) * len(one)
    with torch.no_grad():
        assert reductions_in(lambda: model(batch())) == one

    saved = copy.deepcopy({key: value.full_tensor() * 3 for key, value in model.state_dict().items()})
    saved = {
        key: dist.tensor.distribute_tensor(v, model[0].weight.device_mesh, [dist.tensor.Shard(0)])
        for key, v in saved.items()
    }
    for assign in (False, True):
        model.load_state_dict(saved, assign=assign)
        assert reductions_in(lambda: model(batch()).sum().backward()) == 2 * one
        assert_gathers_the_whole(model)

    def closure():
        optimizer.zero_grad()
        loss = model(batch()).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert reductions_in(lambda: model(batch())) == one


class Casts(TorchDispatchMode):
    """Record the number of shards of each cast launch."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.qshard.cast_slices.default:
            self.sizes.append(len(args[2]))
        return func(*args, **(kwargs or {}))


@on_ranks(1, 3)
def test_what_is_gathered_together_is_cast_together():
    """One launch for each FSDP2 group and each of its formats, forward and backward."""
    torch_ranks.mesh()
    model = nn.Sequential(*(nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(3))) for _ in range(2)))
    convert(model, CurrentScaling(), filter=lambda _, name: not name.endswith("2"))
    convert(model, MXFP8(), filter=lambda _, name: name == "1.2")
    for block in model:
        fully_shard(block)
    fully_shard(model)
    with Casts() as casts:
        model(torch.ones(32, 32)).sum().backward()
    assert sorted(casts.sizes) == 2 * [1] + 4 * [2]
    with Casts() as casts:
        model[1].unshard()
    assert casts.sizes == [1, 1, 1]  # Outside a pass each has scales of its own.


@on_ranks(2)
def test_passes_of_parts_and_of_wrappers():
    """Codes are right whether the model is called, only a part of it, or after the converted wrapper is deleted."""
    inner = model_of()
    wrapper = convert(nn.ModuleDict({"inner": inner}), CurrentScaling())
    shard(inner)
    del wrapper
    if dist.get_rank() == 0:
        gc.collect()
    each = [(torch.int32, 1)] * 3
    assert reductions_in(lambda: inner(batch())) == each
    update_scales(inner)  # From now on it is the root.
    inner(batch())
    assert reductions_in(lambda: inner(batch())) == [(torch.int32, 3)]
    assert_gathers_the_whole(inner)


@on_ranks(2)
def test_weights_of_two_kinds_are_refreshed_together():
    """Two formats, a frozen weight, and an independent copy."""
    model = convert(model_of(), CurrentScaling(), filter=lambda _, name: name != "2")
    convert(model, CurrentScaling(weight=FP8_E5M2), filter=lambda _, name: name == "2")
    model[4].weight.requires_grad_(False)
    other = shard(copy.deepcopy(model))
    shard(model)
    for each in (model, other):
        assert reductions_in(lambda each=each: each(batch()).sum().backward()) == [(torch.int32, 3)] * 2
    formats = [layer.weight.to_local().scale_state.fmt.element for layer in linears(model)]
    assert formats == [FP8_E4M3.element, FP8_E5M2.element, FP8_E4M3.element]
    with torch.no_grad():
        other[0].weight.mul_(8)
    for each in (model, other):
        assert_gathers_the_whole(each)


@pytest.mark.skipif(torch.__version__ < "2.12", reason="Dynamo of torch 2.11 raises for parameters of a subclass")
@on_ranks(2)
def test_compiled_optimizers():
    """Scales follow weights, however they change."""
    warnings.filterwarnings("ignore", ".* should not be instantiated", DeprecationWarning)
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
    torch._dynamo.reset()
    model = current()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step = torch.compile(optimizer.step, backend="aot_eager")
    for seed in range(3):
        model(batch(seed)).square().mean().backward()
        step()
        optimizer.zero_grad()
    assert_gathers_the_whole(model)


@on_ranks(2)
def test_tied_weights_are_one_weight():
    model = model_of()
    model.append(nn.Linear(SIZES[0], SIZES[1], bias=False))
    model[-1].weight = model[0].weight
    fully_shard(convert(model.to(torch_ranks.device), CurrentScaling()), mesh=torch_ranks.mesh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses_of(model, optimizer, steps=2)
    assert model[-1].weight is model[0].weight
    assert reductions_in(lambda: model(batch())) == [(torch.int32, 3)]
    model.unshard()
    assert isinstance(model[-1].weight, QuantizedTensor)


@on_ranks(2)
def test_convert_comes_before_sharding():
    model = shard(model_of())
    with pytest.raises(ValueError, match=r"convert: 0.weight .DTensor. is not a plain tensor; convert before sharding"):
        convert(model, CurrentScaling())
    assert not linears(model)
    assert isinstance(current()[0].weight.to_local(), ShardedWeight)


@on_ranks(2)
def test_a_weight_enters_few_modules():
    """From `convert` to the second step. Before a module joins the path, see whether another should do its work."""
    model, device = nn.Sequential(nn.Linear(320, 192)), torch_ranks.device

    def run():
        sharded = fully_shard(convert(model.to(device), CurrentScaling()), mesh=torch_ranks.mesh())
        optimizer = torch.optim.AdamW(sharded.parameters())
        for _ in range(2):
            sharded(torch.ones(16, 320, device=device)).sum().backward()
            optimizer.step()

    # Once another test has registered the hook of delayed scaling on all optimizers, the weights enter it too.
    path = path_of({320 * 192, 160 * 192}, run) - {"torch_bridge/_delayed_scaling.py"}
    assert len(path) <= 22, sorted(path)
