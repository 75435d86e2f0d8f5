"""Checkpoints of sharded models: plain tensors, bit for bit, for any number of ranks, with or without qshard."""

import pickletools
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from qshard.recipes import CurrentScaling
from qshard.torch_bridge import Linear, ShardedWeight, convert, update_scales
from support import torch_ranks
from support.torch_models import shard
from support.torch_ranks import run

ROWS = 105  # Uneven for 2 and 4 ranks, even for 3.


def model_of(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, ROWS), nn.GELU(), nn.Linear(ROWS, 3), nn.Linear(3, 20, bias=False))


def trained(model, steps=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        x = torch.randn(6, 20, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        update_scales(model)
    return optimizer


def whole(model):
    return {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}


def codes(model):
    """What is gathered of each weight."""
    result = {}
    for name, layer in model.named_modules():
        if isinstance(layer, Linear):
            layer.unshard()
            result[name] = layer.weight.rowwise.data.view(torch.uint8).clone(), layer.weight.rowwise.scale_inv.clone()
            layer.reshard()
    return result


def assert_equal(got, want):
    assert got.keys() == want.keys()
    for key in want:
        torch.testing.assert_close(got[key], want[key], rtol=0, atol=0)


def save(folder):
    """A trained model and its optimizer; and beside them, for comparison, whole tensors and the next loss."""
    model = shard(convert(model_of(), CurrentScaling()))
    optimizer = trained(model)
    state, optimizer_state = get_state_dict(model, optimizer)
    for value in state.values():
        assert type(value) is DTensor
        assert type(value._local_tensor) is torch.Tensor
    dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=f"{folder}/checkpoint")
    expected = {"whole": whole(model), "codes": codes(model), "loss": model(torch.ones(1, 20)).sum().item()}
    if dist.get_rank() == 0:
        torch.save(expected, f"{folder}/expected")


def load(folder, mesh_shape, meta):
    expected = torch.load(f"{folder}/expected", weights_only=True)
    with torch.device("meta" if meta else "cpu"):
        model = model_of(seed=1)
    model = shard(convert(model, CurrentScaling()), mesh=torch_ranks.mesh(mesh_shape))
    if meta:
        model.to_empty(device="cpu")
    else:
        model(torch.ones(1, 20))  # Scales of other weights must not stay.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state, optimizer_state = get_state_dict(model, optimizer)
    both = {"model": state, "optimizer": optimizer_state}
    dcp.load(both, checkpoint_id=f"{folder}/checkpoint")
    set_state_dict(model, optimizer, model_state_dict=both["model"], optim_state_dict=both["optimizer"])
    assert_equal(whole(model), expected["whole"])
    assert_equal(codes(model), expected["codes"])
    assert model(torch.ones(1, 20)).sum().item() == expected["loss"]
    trained(model, steps=1)


@pytest.fixture(scope="module", params=[1, 2, 3], ids=lambda world: f"saved-by-{world}")
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    run(request.param, save, folder=str(folder))
    return folder


@pytest.mark.parametrize("meta", [False, True], ids=["made", "meta"])
@pytest.mark.parametrize("mesh_shape", [(1, 1), (1, 3), (2, 2)], ids=str)
def test_a_checkpoint_loads_on_other_ranks(saved, mesh_shape, meta):
    run(mesh_shape[0] * mesh_shape[1], load, folder=str(saved), mesh_shape=mesh_shape, meta=meta)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_loads_without_qshard(saved):
    """Into `nn.Linear`, in one process; and no file names a class of ours."""
    model = model_of(seed=1)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=saved / "checkpoint", no_dist=True)
    model.load_state_dict(state["model"])
    expected = torch.load(saved / "expected", weights_only=True)
    assert_equal(dict(model.named_parameters()), {k: nn.Parameter(v) for k, v in expected["whole"].items()})
    for file in (saved / "checkpoint").iterdir():
        assert b"qshard" not in file.read_bytes()


def pickled_names(file: Path):
    with zipfile.ZipFile(file) as archive:
        data = next(archive.read(name) for name in archive.namelist() if name.endswith("data.pkl"))
    return {str(argument) for _, argument, _ in pickletools.genops(data) if argument is not None}


def broadcasts_a_full_state(folder):
    """Rank 0 alone has the tensors; the model has no memory yet."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=True)
    source = shard(convert(model_of(), CurrentScaling()))
    trained(source)
    full = get_model_state_dict(source, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        assert {type(value) for value in full.values()} == {torch.Tensor}
        torch.save(full, f"{folder}/full")
        assert not any("qshard" in name for name in pickled_names(Path(folder, "full")))
    with torch.device("meta"):
        model = model_of()
    shard(convert(model, CurrentScaling())).to_empty(device="cpu")
    set_model_state_dict(model, full if dist.get_rank() == 0 else {}, options=options)
    assert_equal(whole(model), whole(source))
    assert_equal(codes(model), codes(source))


@pytest.mark.parametrize("world", [2, 4])
def test_one_rank_broadcasts_a_full_state(world, tmp_path):
    run(world, broadcasts_a_full_state, folder=str(tmp_path))


def keeps_and_restores():
    """`state_dict` shares memory with the model, as ever: what is to be kept is copied."""
    model = shard(convert(model_of(), CurrentScaling()))
    model(torch.ones(1, 20))
    before, kept = codes(model), {key: value.clone() for key, value in model.state_dict().items()}
    trained(model)
    model.load_state_dict(kept)
    assert isinstance(model[0].weight.to_local(), ShardedWeight)
    assert_equal(codes(model), before)


@pytest.mark.parametrize("world", [1, 3, 4])
def test_a_kept_state_restores_the_codes(world):
    run(world, keeps_and_restores)
