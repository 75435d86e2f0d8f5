"""State dicts of ZeRO: exact, in full shapes, to any sharding by `torch.distributed.checkpoint`, or to plain models."""

from __future__ import annotations

import copy
import io
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from qshard.torch_bridge import Adam, ZeroOptimizer, load_scaling_state, scaling_state
from qshard.torch_bridge._zero.state_dict import SlicedState
from support import torch_ranks
from support.formats import ZEROED as RECIPES
from support.torch_ranks import on_ranks, run
from support.zero import FEW_BITS, OPTIONS, every_stage, loss_of, model_of, train

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def made(recipe, stage, seed=0, **options):
    model = model_of(RECIPES[recipe], seed=seed)
    units = list(model) if stage == "units" else None
    return model, ZeroOptimizer(model, **OPTIONS, shard_weights=bool(stage), units=units, **options)


def whole_state(model, optimizer):
    """Return the full state that a resumed run depends on, on every rank."""
    everywhere = StateDictOptions(full_state_dict=True)
    states = get_optimizer_state_dict(model, optimizer, options=everywhere)["state"]
    found = {f"{name} {key}": value for name, state in states.items() for key, value in flat_items(state)}
    return {**get_model_state_dict(model, options=everywhere), **found}


def flat_items(state):
    for name, value in state.items():
        parts = value if isinstance(value, dict) else {"": value}
        yield from ((f"{name} {key}", part) for key, part in parts.items())


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name, value in want.items():
        there = got[name]
        assert (there.shape, there.dtype) == (value.shape, value.dtype), name
        bits = [tensor.cpu().flatten().view(torch.uint8) for tensor in (there, value)]
        assert torch.equal(*bits), name


def save(folder, recipe, stage, options, *, is_async=False):
    model, optimizer = made(recipe, stage, **options)
    train(model, optimizer, range(2))
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    assert all(type(v) is (torch.Tensor if dist.get_world_size() == 1 else SlicedState) for v in weights_in(states))
    state = whole_state(model, optimizer)
    if is_async:  # A snapshot: steps go on while it is written.
        writing = dcp.async_save(states, checkpoint_id=f"{folder}/saved", process_group=dist.new_group())
    else:
        dcp.save(states, checkpoint_id=f"{folder}/saved")
    if dist.get_rank() == 0:
        torch.save(state, f"{folder}/whole.pt")
        torch.save(train(model, optimizer, range(2, 4)) if dist.get_world_size() == 1 else [], f"{folder}/losses.pt")
    if is_async:
        train(model, optimizer, range(2, 4))
        writing.result()


def weights_in(states):
    return [value for name, value in states["model"].items() if name.endswith(("weight", "bias"))]


def load(folder, recipe, stage, options):
    model, optimizer = made(recipe, stage, seed=1, **options)
    train(model, optimizer, range(1))
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(states, checkpoint_id=f"{folder}/saved")
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    assert_same(whole_state(model, optimizer), torch.load(f"{folder}/whole.pt"))
    train(model, optimizer, range(2))  # Also on ranks without elements.


CUTS = [((2, False), (3, True)), ((3, "units"), (1, False)), ((1, True), (2, "units")), ((2, True), (2, False))]


@pytest.mark.parametrize(("before", "after"), CUTS)
def test_other_cuts(before, after, tmp_path):
    """Another number of ranks, the other stage, other units: every bit of the state is restored."""
    for case, (world, stage) in ((save, before), (load, after)):
        run(world, case, folder=str(tmp_path), recipe="DelayedScaling", stage=stage, options={})


@pytest.mark.parametrize("recipe", ["NVFP4", "BlockScaling"])
def test_states_of_few_bits(recipe, tmp_path):
    run(3, save, folder=str(tmp_path), recipe=recipe, stage=True, options=FEW_BITS, is_async=recipe == "NVFP4")
    run(2, load, folder=str(tmp_path), recipe=recipe, stage=False, options=FEW_BITS)


@pytest.mark.each_value
@on_ranks(1, 2)
@every_stage
@pytest.mark.parametrize("recipe", ["DelayedScaling", "NVFP4"])
def test_resumed_runs(recipe, stage):
    """Losses continue bit for bit from full state dicts, in either stage; scales may be loaded first or last."""
    model, optimizer = made(recipe, stage)
    train(model, optimizer, range(2))
    states = get_model_state_dict(model, options=FULL), get_optimizer_state_dict(model, optimizer, options=FULL)
    if dist.get_rank() > 0:
        assert states == ({}, {})
    kept, scaling = copy.deepcopy(states), copy.deepcopy(scaling_state(model))
    losses = train(model, optimizer, range(2, 4))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for other in (stage, not stage):
        states = copy.deepcopy(kept)
        again, resumed = made(recipe, other, seed=1)
        train(again, resumed, range(1))  # Its scales are others.
        if other:
            load_scaling_state(again, scaling)
        set_model_state_dict(again, states[0], options=options)
        set_optimizer_state_dict(again, resumed, states[1], options=options)
        if not other:
            load_scaling_state(again, scaling)
        assert train(again, resumed, range(2, 4)) == losses, other


@on_ranks(1, 2)
@every_stage
def test_load_state_dict(stage):
    """Full values, slices, a subset, a submodule, and the model of a state dict written in place."""
    model, optimizer = made("MXFP8", stage)
    values = {name: torch.randn_like(value) for name, value in optimizer.full_weights().items()}

    def outputs():
        tokens = torch.arange(7, device=torch_ranks.device)
        with torch.no_grad():
            return model(tokens)

    state = {**get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)), **values}
    model.load_state_dict(state)
    assert_same(optimizer.full_weights(), values)
    want = outputs()
    plain = model_of(RECIPES["MXFP8"], seed=2)
    plain.load_state_dict(state)
    assert torch.equal(plain(torch.arange(7, device=torch_ranks.device)), want)
    # Snapshots, then a subset, in place.
    snapshot = copy.deepcopy(model.state_dict())
    optimizer.zero_grad()
    loss_of(model, 0, dist.get_rank()).backward()
    optimizer.step()
    assert not torch.equal(outputs(), want)
    model[1].load_state_dict({name[2:]: value for name, value in snapshot.items() if name.startswith("1.")})
    own = optimizer.full_weights()
    first = [name for name in own if name.startswith("1.")]
    assert_same({name: own[name] for name in first}, {name: values[name] for name in first})
    model.load_state_dict(snapshot)
    assert torch.equal(outputs(), want)
    with pytest.raises(RuntimeError, match=r"size mismatch for 0.weight"):
        model.load_state_dict({**state, "0.weight": torch.zeros(2, 2)})
    with pytest.raises(RuntimeError, match=r"with assign=True would replace its parameters; load without assign"):
        model.load_state_dict(state, assign=True)
    assert torch.equal(outputs(), want)


@on_ranks(2)
@every_stage
def test_loaded_in_place(stage):
    """`dcp.load` into a state dict takes effect without `load_state_dict`."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    model, optimizer = made("CurrentScaling", stage)
    dcp.save(model.state_dict(), checkpoint_id=folder[0])
    losses = train(model, optimizer, range(1))
    train(model, optimizer, range(1, 2))
    dcp.load(model.state_dict(), checkpoint_id=folder[0])
    assert loss_of(model, 0, dist.get_rank()).item() == losses[0]


@on_ranks(2)
def test_slices_of_a_state_dict():
    """Slices have no values: using one as a tensor raises an error that names the fix."""
    model, optimizer = made("CurrentScaling", True)
    state = model.state_dict()
    sliced = state["0.weight"]
    assert (sliced.shape, sliced.dtype, type(sliced)) == ((7, 32), torch.float32, SlicedState)
    assert_same({"": sliced.full_tensor()}, {"": optimizer.full_weights()["0.weight"]})
    for use in (
        lambda: sliced * 2,
        lambda: sliced.mul_(2),
        lambda: sliced.norm(),
        lambda: torch.save(state, io.BytesIO()),
        lambda: torch.save(optimizer.state_dict(), io.BytesIO()),
    ):
        with pytest.raises(RuntimeError, match=r"of a state dict is the slice of this rank.*\n.*full_state_dict=True"):
            use()
    with pytest.raises(RuntimeError, match="of a state dict is the slice of this rank"):
        nn.Embedding(7, 32).load_state_dict({"weight": sliced})
    other, _ = made("CurrentScaling", False)
    with pytest.raises(RuntimeError, match=r"is not the slice of this rank \(.*\); load it with torch.distributed"):
        other.load_state_dict(state)  # Its layout differs: one unit.


@pytest.mark.timeout(60)
@on_ranks(2)
@every_stage
def test_a_state_that_does_not_fit_raises_on_all_ranks_and_changes_nothing(stage):
    model, optimizer = made("CurrentScaling", stage)
    train(model, optimizer, range(1))
    before, rank = whole_state(model, optimizer), dist.get_rank()
    state = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    names = state["param_groups"][0]["params"]
    state = {**state, "state": dict(enumerate(state["state"][name] for name in names))}
    state["param_groups"][0]["params"] = [*range(len(names))]
    up = names.index("1.up.weight")
    for change, error, message in [
        (None, ValueError, r"state_dict \(None\) is not the state of an optimizer"),
        ({"param_groups": []}, ValueError, r"groups of \[\]"),
        ({"state": {99: {}}}, ValueError, r"a parameter 99 that no group has"),
        # As many elements, of another parameter.
        (
            {"state": {up: {"exp_avg": torch.zeros(32, 64)}}},
            ValueError,
            r"\(32, 64\) does not have the shape \(64, 32\)",
        ),
        ({"state": {up: {"exp_avg": torch.zeros(64, 32, dtype=torch.int64)}}}, TypeError, r"exp_avg \(int64\) is not"),
    ]:
        with pytest.raises(error, match=message):
            optimizer.load_state_dict(change and {**state, **change})
    with pytest.raises(
        ValueError, match=r"state_dict \({}\) is not the state|rank 1 differs from rank 0: it cannot load"
    ):
        optimizer.load_state_dict({} if rank == 1 else state)
    with pytest.raises(NotImplementedError, match="add_param_group is not supported"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    assert_same(whole_state(model, optimizer), before)
    train(model, optimizer, range(1))


@on_ranks(1)
def test_scales_of_rows_are_those_of_the_whole_if_rows_are_whole_blocks():
    """`Adam` has blocks of each row, and slices have blocks of the flattened weight."""
    for width, fits in ((128, True), (100, False)):  # As many scales of 2 x 100, but of other elements.
        weights = [nn.Linear(width, 2, bias=False) for _ in range(2)]
        adam, zero = Adam(weights[0].parameters(), **FEW_BITS), ZeroOptimizer(weights[1], **FEW_BITS)
        weights[0](torch.randn(4, width)).square().sum().backward()
        adam.step()
        if not fits:
            with pytest.raises(ValueError, match=r"exp_avg_scale_inv\) \(2, 1\) does not have the shape \(1, 2\)"):
                zero.load_state_dict(adam.state_dict())
            continue
        zero.load_state_dict(adam.state_dict())
        for a, b in zip(*[flat_items(each.state_dict()["state"][0]) for each in (adam, zero)], strict=True):
            assert torch.equal(a[1].flatten(), b[1].flatten()), a[0]


@on_ranks(1, 2)
@every_stage
def test_to_and_from_plain_programs(stage):
    """A plain model with torch's AdamW loads the state and saves it back; both train alike up to rounding."""
    rank = dist.get_rank()
    everywhere = StateDictOptions(full_state_dict=True)

    def made(seed):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 3)).to(torch_ranks.device)

    def loss(model, step):
        torch.manual_seed(step)
        return model(torch.randn(4, 8, device=torch_ranks.device)).square().sum()

    options = {"lr": 0.1, "weight_decay": 0.1}
    model = made(rank)
    optimizer = ZeroOptimizer(model, **options, decoupled_weight_decay=True, shard_weights=stage)
    for step in range(2):
        loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = get_model_state_dict(model, options=everywhere)
    states = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=everywhere))  # AdamW would share them.
    plain = made(2)
    adam = torch.optim.AdamW(plain.parameters(), **options)
    plain.load_state_dict(state)
    # Without the broadcast, torch 2.13 fails on settings that AdamW does not have.
    from_first = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(plain, adam, states, options=from_first)
    for step in range(2, 4):
        loss(plain, step).backward()
        adam.step()
        adam.zero_grad()
        loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in optimizer.full_weights().items():
        torch.testing.assert_close(plain.get_parameter(name).detach(), value, rtol=1e-5, atol=1e-6)
    set_model_state_dict(model, plain.state_dict(), options=everywhere)
    set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(plain, adam), options=from_first)
    assert_same(optimizer.full_weights(), dict(plain.state_dict()))
    again = get_optimizer_state_dict(model, optimizer, options=everywhere)["state"]
    for name, values in get_optimizer_state_dict(plain, adam)["state"].items():
        assert_same(again[name], dict(values))
