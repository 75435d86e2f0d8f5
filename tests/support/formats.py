"""The formats and recipes that tests run over, made of qshard's own lists: a new one is under every test at once.

A test names a format only where the formula of that format is what it tests.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from qshard import recipes
from qshard.formats import ELEMENTS, FORMATS, ElementFormat, Format, Usage
from qshard.layout import plane
from qshard.recipes import Recipe, Role
from support.awkward import fits

OPTIONS: Mapping[str, tuple[Any, ...]] = {
    "element": tuple(ELEMENTS.values()),
    "pow2": (False, True),
    "eps": (0.0, 0.5),
    "scale_rounding": ("up", "floor"),
    "global_scale": ("tensor", "row"),
    "scale_max": (448.0, 256.0),
    "four_over_six": (None, "mae", "mse"),
    "hadamard": (False, True),
    "rounding": ("nearest", "stochastic"),
    "nonfinite": ("saturate", "nan"),
}
"""Values of every option of any format. tests/null/test_formats.py fails where one is missing."""


def option_names(fmt: Any) -> Iterator[str]:
    """The options of a format, those of its parts among them."""
    for field in dataclasses.fields(fmt):
        value = getattr(fmt, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, ElementFormat):
            yield from option_names(value)
        elif field.name not in ("name", "block", "scale_dtype"):
            yield field.name


def _with(fmt: Format, options: dict[str, Any]) -> Format | None:
    """The format with these options; None where it refuses them, has them already, or is then another of FORMATS."""
    try:
        made = fmt.with_options(**options)
    except ValueError:
        return None
    named = [dataclasses.replace(made, name=other.name) == other for other in FORMATS.values()]
    return None if any(named) else made


def _distinct(formats: Iterator[Format | None]) -> list[Format]:
    return list(dict.fromkeys(fmt for fmt in formats if fmt is not None))


NAMED = list(FORMATS.values())
VARIANTS = _distinct(
    itertools.chain(
        NAMED,
        (_with(fmt, {name: value}) for fmt in NAMED for name, values in OPTIONS.items() for value in values),
        (_with(fmt, {"hadamard": True, "rounding": "stochastic"}) for fmt in NAMED),
    )
)
"""Every format, and it with each of its options alone, and the two that recipes combine."""
_FIRST = {str(fmt).partition("[")[2]: fmt for fmt in reversed(VARIANTS)}
OFTEN = {*NAMED, *_FIRST.values()}
"""Every format, and one format with each option. Other variants are slow under JAX, which compiles each."""
COMBINED = _distinct(
    itertools.chain(
        NAMED,
        (
            _with(fmt, dict(zip(names, values, strict=True)))
            for fmt in NAMED
            for names in [[name for name in OPTIONS if any(_with(fmt, {name: value}) for value in OPTIONS[name])]]
            for values in itertools.product(*(OPTIONS[name] for name in names))
        ),
    )
)
"""Every format with every legal combination of options, to draw from."""


def _layout_of(fmt: Format) -> tuple[Any, ...]:
    return fmt.block, fmt.shares_codes, fmt.scale_dtype, fmt.scaling.global_scale, fmt.element.codes_per_byte


ALIKE = {fmt.name for i, fmt in enumerate(NAMED) if _layout_of(fmt) in map(_layout_of, NAMED[:i])}
"""Names of formats that differ from another in their elements alone. Their rounding is tested with the kernels, so they
are slow in tests that compile JAX programs or start ranks."""

SQUARES = [fmt for fmt in NAMED if fmt.shares_codes]
"""Formats whose planes hold the same numbers: one serves both passes, and shards may cut its blocks."""
SCALINGS = list({fmt.scale_dtype: fmt for fmt in reversed(SQUARES)}.values())
"""One of SQUARES for each way to scale."""

SLICED = [fmt for fmt in VARIANTS if not fmt.scaling.four_over_six and not fmt.hadamard]
"""Formats whose scales follow from amaxes alone, so that any part of a weight can be cast."""

PLANES = [
    (fmt, usage)
    for fmt in SLICED
    for usage in Usage.BOTH
    if fits(fmt, (64, 96), usage) and not plane(fmt, (64, 96), usage).transposed
]
"""What slices of a weight are cast to: planes of those formats that are stored in the order of the weight."""

RECIPES: dict[str, Recipe] = {
    name: getattr(recipes, name)()
    for name in sorted(recipes.__all__)
    if isinstance(getattr(recipes, name), type)
    and issubclass(getattr(recipes, name), Recipe)
    and getattr(recipes, name) is not Recipe
}
"""Every recipe as it is by default."""
_SHIFTED = (NAMED[i:] + NAMED[:i] for i in (0, 4, 7))
MIXES = {
    f"{w}, {x}, {g}": Recipe(weight=w, activation=_with(x, {"rounding": "stochastic"}) or x, gradient=g)
    for w, x, g in zip(*_SHIFTED, strict=True)
}
"""Recipes in which every format has every role, and activations are rounded stochastically where they can be."""
RARE_MIXES = {
    name: recipe
    for i, (name, recipe) in enumerate(MIXES.items())
    if set(name.split(", ")) <= set(", ".join(list(MIXES)[:i]).split(", "))
}
"""Mixes whose formats the mixes before them have. They are slow under JAX, which compiles each."""
STATELESS = {name: recipe for name, recipe in {**RECIPES, **MIXES}.items() if not recipe.state_shapes}
STATEFUL = {name: recipe for name, recipe in RECIPES.items() if recipe.state_shapes}
GATHERED = {name: recipe for name, recipe in RECIPES.items() if recipe.weight.gather_refusal is None}
"""Recipes whose weights FSDP2 gathers as codes."""
_VECTORS = {
    f"vectors of {fmt}": Recipe(weight=fmt, activation=fmt, gradient=fmt)
    for fmt in [next(fmt for fmt in NAMED if fmt.block and not fmt.shares_codes and fmt.scaling.whole_blocks)]
}
ZEROED = {**GATHERED, **_VECTORS}
"""Recipes under ZeRO. Weights whose two planes are different numbers are gathered as values."""


def is_alike(subject: Any) -> bool:
    """Whether a parameter is a format of ALIKE, or a recipe, or its name, whose formats all are."""
    recipe = RECIPES.get(subject) if isinstance(subject, str) else subject
    if isinstance(recipe, Recipe):
        return all(recipe.format(role).name in ALIKE for role in Role)
    return isinstance(subject, Format) and subject.name in ALIKE


def nearest(recipe: Recipe) -> Recipe:
    """The recipe without random numbers."""
    formats = {role.value: recipe.format(role) for role in Role}
    return dataclasses.replace(
        recipe, **{name: fmt.with_options(rounding="nearest") for name, fmt in formats.items() if fmt.stochastic}
    )


def usages_of(fmt: Format, shape: tuple[int, ...] = (128, 128)) -> list[Usage]:
    """Each plane that `fmt` has of a tensor of whole blocks, and both."""
    return [usage for usage in (*Usage.BOTH, Usage.BOTH) if fits(fmt, shape, usage)]


def stochastic(subject: Format | Recipe) -> bool:
    """Whether it needs a seed."""
    formats = [subject.format(role) for role in Role] if isinstance(subject, Recipe) else [subject]
    return any(fmt.rounding == "stochastic" for fmt in formats)


every_format = pytest.mark.parametrize(
    "fmt", [pytest.param(fmt, marks=[] if fmt in OFTEN else pytest.mark.slow) for fmt in VARIANTS], ids=str
)
"""All of VARIANTS, for tests that compile."""
every_plane = pytest.mark.parametrize(
    ("fmt", "usage"), [(fmt, usage) for fmt in VARIANTS for usage in usages_of(fmt)], ids=str
)
every_stateless_recipe = pytest.mark.parametrize("recipe", STATELESS.values(), ids=STATELESS.keys())
every_gathered_recipe = pytest.mark.parametrize("recipe", GATHERED.values(), ids=GATHERED.keys())
every_recipe = pytest.mark.parametrize("recipe", [*RECIPES.values(), *MIXES.values()], ids=[*RECIPES, *MIXES])
