"""A run that was killed goes on from the last whole checkpoint, with the losses of one that nobody touched."""

import os
import signal

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from qshard.torch_bridge import AdamW, convert, load_scaling_state, scaling_state, update_scales
from support.formats import GATHERED
from support.torch_models import BLOCK_SIZES, batch, model_of, shard
from support.torch_ranks import run

STEPS, EVERY, DIES = 8, 3, 7


def made(name):
    model = shard(convert(model_of(True, sizes=BLOCK_SIZES), GATHERED[name]))
    return model, AdamW(model.parameters(), lr=1e-2, exp_avg_dtype=torch.bfloat16)


def train(folder, name, way, kills=False):
    """Losses by step, from the last whole checkpoint on. A rank that dies says nothing before."""
    model, optimizer = made(name)
    whole = sorted(folder.glob("step*/.metadata"), key=lambda path: int(path.parent.name.removeprefix("step")))
    first = 0
    if whole:
        state, optimizer_state = get_state_dict(model, optimizer)
        both = {"model": state, "optimizer": optimizer_state, "scaling": scaling_state(model)}
        dcp.load(both, checkpoint_id=whole[-1].parent)
        set_state_dict(model, optimizer, model_state_dict=both["model"], optim_state_dict=both["optimizer"])
        load_scaling_state(model, both["scaling"])
        first = int(whole[-1].parent.name.removeprefix("step"))
    losses, writing = {}, None
    group = dist.new_group() if way == "async" else None  # Its collectives run beside those of the model.
    for step in range(first, STEPS):
        if kills and step == DIES and dist.get_rank() == 1:
            if writing is not None:  # Else the kill may come before the last checkpoint is whole.
                writing.result()
            os.kill(os.getpid(), signal.SIGKILL)
        loss = model(batch(100 * dist.get_rank() + step, BLOCK_SIZES[0])).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        update_scales(model)
        losses[step] = loss.item()
        if way is not None and (step + 1) % EVERY == 0:
            state, optimizer_state = get_state_dict(model, optimizer)
            if writing is not None:
                writing.result()
            both = {"model": state, "optimizer": optimizer_state, "scaling": scaling_state(model)}
            where = folder / f"step{step + 1}"
            if way == "async":
                writing = dcp.async_save(both, checkpoint_id=where, process_group=group)
            else:
                dcp.save(both, checkpoint_id=where)
    if writing is not None:
        writing.result()
    return losses


def keeps(folder, name, way, to):
    torch.save(train(folder, name, way), folder / f"{to}{dist.get_rank()}")


def dies(folder, name, way):
    train(folder, name, way, kills=True)


@pytest.mark.parametrize(
    ("name", "way"),
    [("CurrentScaling", "sync"), pytest.param("DelayedScaling", "async", marks=pytest.mark.slow)],
)
def test_a_killed_rank_leaves_a_checkpoint(name, way, tmp_path):
    """Of 2 ranks, with real files and a real SIGKILL; one more checkpoint is left half written."""
    with pytest.raises(AssertionError) as failed:
        run(2, dies, folder=tmp_path, name=name, way=way)
    assert f"exit code {-signal.SIGKILL}, died" in str(failed.value)
    assert "rank 0 of 2: Traceback" in str(failed.value), "the other rank ends too, and says so"
    found = sorted(path.parent.name for path in tmp_path.glob("step*/.metadata"))
    assert found[-1:] == ["step6"]
    (tmp_path / "step9").mkdir()
    (tmp_path / "step9" / "__0_0.distcp").write_bytes(b"of a rank that went on to write")
    run(2, keeps, folder=tmp_path, name=name, way=None, to="resumed")
    untouched = tmp_path / "untouched"
    untouched.mkdir()
    run(2, keeps, folder=untouched, name=name, way=None, to="all")
    for rank in range(2):
        resumed, whole = torch.load(tmp_path / f"resumed{rank}"), torch.load(untouched / f"all{rank}")
        assert list(resumed) == [6, 7]
        assert resumed == {step: whole[step] for step in resumed}


def often(name):
    """Mark recipes with no more in a checkpoint than CurrentScaling as slow."""
    has_state = GATHERED[name].stateful or GATHERED[name].stochastic
    return [] if has_state or name == "CurrentScaling" else [pytest.mark.slow]


@pytest.mark.parametrize("name", [pytest.param(name, marks=often(name)) for name in GATHERED])
def test_a_resumed_run_has_the_losses_of_one_that_was_not(name, tmp_path):
    """Bit for bit, for every recipe: seeds and delayed scales are in the checkpoint too."""
    run(3, keeps, folder=tmp_path, name=name, way="sync", to="all")
    run(3, keeps, folder=tmp_path, name=name, way=None, to="resumed")
    for rank in range(3):
        resumed, whole = torch.load(tmp_path / f"resumed{rank}"), torch.load(tmp_path / f"all{rank}")
        assert list(resumed) == [6, 7]
        assert resumed == {step: whole[step] for step in resumed}
