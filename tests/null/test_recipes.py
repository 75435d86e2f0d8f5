"""Recipes: the format of each role, and the errors for a format of another method."""

import pytest

from qshard import formats, recipes
from qshard.recipes import Role

NAMED = [
    recipes.CurrentScaling,
    recipes.DelayedScaling,
    recipes.BlockScaling,
    recipes.MXFP8,
    recipes.NVFP4,
]


@pytest.mark.parametrize(
    ("recipe", "names"),
    [
        (recipes.CurrentScaling, ["FP8_E4M3", "FP8_E4M3", "FP8_E5M2"]),
        (recipes.DelayedScaling, ["FP8_E4M3", "FP8_E4M3", "FP8_E5M2"]),
        (recipes.BlockScaling, ["FP8_128x128", "FP8_1x128", "FP8_1x128"]),
        (recipes.MXFP8, ["MXFP8_32x32", "MXFP8_E4M3", "MXFP8_E4M3"]),
        (recipes.NVFP4, ["NVFP4_16x16", "NVFP4[hadamard=True]", "NVFP4[hadamard=True, rounding=stochastic]"]),
    ],
)
def test_defaults(recipe, names):
    assert [str(recipe().format(role)) for role in (Role.WEIGHT, Role.ACTIVATION, Role.GRADIENT)] == names


@pytest.mark.parametrize("recipe", NAMED)
def test_recipes_are_keys(recipe):
    assert {recipe(): 1}[recipe()] == 1


@pytest.mark.parametrize(
    ("recipe", "fmt"),
    [
        (recipes.CurrentScaling, formats.FP8_1x128),
        (recipes.DelayedScaling, formats.MXFP8_E4M3),
        (recipes.BlockScaling, formats.FP8_E4M3),
        (recipes.BlockScaling, formats.MXFP8_E4M3),
        (recipes.MXFP8, formats.NVFP4),
        (recipes.NVFP4, formats.MXFP8_E4M3),
    ],
)
@pytest.mark.parametrize("role", Role)
def test_format_of_another_method(recipe, fmt, role):
    with pytest.raises(ValueError, match=rf"{recipe.__name__}: {role.value} \({fmt}\) is not"):
        recipe(**{role.value: fmt})


def test_delayed_scaling_state():
    assert recipes.DelayedScaling(history=3).state_shapes == {"scale": (), "amax_history": (3,)}
    assert recipes.CurrentScaling().state_shapes == {}
    with pytest.raises(ValueError, match="at least one step"):
        recipes.DelayedScaling(history=0)
    with pytest.raises(ValueError, match="most_recent"):
        recipes.DelayedScaling(algorithm="mean")
