"""Recipes by patterns of layer names, and messages about layers left out.

`convert` in both front ends, and `Policy` in JAX, accept one recipe for all layers, or a mapping from patterns to
recipes.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qshard._core.name_patterns import NamePatterns, without_numbers
from qshard._core.validation import quote
from qshard.recipes import Recipe, RecipeLike, as_recipe

RecipesLike = RecipeLike | Mapping[str, RecipeLike | None]
"""A recipe for all layers, or a mapping from patterns to recipes; None keeps matching layers in high precision."""
NO_PATTERN = "no pattern matches it"  # reason for leaving out a layer that no pattern of `Rules` matches

_SHOWN, _NAMES = 3, 5  # limits of a message: number of reasons, and number of layer names per reason


@dataclass(frozen=True)
class Rules:
    """Recipes by pattern of layer names, in order of precedence.

    >>> rules = Rules.of({"layers[-15%:].*": None, "*": "NVFP4"}, "convert", [f"layers.{i}.q" for i in range(12)])
    >>> rules.pattern_of("layers.9.q"), rules.pattern_of("layers.10.q")
    ('*', 'layers[-15%:].*')
    """

    op: str
    recipes: Mapping[str, Recipe | None]
    patterns: NamePatterns

    @classmethod
    def of(cls, value: Any, op: str, names: Iterable[str], *, may_be_none: bool = False) -> Rules:
        """Build the rules from the argument `recipe` of `op`, for a model with modules of these names.

        `may_be_none`: None is a rule for all layers, and all patterns may have None.

        Raises:
          TypeError: a value is not a recipe, or a pattern is not a string.
          ValueError: a name is not the name of a recipe, or all values are None.
        """
        if not isinstance(value, Mapping):
            recipe = None if value is None and may_be_none else as_recipe(value, op)
            return cls(op, {"*": recipe}, NamePatterns("*", ()))
        for pattern in value:
            if not isinstance(pattern, str):
                raise TypeError(f"{op}: pattern ({quote(pattern)}) is not a string; write names such as 'layers.0.*'")
        recipes = {
            pattern: None if recipe is None else as_recipe(recipe, op, f"recipe[{pattern!r}]")
            for pattern, recipe in value.items()
        }
        if not may_be_none and not any(recipe is not None for recipe in recipes.values()):
            raise ValueError(
                f"{op}: recipe ({quote(value)}) gives no layer a recipe; pass at least one, such as {{'*': 'MXFP8'}}"
            )
        return cls(op, recipes, NamePatterns(recipes, names))

    def pattern_of(self, *names: str) -> str | None:
        """Return the first pattern that matches one of the names of a layer, or None."""
        return self.patterns.first(*names)

    def choose(
        self, candidates: Mapping[str, tuple[Any, Sequence[str], bool]], filter: Callable[[Any, str], bool] | None
    ) -> Iterator[tuple[str, Recipe | None]]:
        """Yield names and recipes of the modules to convert; the recipe is None if no pattern matches.

        Modules that `filter(module, name)` rejects, or that match a pattern with None, are skipped. `candidates` maps a
        name to the module, the names that patterns may match, and whether the module is a linear layer.
        """
        for name, (module, names, is_layer) in candidates.items():
            pattern = self.pattern_of(*names)
            recipe = None if pattern is None else self.recipes[pattern]
            if _selects(filter, module, name, is_layer) and (pattern is None or recipe is not None):
                yield name, recipe

    def check_kept(self, converted: Mapping[str, tuple[Recipe, Sequence[str]]]) -> None:
        """Raise ValueError if a pattern with None matches a converted layer, which would keep its recipe.

        `converted` maps the name of each converted layer to its recipe and the names that patterns may match.
        """
        for name, (recipe, names) in converted.items():
            pattern = self.pattern_of(*names)
            if pattern is not None and self.recipes[pattern] is None:
                raise ValueError(
                    f"{self.op}: {name} has {recipe!r}, and {{{pattern!r}: None}} does not convert it back; call "
                    f"switch_recipe(model, {{{pattern!r}: None}})"
                )

    def check_used(self, layers: Iterable[Sequence[str]], others: Iterable[str] = ()) -> None:
        """Raise ValueError if a pattern applies to no layer.

        `layers` has the names of each layer. `others` has the names of other modules, such as embeddings: only a
        pattern with None may match them.
        """
        of_others = {each for name in others if (each := self.pattern_of(name)) and self.recipes[each] is None}
        self.patterns.check_used(self.op, layers, used=of_others)


def check_function(
    op: str,
    name: str,
    function: Any,
    takes: str = "a layer and its name",
    example: str = "lambda _, name: 'head' not in name",
) -> None:
    """Raise TypeError unless `function` can be called with two arguments. `name` is the argument of `op`."""
    if not callable(function):
        raise TypeError(
            f"{op}: {name} ({quote(function)}) is not a function; pass a function of {takes}, such as {example}"
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # C functions may have no signature
        return
    try:
        signature.bind(None, "")
    except TypeError:
        own = getattr(function, "__name__", type(function).__name__)
        raise TypeError(
            f"{op}: {name} ({own}{signature}) does not take two arguments; pass a function of {takes}, such as "
            f"{example}"
        ) from None


def _selects(filter: Callable[[Any, str], bool] | None, module: Any, name: str, is_layer: bool) -> bool:
    """Return whether `filter` selects a module.

    A filter written for linear layers may read attributes that other modules lack, such as `in_features`. An
    AttributeError for such a module counts as selected.
    """
    if filter is None:
        return True
    try:
        return bool(filter(module, name))
    except AttributeError:
        if is_layer:
            raise
        return True


def list_layers(reasons: Mapping[str, str]) -> str:
    """Format layers with their reasons for a message, one for all layers with names that differ only in numbers.

    >>> list_layers({f"layers.{i}.{name}": "3-D" for name in ("w1", "w2") for i in range(32)} | {"head": "tied"})
    'layers.0.w1, layers.0.w2 (3-D; 62 more like these), head (tied)'
    """
    groups: dict[str, dict[str, list[str]]] = {}
    for name, reason in reasons.items():
        groups.setdefault(without_numbers(reason), {}).setdefault(without_numbers(name), []).append(name)
    listed, left = [], len(reasons)
    for alike in [*groups.values()][:_SHOWN]:
        named = [names[0] for names in alike.values()][:_NAMES]
        count = sum(map(len, alike.values()))
        more = f"; {count - len(named)} more like these" if count > len(named) else ""
        listed.append(f"{', '.join(name or 'the model' for name in named)} ({reasons[named[0]]}{more})")
        left -= count
    return ", ".join(listed) + (f" and {left} more" if left else "")


def check_each(checks: Mapping[str, Callable[[], object]], advice: str = "") -> None:
    """Call the check of each layer or weight. Raise the first error, with the names of all that have one.

    - `advice`: what to do besides, for the end of the first error.

    >>> check_each({"up": lambda: int("a"), "down": lambda: 1, "head": lambda: int("b")}, "; pass numbers")
    Traceback (most recent call last):
    ValueError: invalid literal for int() with base 10: 'a'; pass numbers; up, head (do not fit)
    """
    misfits: dict[str, TypeError | ValueError] = {}
    for name, check in checks.items():
        try:
            check()
        except (TypeError, ValueError) as error:
            misfits[name] = error
    if misfits:
        first = next(iter(misfits.values()))
        every = f"; {list_layers(dict.fromkeys(misfits, 'do not fit'))}" if len(misfits) > 1 else ""
        raise type(first)(f"{first}{advice}{every}")


def check_chosen(op: str, model: Any, chosen: Collection[str], rest: Mapping[str, str], kind: str) -> None:
    """Raise ValueError if no layer of a model is left to convert.

    - `chosen`: names of the layers to convert.
    - `rest`: name of each other layer -> reason to leave it out.
    - `kind`: description of the layers, in the plural.
    """
    if chosen:
        return
    what = f"{op}: model ({type(model).__name__}) has"
    if rest:
        raise ValueError(f"{what} no layer that can be converted: {list_layers(rest)}; pass a model that has one")
    raise ValueError(f"{what} no {kind} that filter= selects; pass a model that has one")


def warn_of_rest(op: str, chosen: Collection[str], rest: Mapping[str, str]) -> None:
    """Warn the caller of `op` about layers that are not converted; arguments as in `check_chosen`."""
    if rest:
        warnings.warn(
            f"{op}: {len(rest)} of {len(rest) + len(chosen)} layers were not converted: {list_layers(rest)}; exclude "
            "them with filter= to silence this",
            stacklevel=3,
        )


def is_name_of_table(module: str, parameter: str) -> bool:
    """Return whether the name of a parameter or its module suggests an embedding, position table, token or bias.

    >>> [is_name_of_table("", name) for name in ("pos_embed", "cls_token", "w1")]
    [True, True, False]
    """
    is_table = any(word in module.lower() for word in ("embed", "position", "pos_"))
    return is_table or any(word in parameter.lower() for word in ("embed", "position", "pos_", "token", "bias"))
