"""Recipes: the format of each role, and the errors for a format of another method."""

import re

import pytest

from qshard import formats, recipes
from qshard._files.recipe_records import recipe_of, text_of
from qshard.formats import Usage
from qshard.recipes import Role
from support.pages import REPOSITORY

PAGES = ["README.md", "NUMERICS.md", *(f"docs/{path.name}" for path in (REPOSITORY / "docs").glob("*.md"))]


@pytest.mark.parametrize(
    ("recipe", "names"),
    [
        (recipes.CurrentScaling, ["FP8_E4M3", "FP8_E4M3", "FP8_E5M2"]),
        (recipes.DelayedScaling, ["FP8_E4M3", "FP8_E4M3", "FP8_E5M2"]),
        (recipes.BlockScaling, ["FP8_128x128", "FP8_1x128", "FP8_1x128"]),
        (recipes.MXFP8, ["MXFP8_32x32", "MXFP8_E4M3", "MXFP8_E4M3"]),
        (recipes.MXFP6, ["MXFP6_E2M3_32x32", "MXFP6_E2M3", "MXFP6_E2M3"]),
        (recipes.MXFP4, ["MXFP4_32x32", "MXFP4", "MXFP4"]),
        (recipes.NVFP4, ["NVFP4_16x16", "NVFP4[hadamard=True]", "NVFP4[hadamard=True, rounding=stochastic]"]),
    ],
)
def test_defaults(recipe, names):
    chosen = [recipe().format(role) for role in (Role.WEIGHT, Role.ACTIVATION, Role.GRADIENT)]
    assert [str(fmt.with_options(nonfinite="saturate")) for fmt in chosen] == names
    assert {fmt.nonfinite for fmt in chosen} == {"nan"}


@pytest.mark.parametrize("recipe", recipes.NAMED.values())
def test_recipes_are_keys(recipe):
    assert {recipe: 1}[type(recipe)()] == 1


@pytest.mark.parametrize("page", PAGES)
def test_tables_of_recipes_have_them_all(page):
    """Tables of pages with three recipes or more in the first column."""
    for table in re.findall(r"^\|.*(?:\n\|.*)+", (REPOSITORY / page).read_text(), re.MULTILINE):
        named = set(recipes.NAMED) & set(re.findall(r"\w+", " ".join(row.split("|")[1] for row in table.splitlines())))
        assert len(named) < 3 or named == set(recipes.NAMED), "add rows"


def test_readme_names_each_recipe():
    text = (REPOSITORY / "README.md").read_text()
    assert [name for name in recipes.NAMED if f"| `{name}` |" not in text] == []


@pytest.mark.parametrize(
    ("recipe", "fmt"),
    [
        (recipes.CurrentScaling, formats.FP8_1x128),
        (recipes.DelayedScaling, formats.MXFP8_E4M3),
        (recipes.BlockScaling, formats.FP8_E4M3),
        (recipes.BlockScaling, formats.MXFP8_E4M3),
        (recipes.MXFP8, formats.NVFP4),
        (recipes.MXFP8, formats.MXFP6_E2M3),
        (recipes.MXFP6, formats.MXFP4),
        (recipes.MXFP4, formats.NVFP4),
        (recipes.NVFP4, formats.MXFP8_E4M3),
    ],
)
@pytest.mark.parametrize("role", Role)
def test_format_of_another_method(recipe, fmt, role):
    with pytest.raises(ValueError, match=rf"{recipe.__name__}: {role.value} .{fmt}. has another scaling method"):
        recipe(**{role.value: fmt})


@pytest.mark.parametrize(
    "rotated",
    [("activation",), ("gradient",), ("weight",), ("weight", "activation", "gradient")],
    ids="+".join,
)
def test_rotations_that_do_not_cancel(rotated):
    with pytest.raises(ValueError, match=r"Recipe: rotations .weight: .*do not cancel in every product; rotate"):
        recipes.Recipe(**{role.value: formats.NVFP4.with_options(hadamard=role.value in rotated) for role in Role})
    with pytest.raises(ValueError, match=r"NVFP4: rotations .weight: False, activation: True, gradient: False."):
        recipes.NVFP4(gradient=formats.NVFP4)


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        (recipes.CurrentScaling(), "CurrentScaling()"),
        (recipes.DelayedScaling(history=4), "DelayedScaling(history=4)"),
        (recipes.MXFP8(weight="MXFP8_E4M3"), "MXFP8(weight=MXFP8_E4M3)"),
        (
            recipes.Recipe(weight="NVFP4_16x16", activation="MXFP8_E4M3", gradient=formats.MXFP8_E5M2),
            "Recipe(weight=NVFP4_16x16, activation=MXFP8_E4M3, gradient=MXFP8_E5M2)",
        ),
    ],
)
def test_repr_has_the_fields_that_differ_from_defaults(recipe, text):
    assert repr(recipe) == str(recipe) == text
    own = {type(recipe).__name__: type(recipe)}
    assert eval(text, vars(formats) | own) == recipe


def test_stochastic():
    random = formats.NVFP4.with_options(rounding="stochastic")
    for role in Role:
        chosen = {each.value: random if each is role else formats.NVFP4 for each in Role}
        assert recipes.Recipe(**chosen).stochastic
    assert recipes.NVFP4().stochastic
    assert not recipes.MXFP8().stochastic


def test_seeds_of_roles_differ_in_bits_that_nobody_counts():
    assert len(set(recipes.ROLE_SEEDS.values())) == len(Role) == len(recipes.ROLE_SEEDS)
    assert all(number % 2**62 == 0 and number < 2**64 for number in recipes.ROLE_SEEDS.values())


@pytest.mark.parametrize(
    ("activation", "gradient", "usage", "added"),
    [
        (formats.MXFP8_E4M3, formats.NVFP4, Usage.ROWWISE, 0),  # Blocks along a row need no others.
        (formats.MXFP8_E4M3, formats.NVFP4, Usage.COLUMNWISE, 24),
        (formats.NVFP4, formats.MXFP8_E4M3, Usage.BOTH, 24),  # Those of the other tensor, which it is multiplied with.
        (formats.NVFP4, formats.NVFP4, Usage.BOTH, 8),
        (formats.FP8_1x128, formats.FP8_1x128, Usage.BOTH, 0),
        (formats.FP8_E4M3, formats.MXFP8_32x32, Usage.ROWWISE, 24),  # One plane serves both directions.
    ],
    ids=str,
)
def test_added_rows(activation, gradient, usage, added):
    recipe = recipes.Recipe(weight=formats.MXFP8_32x32, activation=activation, gradient=gradient)
    assert recipe.added_rows(Role.ACTIVATION, usage, 40) == added
    assert recipe.added_rows(Role.ACTIVATION, usage, 64) == 0
    assert recipe.added_rows(Role.WEIGHT, usage, 40) == 0


def test_delayed_scaling_state():
    assert recipes.DelayedScaling(history=3).state_shapes == {"scale": (), "amax_history": (3,)}
    assert recipes.CurrentScaling().state_shapes == {}
    with pytest.raises(ValueError, match=r"history \(0\) must be an integer of at least 1"):
        recipes.DelayedScaling(history=0)
    with pytest.raises(ValueError, match="most_recent"):
        recipes.DelayedScaling(algorithm="mean")


def test_a_class_of_the_users_does_not_take_the_name_of_one_of_qshards():
    class MXFP8(recipes.MXFP8):
        """It exists until it is collected, so texts must not find it."""

    assert type(recipe_of(text_of(recipes.MXFP8(gradient="MXFP8_E5M2")))) is recipes.MXFP8
    assert MXFP8().text is None
    assert recipe_of(recipes.NVFP4(wgrad="bf16").text) == recipes.NVFP4(wgrad="bf16")
