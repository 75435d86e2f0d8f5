"""`RecipeSavePlanner` and `RecipeLoadPlanner` in one process, and what a state dict says about a switch of recipes."""

import copy
import pickle
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import qshard.torch_bridge as qt
from qshard.recipes import NVFP4

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
save, load = partial(dcp.save, no_dist=True), partial(dcp.load, no_dist=True)


def made(recipe):
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    return model if recipe is None else qt.convert(model, recipe)


def loads(model, path, **options):
    load({"model": model.state_dict()}, checkpoint_id=path, planner=qt.RecipeLoadPlanner(model, **options))


def assert_refused(model, path, text):
    with pytest.raises(dcp.CheckpointException) as caught:
        loads(model, path)
    assert text in str(caught.value.failures[0][0])


@pytest.mark.parametrize("caches", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_each_save_has_the_recipes_of_its_time(again, caches, tmp_path):
    """Also if a planner saves again, and if DCP caches plans, which a switch does not change."""
    model = made("MXFP8")
    planner = qt.RecipeSavePlanner(model, enable_plan_caching=caches)
    save({"model": model.state_dict()}, checkpoint_id=tmp_path / "early", planner=planner)
    qt.switch_recipe(model, "NVFP4")
    planner = planner if again else qt.RecipeSavePlanner(model, enable_plan_caching=caches)
    save({"model": model.state_dict()}, checkpoint_id=tmp_path / "late", planner=planner)
    loads(made("MXFP8"), tmp_path / "early")
    loads(made("NVFP4"), tmp_path / "late")
    assert_refused(
        made("MXFP8"), tmp_path / "late", "0 was saved with NVFP4(), but here it has MXFP8() (2 layers differ)"
    )


def test_a_switch_after_the_planner_is_not_saved(tmp_path):
    """`async_save` plans in the background: in a thread, or in a process that gets the planner as a pickle."""
    model = made("MXFP8")
    planners = qt.RecipeSavePlanner(model), pickle.loads(pickle.dumps(qt.RecipeSavePlanner(model)))
    state = copy.deepcopy({"model": model.state_dict()})
    qt.switch_recipe(model, None)
    for number, planner in enumerate(planners):
        save(state, checkpoint_id=tmp_path / str(number), planner=planner)
        loads(made("MXFP8"), tmp_path / str(number))
        assert_refused(model, tmp_path / str(number), "but here it has None")
    assert planners[1]._model is None


def test_checkpoints_are_those_of_torch(tmp_path):
    """Without the planner, and as one file, which needs no qshard; also without nested dicts."""
    model = made("MXFP8")
    save({"model": model.state_dict()}, checkpoint_id=tmp_path / "nested", planner=qt.RecipeSavePlanner(model))
    plain = made(None)
    load({"model": plain.state_dict()}, checkpoint_id=tmp_path / "nested")
    dcp_to_torch_save(tmp_path / "nested", tmp_path / "file")
    for name, value in torch.load(tmp_path / "file")["model"].items():
        assert torch.equal(value, model.state_dict()[name])
        assert torch.equal(value, plain.state_dict()[name])
    planner = qt.RecipeSavePlanner(model, flatten_state_dict=False)
    save(model.state_dict(), checkpoint_id=tmp_path / "flat", planner=planner)
    more = nn.Sequential(*made("MXFP8"), nn.Linear(32, 32))
    loads(more, tmp_path / "nested", allow_partial_load=True)
    with pytest.raises(dcp.CheckpointException, match="0 was saved with MXFP8"):
        load(plain.state_dict(), checkpoint_id=tmp_path / "flat", planner=qt.RecipeLoadPlanner(plain))


def test_wrappers_and_experts_have_the_names_of_layers(tmp_path):
    model = torch.compile(made("MXFP8"), backend="aot_eager")
    save({"model": model._orig_mod.state_dict()}, checkpoint_id=tmp_path, planner=qt.RecipeSavePlanner(model))
    loads(made("MXFP8"), tmp_path)
    assert_refused(made("NVFP4"), tmp_path, "0 was saved with MXFP8()")
    forms = [qt.MoE(32, 32, num_experts=2, top_k=1, recipe="MXFP8", stacked=stacked) for stacked in (False, True)]
    save({"model": forms[0].state_dict()}, checkpoint_id=tmp_path / "experts", planner=qt.RecipeSavePlanner(forms[0]))
    qt.switch_recipe(forms[1], "NVFP4")
    assert_refused(forms[1], tmp_path / "experts", "was saved with MXFP8(), but here it has NVFP4()")


@pytest.mark.parametrize("kind", [qt.RecipeSavePlanner, qt.RecipeLoadPlanner])
def test_model_must_be_a_module(kind):
    with pytest.raises(TypeError, match=rf"^{kind.__name__}: model \(.*\) is not a torch.nn.Module"):
        kind({"0.weight": torch.ones(2)})


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("NVFP4()", "MXFP8()"),  # As files before `recipe_records` have it: this text must not change.
        ("NVFP4(wgrad='bf16')", "None"),
    ],
)
def test_state_dicts_of_older_versions_know_the_switch(before, after):
    recipe = {"NVFP4()": NVFP4(), "NVFP4(wgrad='bf16')": NVFP4(wgrad="bf16")}[before]
    state = made(None).state_dict()
    state._metadata["0"]["recipes"] = [before, after]
    with pytest.raises(RuntimeError, match="saved after switch_recipe, which gave 0 the recipe"):
        made(recipe).load_state_dict(state)
    made("BlockScaling").load_state_dict(state)
    resumed = made(recipe)
    qt.switch_recipe(resumed, None if after == "None" else "MXFP8")
    resumed.load_state_dict(state)
