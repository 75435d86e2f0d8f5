"""Checkpoints of sharded models: plain tensors, bit for bit, for any number of ranks, with or without qshard."""

import pickletools
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from qshard.recipes import NVFP4, CurrentScaling, DelayedScaling
from qshard.torch_bridge import Adam, ShardedWeight, convert, load_scaling_state, scaling_state, update_scales
from support.formats import RECIPES
from support.pairs import turns
from support.torch_models import batch, linears, model_of, planes, shard, whole
from support.torch_ranks import on_ranks, run

SIZES = (32, 112, 16, 32)  # Uneven for 3 ranks, or fewer blocks than ranks.
FP8 = {"exp_avg_dtype": torch.float8_e4m3fn, "exp_avg_sq_dtype": torch.float8_e5m2}
SUBJECTS = {
    "current": (CurrentScaling(), torch.float32, torch.optim.AdamW, {}),
    "delayed": (DelayedScaling(history=2), torch.float32, torch.optim.AdamW, {}),
    "seeds": (NVFP4(), torch.float32, torch.optim.AdamW, {}),
    "float32": (CurrentScaling(), torch.float32, Adam, {}),
    "float8": (CurrentScaling(), torch.bfloat16, Adam, {**FP8, "master_weights": "remainder"}),
    "float16": (CurrentScaling(), torch.bfloat16, Adam, {"exp_avg_dtype": torch.float16, "master_weights": "float32"}),
}


def made(name, seed=0, on_meta=False):
    """Build a model and its optimizer."""
    recipe, dtype, kind, options = SUBJECTS[name]
    model = model_of(True, dtype, SIZES, seed)
    model = shard(convert(model.to("meta") if on_meta else model, recipe))
    if on_meta:
        model.to_empty(device="cpu")
    return model, kind(model.parameters(), lr=1e-2, **options)


def train(model, optimizer, steps):
    """Train with gradients that do not depend on the number of ranks; averages over 3 would."""
    for step in steps:
        forward(model, step)
        for i, p in enumerate(model.parameters()):
            grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + i)).to(p.dtype)
            p.grad = distribute_tensor(grad, p.device_mesh, p.placements)
        optimizer.step()
        optimizer.zero_grad()
        update_scales(model)


def forward(model, step):
    loss = model(batch(step, SIZES[0]).to(next(model.parameters()).dtype)).float().square().sum()
    loss.backward()
    return loss.item()


def contents(model, optimizer):
    """Return copies of all full tensors of a checkpoint and of the gathered codes."""
    kept = [*whole(model).values(), *(buffer.clone() for buffer in model.buffers())]  # Before a gather caches amaxes.
    states = [value for p in model.parameters() for _, value in sorted(optimizer.state.get(p, {}).items())]
    codes = [part for plane in planes(model) for part in plane if part is not None]
    exact = [t.float() for t in (*states, *codes)]  # gloo cannot gather FP8.
    return [*kept, *((t.full_tensor() if isinstance(t, DTensor) else t).clone() for t in exact)]


def assert_equal(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def saves(folder, name):
    """Save a trained model, its optimizer and its contents; then its next loss and the contents after one more step."""
    model, optimizer = made(name)
    train(model, optimizer, range(3))
    state, optimizer_state = get_state_dict(model, optimizer)
    for value in state.values():
        assert isinstance(value, torch.Tensor)
        assert type(getattr(value, "_local_tensor", value)) is torch.Tensor
    both = {"model": state, "optimizer": optimizer_state, "scaling": scaling_state(model)}
    dcp.save(both, checkpoint_id=folder / "checkpoint")
    expected = {"weights": whole(model), "now": contents(model, optimizer)}
    expected["loss"] = forward(model, 7)
    train(model, optimizer, [8])
    expected["then"] = contents(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(expected, folder / "expected")


def loads(folder, name, on_meta):
    expected = torch.load(folder / "expected", weights_only=True)
    model, optimizer = made(name, 1, on_meta)
    if not on_meta:
        forward(model, 0)  # Scales of other weights must not survive.
        optimizer.zero_grad()
    state, optimizer_state = get_state_dict(model, optimizer)
    both = {"model": state, "optimizer": optimizer_state, "scaling": scaling_state(model)}
    dcp.load(both, checkpoint_id=folder / "checkpoint")
    set_state_dict(model, optimizer, model_state_dict=both["model"], optim_state_dict=both["optimizer"])
    load_scaling_state(model, both["scaling"])
    assert_equal(contents(model, optimizer), expected["now"])
    assert forward(model, 7) == expected["loss"]
    train(model, optimizer, [8])
    assert_equal(contents(model, optimizer), expected["then"])


@turns(1, name=list(SUBJECTS), ranks=[(1, (2, 2)), (2, 3), (3, 1), (3, (2, 2))])
def test_a_checkpoint_goes_on_with_other_ranks(name, ranks, tmp_path):
    """Bit for bit: codes do not depend on ranks, so states and seeds move unchanged."""
    saver, loader = ranks
    run(saver, saves, folder=tmp_path, name=name)
    for on_meta in (False, True):
        run(loader, loads, folder=tmp_path, name=name, on_meta=on_meta)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_loads_without_qshard(tmp_path):
    """Into `nn.Linear`, in one process; no file names a qshard class."""
    run(2, saves, folder=tmp_path, name="current")
    model = model_of(True, sizes=SIZES, seed=1)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    model.load_state_dict(state["model"])
    expected = torch.load(tmp_path / "expected", weights_only=True)["weights"]
    assert_equal(whole(model).values(), expected.values())
    for file in (tmp_path / "checkpoint").iterdir():
        assert b"qshard" not in file.read_bytes()


def pickled_names(file: Path):
    with zipfile.ZipFile(file) as archive:
        data = next(archive.read(name) for name in archive.namelist() if name.endswith("data.pkl"))
    return {str(argument) for _, argument, _ in pickletools.genops(data) if argument is not None}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
@on_ranks(2)
def test_converted_and_plain_models_load_each_other(recipe, tmp_path):
    """Strictly, through files of `torch.distributed.checkpoint` and through full state dicts."""
    first, second = (model_of(True, sizes=(128, 256, 128), seed=seed) for seed in (0, 1))
    converted, plain = shard(convert(first, recipe)), shard(second)
    full = StateDictOptions(full_state_dict=True)
    for step, (saver, loader) in enumerate([(converted, plain), (plain, converted)]):
        with torch.no_grad():
            saver[0].weight.mul_(2)  # The loader has other values.
        want = whole(saver)
        dcp.save(get_model_state_dict(saver), checkpoint_id=tmp_path / str(step))
        state = get_model_state_dict(loader)
        dcp.load(state, checkpoint_id=tmp_path / str(step))
        set_model_state_dict(loader, state)
        assert whole(loader).keys() == want.keys()
        assert_equal(whole(loader).values(), want.values())
        with torch.no_grad():
            loader[0].weight.zero_()
        set_model_state_dict(loader, get_model_state_dict(saver, options=full), options=full)
        assert_equal(whole(loader).values(), want.values())


@on_ranks(2, 4)
def test_one_rank_broadcasts_a_full_state(tmp_path):
    """Only rank 0 has the tensors; the model is still on meta."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=True)
    source, optimizer = made("current")
    train(source, optimizer, range(2))
    full = get_model_state_dict(source, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        assert {type(value) for value in full.values()} == {torch.Tensor}
        torch.save(full, tmp_path / "full")
        assert not any("qshard" in name for name in pickled_names(tmp_path / "full"))
    model, _ = made("current", on_meta=True)
    set_model_state_dict(model, full if dist.get_rank() == 0 else {}, options=options)
    optimizer.state.clear()
    assert_equal(contents(model, optimizer), contents(source, optimizer))


@on_ranks(1, 3, 4)
def test_a_kept_state_restores_the_codes():
    """`state_dict` shares memory with the model, as in PyTorch, so a snapshot must be cloned."""
    model, optimizer = made("current")
    forward(model, 0)
    before, kept = contents(model, optimizer), {key: value.clone() for key, value in model.state_dict().items()}
    train(model, optimizer, range(2))
    model.load_state_dict(kept)
    assert all(isinstance(layer.weight.to_local(), ShardedWeight) for layer in linears(model))
    optimizer.state.clear()
    assert_equal(contents(model, optimizer), before)
