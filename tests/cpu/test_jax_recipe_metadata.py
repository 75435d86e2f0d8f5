"""`describe_recipes` and `check_recipes`: the recipes of a run in the metadata of its checkpoint."""

import json

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import qshard.jax as qj
from qshard.recipes import NVFP4, Recipe

PARAMS = {"up": jnp.ones((32, 64)), "down": jnp.ones((64, 32)), "scale": jnp.ones(32)}


class Layers(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.up, self.down = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 32, rngs=rngs)


def policy(recipe):
    return qj.Policy.of(PARAMS, recipe)


def model(recipe):
    return Layers() if recipe is None else qj.convert(Layers(), recipe, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("made", [policy, model])
def test_other_recipes_raise(made):
    metadata = json.loads(json.dumps(qj.describe_recipes(made({"down": None, "*": NVFP4(wgrad="bf16")}))))
    qj.check_recipes(made({"down": None, "*": NVFP4(wgrad="bf16")}), metadata)
    for recipe, text in (
        (
            {"down": None, "*": "NVFP4"},
            r"^check_recipes: up was saved with NVFP4\(wgrad='bf16'\), but here it has NVFP4\(\)",
        ),
        (NVFP4(wgrad="bf16"), r"down was saved with None, but here it has NVFP4\(wgrad='bf16'\) \(1 layer differs\)"),
        ("MXFP8", r"but here it has MXFP8\(\) \(2 layers differ\)"),
    ):
        with pytest.raises(ValueError, match=text):
            qj.check_recipes(made(recipe), metadata)
    with pytest.raises(ValueError, match="here it has None"):
        qj.check_recipes(qj.switch_recipe(made({"down": None, "*": NVFP4(wgrad="bf16")}), None), metadata)


@pytest.mark.parametrize("made", [policy, model])
def test_plain_checkpoints_load(made):
    """Checkpoints of a tail without recipes do not."""
    for metadata in (None, {}, {"step": 3}):
        qj.check_recipes(made("MXFP8"), metadata)
    tail = qj.describe_recipes(qj.switch_recipe(made("MXFP8"), None))
    qj.check_recipes(qj.switch_recipe(made("NVFP4"), None), tail)
    with pytest.raises(ValueError, match=r"was saved with None, but here it has MXFP8\(\) \(2 layers differ\)"):
        qj.check_recipes(made("MXFP8"), tail)


def test_orbax(tmp_path):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "step", PARAMS, custom_metadata=qj.describe_recipes(policy("NVFP4")))
        metadata = checkpointer.metadata(tmp_path / "step").custom_metadata
    qj.check_recipes(policy("NVFP4"), metadata)
    with pytest.raises(ValueError, match="was saved with NVFP4"):
        qj.check_recipes(policy("MXFP8"), metadata)


def test_recipes_are_compared_by_value():
    saved = qj.describe_recipes(Recipe(weight="MXFP8_32x32", activation="MXFP8_E4M3", gradient="MXFP8_E5M2"))
    record = json.loads(saved["qshard.recipes"])
    for fmt in (record["recipes"][0][role] for role in ("weight", "activation", "gradient")):
        fmt.pop("nonfinite")  # As if an older version had not known it: its default.
    older = {"qshard.recipes": json.dumps(record)}
    qj.check_recipes(Recipe(weight="MXFP8_32x32", activation="MXFP8_E4M3", gradient="MXFP8_E5M2"), older)
    record["recipes"][0]["weight"]["later"] = True
    with pytest.raises(ValueError, match="was saved with a recipe of another version of qshard, but"):
        qj.check_recipes("MXFP8", {"qshard.recipes": json.dumps(record)})


@pytest.mark.parametrize(
    "text", ["", "{}", '{"version": 2}', '{"version": 1, "recipes": [], "layers": {"up": 0}}', None]
)
def test_damaged_metadata_raise(text):
    with pytest.raises(ValueError, match=r"^check_recipes: 'qshard.recipes' of the metadata \(.* cannot be read"):
        qj.check_recipes("MXFP8", {"qshard.recipes": text})


def test_types():
    with pytest.raises(TypeError, match=r"^describe_recipes: model \(.*\) is not a Policy"):
        qj.describe_recipes(PARAMS)
    with pytest.raises(TypeError, match=r"^check_recipes: metadata \('a'\) is not a dict"):
        qj.check_recipes("MXFP8", "a")
