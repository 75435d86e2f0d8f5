"""Recipes of the layers of a model as text, for checkpoints: values of arrays do not tell which recipe trains them.

    {"qshard.recipes": '{"version": 1, "recipes": [...], "layers": {"blocks.0.up": 0, "head": null}}'}

A recipe is its class and its fields, with `Format.description` for formats, so recipes are compared by value: options
that equal their defaults are written too. Layers without a recipe are null. Both front ends write the same form.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from qshard._core.validation import quote
from qshard.formats import Format
from qshard.recipes import Recipe

KEY = "qshard.recipes"  # key of the JSON string in the metadata
VERSION = 1


@functools.cache
def text_of(recipe: Recipe | None) -> str:
    """Encode a recipe as JSON; `recipe_of` is the inverse.

    >>> from qshard.recipes import NVFP4
    >>> recipe_of(text_of(NVFP4(wgrad="bf16"))), recipe_of(text_of(None))
    (NVFP4(wgrad='bf16'), None)
    """
    return json.dumps(None if recipe is None else recipe.description)


@functools.cache
def recipe_of(text: str) -> Recipe | None:
    """Return the recipe of a text of `text_of`.

    Raises:
      ValueError: the text is damaged, or this version of qshard has no such recipe.
    """
    try:
        return _recipe(json.loads(text))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"recipe ({quote(text)}) is unknown to this version of qshard: {error}") from None


def _recipe(terms: Any) -> Recipe | None:
    if terms is None:
        return None
    given = dict(terms)
    # A class of the user's may have the name of one of qshard's, which comes first.
    kind = {kind.__name__: kind for kind in reversed([*_kinds(Recipe)])}[given.pop("recipe")]
    for name, value in given.items():
        if isinstance(value, dict):
            given[name] = _recipe(value) if "recipe" in value else Format.of(value)
    return kind(**given)


def _kinds(kind: type[Recipe]) -> Iterator[type[Recipe]]:
    """Yield a class of recipes and its subclasses, which may be the user's."""
    yield kind
    for each in kind.__subclasses__():
        yield from _kinds(each)


def is_text_of(text: str, recipe: Recipe | None) -> bool:
    """Return whether a saved text encodes `recipe`. Older files have the `repr` of a recipe.

    >>> from qshard.recipes import MXFP8
    >>> [is_text_of(text, MXFP8()) for text in (text_of(MXFP8()), "MXFP8()", text_of(None))]
    [True, True, False]
    """
    try:
        return recipe_of(text) == recipe
    except ValueError:
        return text == repr(recipe)


def error_text(text: str) -> str:
    """Return a saved text as errors show it."""
    try:
        return repr(recipe_of(text))
    except ValueError:
        return "a recipe of another version of qshard" if text.startswith("{") else text


def encode(recipes: Mapping[str, Recipe | None]) -> str:
    """Encode the recipes of layers by name. Each recipe is written once.

    >>> from qshard.recipes import MXFP8
    >>> decode(encode({"up": MXFP8(), "head": None}), "check_recipes") == {"up": text_of(MXFP8()), "head": "null"}
    True
    """
    index = {own: number for number, own in enumerate(dict.fromkeys(own for own in recipes.values() if own))}
    layers = {name: None if own is None else index[own] for name, own in recipes.items()}
    return json.dumps({"version": VERSION, "recipes": [own.description for own in index], "layers": layers})


def decode(text: Any, op: str) -> dict[str, str]:
    """Return the text of the recipe of each layer, or raise ValueError if `text` is not from `encode`."""
    try:
        record = json.loads(text)
        if record["version"] != VERSION:
            raise ValueError(f"version {record['version']}")
        recipes = [json.dumps(terms) for terms in record["recipes"]]
        return {name: "null" if at is None else recipes[at] for name, at in record["layers"].items()}
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{op}: {KEY!r} of the metadata ({quote(text)}) cannot be read ({error}); it is damaged or of a later "
            "version of qshard"
        ) from None


def check_same(op: str, saved: Mapping[str, str], own: Mapping[str, Recipe | None], otherwise: str) -> None:
    """Raise ValueError if a layer that both have was saved with another recipe.

    `saved` has texts of `text_of`. `otherwise` says what to do if another recipe is intended.

    >>> from qshard.recipes import MXFP8
    >>> check_same("check_recipes", {"up": text_of(MXFP8())}, {"up": None}, "skip the check")
    Traceback (most recent call last):
    ValueError: check_recipes: up was saved with MXFP8(), but here it has None (1 layer differs); use ...
    """
    unlike = [name for name, text in saved.items() if name in own and not is_text_of(text, own[name])]
    if not unlike:
        return
    name, count = unlike[0], "1 layer differs" if len(unlike) == 1 else f"{len(unlike)} layers differ"
    raise ValueError(
        f"{op}: {name or 'the model'} was saved with {error_text(saved[name])}, but here it has {own[name]!r} "
        f"({count}); use the recipes of that run, or {otherwise}"
    )
