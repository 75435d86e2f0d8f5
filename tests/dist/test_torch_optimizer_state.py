"""State dicts of `qshard.torch_bridge.Adam`: full or sharded, nested or flat, for any number of ranks."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from qshard.recipes import CurrentScaling
from qshard.torch_bridge import Adam, AdamW, convert
from support import torch_ranks
from support.torch_models import model_of, shard, whole
from support.torch_ranks import on_ranks, run

SIZES = (32, 112, 16, 32)  # Uneven for 3 ranks, or fewer blocks than ranks.
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
FP8 = {"exp_avg_dtype": torch.float8_e4m3fn, "exp_avg_sq_dtype": torch.float8_e5m2}
SETTINGS = {
    "float32": (torch.float32, {}),
    "fp8": (torch.float32, FP8),
    "16 bits": (torch.float32, {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.float16}),
    "remainder": (torch.bfloat16, {**FP8, "master_weights": "remainder"}),
    "master": (torch.bfloat16, {"exp_avg_dtype": torch.float16, "master_weights": "float32"}),
}


def made(name, kind=AdamW, sharded=True):
    dtype, options = SETTINGS[name]
    model = convert(model_of(True, dtype, SIZES), CurrentScaling())
    model = shard(model) if sharded else model
    return model, kind(model.parameters(), lr=1e-2, **options)


def step(model, optimizer, number):
    """Take a step with gradients that do not depend on the number of ranks."""
    for i, p in enumerate(model.parameters()):
        grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * number + i)).to(p)
        p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if isinstance(p, DTensor) else grad
    optimizer.step()
    optimizer.zero_grad()


def leaves(state, prefix=""):
    """Flatten a state dict to {path: value}, with clones of full tensors."""
    if isinstance(state, dict):
        return {k: v for key, value in state.items() for k, v in leaves(value, f"{prefix}/{key}").items()}
    if isinstance(state, (list, tuple)):  # torch turns tuples into lists.
        return {k: v for i, value in enumerate(state) for k, v in leaves(value, f"{prefix}/{i}").items()}
    value = state.full_tensor() if isinstance(state, DTensor) else state
    return {prefix: value.cpu().clone() if isinstance(value, torch.Tensor) else value}


def assert_same(got, want):
    got, want = ({k: v for k, v in leaves(x).items() if "differentiable" not in k} for x in (got, want))  # By torch.
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    for key, value in want.items():
        if isinstance(value, torch.Tensor):
            assert got[key].dtype == value.dtype, key
            assert torch.equal(got[key], value), key
        else:
            assert got[key] == value, key


def values_are_plain(state):
    return all(
        value is None or type(value) in (int, float, bool, str, torch.Tensor) for value in leaves(state).values()
    )


@pytest.mark.each_value
@pytest.mark.parametrize("name", SETTINGS)
@on_ranks(1, 3)
def test_a_full_state_goes_on(name):
    """A full state is that of one process and loads on every rank or by broadcast. All later steps agree."""
    model, optimizer = made(name)
    alone, its_optimizer = made(name, sharded=False)
    for number in range(2):
        step(model, optimizer, number)
        step(alone, its_optimizer, number)
    full = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=FULL))  # Shared on one rank.
    if dist.get_rank() == 0:
        assert values_are_plain(full)
        pickle.loads(pickle.dumps(full))
        for flat in (False, True):
            options = StateDictOptions(full_state_dict=True, cpu_offload=True, flatten_optimizer_state_dict=flat)
            want = get_optimizer_state_dict(alone, its_optimizer, options=options)
            if flat:
                assert values_are_plain(want)
            else:
                assert_same(full, want)
    else:
        assert not full
    sent = [full]
    dist.broadcast_object_list(sent)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    ways = [
        (copy.deepcopy(sent[0]), StateDictOptions(full_state_dict=True)),
        (full, StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)),
        (copy.deepcopy(get_optimizer_state_dict(model, optimizer)), StateDictOptions()),
        (copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=flat)), flat),
    ]
    others = [made(name) for _ in ways]
    for (other, other_optimizer), (state, options) in zip(others, ways, strict=True):
        step(other, other_optimizer, 7)  # State that must not survive.
        with torch.no_grad():
            for p, q in zip(other.parameters(), model.parameters(), strict=True):
                p.copy_(q)
        set_optimizer_state_dict(other, other_optimizer, state, options=options)
        assert_same(optimizer_state(other, other_optimizer), optimizer_state(model, optimizer))
        assert other_optimizer.param_groups[0]["exp_avg_dtype"] is optimizer.param_groups[0]["exp_avg_dtype"]
    step(model, optimizer, 2)
    for other, other_optimizer in others:
        step(other, other_optimizer, 2)
        assert_same(whole(other), whole(model))
        assert_same(optimizer_state(other, other_optimizer), optimizer_state(model, optimizer))


def optimizer_state(model, optimizer):
    return get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))


def saves(folder, name, flat):
    model, optimizer = made(name)
    for number in range(2):
        step(model, optimizer, number)
    state = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    dcp.save({"optimizer": state}, checkpoint_id=folder / "checkpoint")
    full = get_optimizer_state_dict(model, optimizer, options=FULL)
    if dist.get_rank() == 0:
        torch.save(full, folder / "full")


def loads(folder, name, flat):
    model, optimizer = made(name)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = {"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
    dcp.load(state, checkpoint_id=folder / "checkpoint")
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    assert_same(optimizer_state(model, optimizer), torch.load(folder / "full", weights_only=True))


@pytest.mark.each_value
@pytest.mark.parametrize("name", ["fp8", "remainder"])
@pytest.mark.parametrize(("saver", "loader", "flat"), [(3, (2, 2), True), ((2, 2), 1, False)], ids=str)
def test_a_sharded_state_goes_to_other_ranks(name, saver, loader, flat, tmp_path):
    run(saver, saves, folder=tmp_path, name=name, flat=flat)
    run(loader, loads, folder=tmp_path, name=name, flat=flat)


@on_ranks(2)
def test_states_of_torch_go_both_ways():
    """PyTorch's state loads into Adam of qshard, and back; PyTorch's optimizer then continues."""
    ours, optimizer = made("float32")
    theirs = shard(convert(model_of(True, torch.float32, SIZES), CurrentScaling()))
    its_optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    for options in (StateDictOptions(), FULL):
        given = StateDictOptions(full_state_dict=options is FULL)
        pairs = [(theirs, its_optimizer), (ours, optimizer)]
        for (model, source), (other, target) in (pairs, pairs[::-1]):
            step(model, source, 3)
            sent = [copy.deepcopy(get_optimizer_state_dict(model, source, options=options))]
            if options is FULL:
                dist.broadcast_object_list(sent)
            set_optimizer_state_dict(other, target, sent[0], options=given)
            for p, q in zip(model.parameters(), other.parameters(), strict=True):
                a, b = source.state[p], target.state[q]
                assert a["step"] == b["step"]
                for name in ("exp_avg", "exp_avg_sq"):
                    assert torch.equal(a[name].full_tensor(), b[name].full_tensor())
    step(theirs, its_optimizer, 4)
    assert all(state["step"] == 5 for state in its_optimizer.state.values())


@on_ranks(2)
def test_a_whole_state_of_another_dtype_is_refused():
    """torch passes a full state on unchecked; after the error the optimizer is unchanged."""
    model, optimizer = made("fp8")
    step(model, optimizer, 0)
    before = optimizer_state(model, optimizer)
    other, its_optimizer = made("float32")
    step(other, its_optimizer, 0)
    sent = [get_optimizer_state_dict(other, its_optimizer, options=FULL)]
    dist.broadcast_object_list(sent)
    text = r"AdamW: state exp_avg \(float32\) is of the whole parameter .*, which is sharded; load"
    with pytest.raises(ValueError, match=text):
        set_optimizer_state_dict(model, optimizer, sent[0], options=StateDictOptions(full_state_dict=True))
    assert_same(optimizer_state(model, optimizer), before)


@on_ranks(2)
def test_old_state_dicts_load():
    """Older state dicts have `torch.dtype` values and FP8 tensors."""
    model, optimizer = made("fp8", kind=Adam)
    step(model, optimizer, 0)
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        group.update({name: getattr(torch, group[name]) for name in FP8})
    for values in state["state"].values():
        for name in ("exp_avg", "exp_avg_sq"):
            if isinstance(values[name], dict):
                ((dtype, of_bytes),) = values[name].items()
                local = of_bytes.to_local().view(getattr(torch, dtype))
                values[name] = DTensor.from_local(
                    local, torch_ranks.mesh(), of_bytes.placements, shape=of_bytes.shape, stride=of_bytes.stride()
                )
    other, its_optimizer = made("fp8", kind=Adam)
    its_optimizer.load_state_dict(state)
    assert_same(optimizer_state(other, its_optimizer), optimizer_state(model, optimizer))
    assert any(s["exp_avg"].dtype == torch.float8_e4m3fn for s in its_optimizer.state.values())
