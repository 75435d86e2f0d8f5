"""Recipes in checkpoints of `torch.distributed.checkpoint`, under FSDP2: other recipes raise before weights change."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import qshard.torch_bridge as qt
from qshard.recipes import NVFP4
from support.torch_models import model_of, shard
from support.torch_ranks import on_ranks

SIZES = (64, 128, 64)


def made(recipe, seed=0):
    model = model_of(True, sizes=SIZES, seed=seed)
    return shard(model if recipe is None else qt.convert(model, recipe))


def values(model):
    return [p.to_local().detach().clone() for p in model.parameters()]


def alike(one, other):
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def save(model, path, planner=True):
    options = {"planner": qt.RecipeSavePlanner(model)} if planner else {}
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=path, **options)
    return values(model)


def load(model, path, planner=True):
    state = {"model": get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=path, **({"planner": qt.RecipeLoadPlanner(model)} if planner else {}))
    set_model_state_dict(model, state["model"])
    return values(model)


def assert_refused(model, path, ranks, text):
    before = values(model)
    with pytest.raises(dcp.CheckpointException) as caught:
        load(model, path)
    failures = caught.value.failures
    assert set(failures) == ranks
    for error, _ in failures.values():
        assert isinstance(error, ValueError)
        assert str(error).startswith("RecipeLoadPlanner: ")
        assert text in str(error)
    assert alike(before, values(model))


@on_ranks(2)
@pytest.mark.parametrize("saved", ["MXFP8", NVFP4(wgrad="bf16")])
def test_other_recipes_raise(saved, tmp_path):
    want = save(made(saved, seed=1), tmp_path)
    for recipe in ("BlockScaling", "NVFP4", {"0": None, "*": saved}, None):
        assert_refused(made(recipe), tmp_path, {0, 1}, "0 was saved with")
        assert alike(load(made(recipe), tmp_path, planner=False), want)
    assert alike(load(made(saved), tmp_path), want)
    # One rank alone: the others raise too, instead of a wait in the next collective.
    other = made(("BlockScaling", saved)[dist.get_rank()])
    assert_refused(other, tmp_path, {0}, "here it has BlockScaling()")


@on_ranks(2)
def test_switch(tmp_path):
    """A model without the switch of the run that saved raises, and after it loads."""
    model = made("MXFP8", seed=1)
    early = save(model, tmp_path / "early")
    qt.switch_recipe(model, {"2": "BlockScaling"})
    late = save(model, tmp_path / "late")
    resumed = made("MXFP8")
    assert_refused(
        resumed, tmp_path / "late", {0, 1}, "2 was saved with BlockScaling(), but here it has MXFP8() (1 layer"
    )
    assert alike(load(resumed, tmp_path / "early"), early)
    qt.switch_recipe(resumed, {"2": "BlockScaling"})
    assert alike(load(resumed, tmp_path / "late"), late)
    assert_refused(resumed, tmp_path / "early", {0, 1}, "2 was saved with MXFP8()")
    last = save(qt.switch_recipe(model, None), tmp_path / "last")
    assert_refused(
        resumed, tmp_path / "last", {0, 1}, "0 was saved with None, but here it has MXFP8() (2 layers differ)"
    )
    for plain in (qt.switch_recipe(resumed, None), made(None)):
        assert alike(load(plain, tmp_path / "last"), last)


@on_ranks(2)
@pytest.mark.parametrize("planner", [True, False])
def test_checkpoints_of_plain_models_load(planner, tmp_path):
    """And those without recipes, of other programs and older versions."""
    want = save(made(None, seed=1), tmp_path / "plain", planner)
    old = save(made("MXFP8", seed=1), tmp_path / "old", planner=False)
    for recipe in ("MXFP8", "NVFP4", None):
        assert alike(load(made(recipe), tmp_path / "plain"), want)
        assert alike(load(made(recipe), tmp_path / "old"), old)
