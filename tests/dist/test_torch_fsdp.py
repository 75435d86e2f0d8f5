"""Training with FSDP2: parity with one process, what travels, when scales are made, and what a stale one does."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from qshard.formats import FP8_E4M3, FP8_E5M2
from qshard.recipes import CurrentScaling
from qshard.torch_bridge import QuantizedTensor, ShardedWeight, convert, update_scales
from support import torch_ranks
from support.torch_models import SIZES, Wire, assert_gathers_the_whole, batch, linears, losses_of, model_of, shard
from support.torch_ranks import run

every_world = pytest.mark.parametrize("world", [1, 2, 3, 4])


def trains_like_one_process(bias, reshard, micro_batches, foreach):
    """Every rank has the same batch. An average over 1, 2 or 4 equal gradients is exact, so all bits are the same."""
    alone = convert(model_of(bias), CurrentScaling())
    cut = shard(convert(model_of(bias), CurrentScaling()), reshard_after_forward=reshard)
    losses = [
        losses_of(m, torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=foreach), micro_batches=micro_batches)
        for m in (alone, cut)
    ]
    assert losses[0] == losses[1]
    for mine, other in zip(alone.parameters(), cut.parameters(), strict=True):
        assert torch.equal(mine.detach().clone(), other.full_tensor().clone())
    assert_gathers_the_whole(cut)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(
    ("bias", "reshard", "micro_batches", "foreach"),
    [(False, True, 1, True), (True, True, 2, False), (True, False, 1, True), (False, False, 2, True)],
)
def test_training_is_that_of_one_process(world, bias, reshard, micro_batches, foreach):
    run(world, trains_like_one_process, bias=bias, reshard=reshard, micro_batches=micro_batches, foreach=foreach)


def trains_on_mesh(mesh_shape):
    alone = convert(model_of(), CurrentScaling())
    cut = shard(convert(model_of(), CurrentScaling()), mesh=torch_ranks.mesh(mesh_shape))
    losses = [losses_of(m, torch.optim.AdamW(m.parameters(), lr=1e-2)) for m in (alone, cut)]
    assert losses[0] == losses[1]
    assert_gathers_the_whole(cut)


@pytest.mark.parametrize("mesh_shape", [(2, 2), (4, 1), (1, 4), (2, 1)], ids=str)
def test_hybrid_sharding_trains_like_one_process(mesh_shape):
    run(mesh_shape[0] * mesh_shape[1], trains_on_mesh, mesh_shape=mesh_shape)


def trains_with(clip, fused, dtype):
    """No parity here: a norm over ranks has another order of sums, and three ranks do not divide evenly."""
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
    assert_states_are_plain(optimizer)
    if dtype == torch.float32:
        assert_gathers_the_whole(model)


def assert_states_are_plain(optimizer):
    states = [value for state in optimizer.state.values() for value in state.values()]
    assert {type(getattr(value, "_local_tensor", value)) for value in states} == {torch.Tensor}


@pytest.mark.parametrize(
    ("world", "clip", "fused", "dtype"),
    [(3, True, False, torch.float32), (4, True, True, torch.float32), (2, False, False, torch.bfloat16)],
    ids=["clip-3", "fused-4", "bfloat16-2"],
)
def test_optimizers_and_clipping(world, clip, fused, dtype):
    run(world, trains_with, clip=clip, fused=fused, dtype=dtype)


def counts_what_travels(bias):
    world = dist.get_world_size()
    model = shard(convert(model_of(bias), CurrentScaling()))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    losses_of(model, optimizer, steps=1)
    with Wire() as wire:
        losses_of(model, optimizer, steps=1)
    layers = linears(model)
    rows = [-(-layer.out_features // world) for layer in layers]
    sizes = [r * layer.in_features + 4 * bias * r for r, layer in zip(rows, layers, strict=True)]
    gathers = [(torch.uint8, size) for size in sizes]
    # One byte an element of a weight, in the forward pass and again in the backward pass. Biases travel as they are.
    assert wire.of("allgather") == [*gathers, *reversed(gathers)]
    assert wire.of("allreduce") == [(torch.int32, len(layers))]
    assert [dtype for dtype, _ in wire.of("reduce_scatter")] == [torch.float32] * len(layers)
    assert len(wire.calls) == 2 * len(layers) + 1 + len(layers)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_step_gathers_bytes_and_reduces_one_vector(world, bias):
    run(world, counts_what_travels, bias=bias)


def counts_nothing_on_one_rank():
    model = shard(convert(model_of(), CurrentScaling()))
    with Wire() as wire:
        losses_of(model, torch.optim.AdamW(model.parameters()), steps=2)
    assert wire.calls == []


def test_one_rank_needs_no_collective():
    run(1, counts_nothing_on_one_rank)


def reductions_in(wire_of):
    with Wire() as wire:
        wire_of()
    return wire.of("allreduce")


def refreshes_by_itself():
    """Whatever all ranks do alike to weights is noticed: no `update_scales` in here, and the law holds all along."""
    model = shard(convert(model_of(), CurrentScaling()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    one = [(torch.int32, len(linears(model)))] if dist.get_world_size() > 1 else []
    for _ in range(3):
        assert reductions_in(lambda: losses_of(model, optimizer, steps=1, update=False)) == one
    assert reductions_in(lambda: assert_gathers_the_whole(model)) == one
    with torch.no_grad():  # A forward pass alone, then the same weights again.
        assert reductions_in(lambda: model(batch())) == []

    saved = copy.deepcopy({key: value.full_tensor() * 3 for key, value in model.state_dict().items()})
    saved = {
        key: dist.tensor.distribute_tensor(v, model[0].weight.device_mesh, [dist.tensor.Shard(0)])
        for key, v in saved.items()
    }
    for assign in (False, True):
        model.load_state_dict(saved, assign=assign)
        assert reductions_in(lambda: model(batch()).sum().backward()) == one
        assert_gathers_the_whole(model)

    def closure():
        optimizer.zero_grad()
        loss = model(batch()).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert reductions_in(lambda: model(batch())) == one


@every_world
def test_scales_follow_the_weights_unasked(world):
    run(world, refreshes_by_itself)


def refreshes_when_told():
    """In an optimizer hook, for example: nothing is left for the forward pass to do."""
    model = shard(convert(model_of(), CurrentScaling()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer.register_step_post_hook(lambda *_: update_scales(model))
    losses_of(model, optimizer, steps=2, update=False)
    assert reductions_in(lambda: model(batch()).sum().backward()) == []
    assert reductions_in(optimizer.step) == [(torch.int32, 3)]
    assert_gathers_the_whole(model)


def test_scales_are_made_when_update_scales_says():
    run(3, refreshes_when_told)


def refreshes_what_changed():
    """Two optimizers, one frozen weight, formats of two kinds."""
    model = convert(model_of(), CurrentScaling(), filter=lambda _, name: name != "2")
    convert(model, CurrentScaling(weight=FP8_E5M2), filter=lambda _, name: name == "2")
    model[4].weight.requires_grad_(False)
    shard(model)
    first = torch.optim.SGD(model[0].parameters(), lr=0.5)
    second = torch.optim.SGD([*model[2].parameters(), *model[4].parameters()], lr=0.5)
    assert reductions_in(lambda: model(batch()).sum().backward()) == [(torch.int32, 3)]
    first.step()
    assert reductions_in(lambda: model(batch()).sum().backward()) == [(torch.int32, 1)]
    first.step()
    second.step()
    assert reductions_in(lambda: model(batch()).sum().backward()) == [(torch.int32, 3)]
    formats = [layer.weight.to_local().scale_state.fmt.element for layer in linears(model)]
    assert formats == [FP8_E4M3.element, FP8_E5M2.element, FP8_E4M3.element]
    assert_gathers_the_whole(model)


def test_only_weights_that_changed_are_reduced():
    run(2, refreshes_what_changed)


def writes_alone(how):
    """One rank writes to its shard behind everybody's back. Nobody hangs, or takes its codes for the weight's."""
    model = shard(convert(model_of(), CurrentScaling()))
    model(batch())
    weight, rank = model[0].weight, dist.get_rank()
    with torch.no_grad():
        if how == "all":
            weight.mul_(2)
        elif rank == 1:
            weight.to_local()[0] = 7.0
    wrote = how == "all" or rank == 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model[0].unshard()
    assert [("0.weight was written" in str(w.message)) for w in caught if w.category is RuntimeWarning] == [
        True
    ] * wrote
    rows = model[0].weight.dequantize().isnan().all(dim=1)
    expected = torch.zeros(SIZES[1], dtype=torch.bool)
    padded = -(-SIZES[1] // dist.get_world_size())
    expected[slice(None) if how == "all" else slice(padded, 2 * padded)] = True
    assert torch.equal(rows.cpu(), expected)
    model[0].reshard()
    update_scales(model)
    assert_gathers_the_whole(model)


@pytest.mark.parametrize("how", ["one", "all"])
def test_a_write_without_update_scales_sends_nan(how):
    run(3, writes_alone, how=how)


def writes_before_the_first_use():
    model = shard(convert(model_of(), CurrentScaling()))
    with torch.no_grad():
        if dist.get_rank() == 0:
            model[0].weight.to_local().mul_(2)
    assert_gathers_the_whole(model)
    update_scales(model)
    model(batch())  # FSDP2 replaced local tensors of uneven shards in its first forward pass: no write.
    assert_gathers_the_whole(model)


@every_world
def test_weights_may_be_written_before_they_are_used(world):
    run(world, writes_before_the_first_use)


def compiles_the_optimizer(backend):
    """Its hooks are traced with it, so the scales still follow the weights unasked."""
    warnings.filterwarnings("ignore", ".* should not be instantiated", DeprecationWarning)
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
    torch._dynamo.reset()
    model = shard(convert(model_of(), CurrentScaling()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step = torch.compile(optimizer.step, backend=backend)
    for seed in range(3):
        model(batch(seed)).square().mean().backward()
        step()
        optimizer.zero_grad()
    assert reductions_in(lambda: assert_gathers_the_whole(model)) == [(torch.int32, 3)]


def test_compiled_optimizers():
    run(2, compiles_the_optimizer, backend="aot_eager")


def shares_weights():
    model = model_of()
    model.append(nn.Linear(SIZES[0], SIZES[1], bias=False))
    model[-1].weight = model[0].weight
    fully_shard(convert(model.to(torch_ranks.device), CurrentScaling()), mesh=torch_ranks.mesh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses_of(model, optimizer, steps=2)
    assert model[-1].weight is model[0].weight
    assert reductions_in(lambda: update_scales(model)) == [(torch.int32, 3)]
    model.unshard()
    assert isinstance(model[-1].weight, QuantizedTensor)


def test_tied_weights_are_one_weight():
    run(2, shares_weights)


def refuses_to_convert_what_is_sharded():
    model = shard(model_of())
    with pytest.raises(ValueError, match=r"convert: 0.weight .DTensor. is not a plain tensor; convert before sharding"):
        convert(model, CurrentScaling())
    assert not linears(model)
    sharded = shard(convert(model_of(), CurrentScaling()))
    assert isinstance(sharded[0].weight.to_local(), ShardedWeight)


def test_convert_comes_before_sharding():
    run(2, refuses_to_convert_what_is_sharded)
