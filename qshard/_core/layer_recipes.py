"""Recipes by layer name, as shell patterns in order of precedence, and messages about layers left out.

`convert` in both front ends, and `Policy` in JAX, accept one recipe for all layers, or a mapping from patterns to
recipes.
"""

from __future__ import annotations

import difflib
import inspect
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from qshard._core.validation import quote
from qshard.recipes import Recipe, RecipeLike, as_recipe

__all__ = [
    "NO_PATTERN",
    "RecipesLike",
    "Rules",
    "check_chosen",
    "check_filter",
    "closest_names",
    "is_name_of_table",
    "keeps",
    "list_layers",
    "warn_of_rest",
]

RecipesLike = RecipeLike | Mapping[str, RecipeLike | None]
"""A recipe for all layers, or a mapping from patterns to recipes; None keeps matching layers in high precision."""
NO_PATTERN = "no pattern matches it"
"""Reason for leaving out a layer that no pattern of `Rules` matches."""

_SHOWN, _NAMES = 3, 5
"""Limits of a message: number of reasons, and number of layer names per reason."""


@dataclass(frozen=True)
class Rules:
    """Recipes by pattern of layer names.

    A pattern is a shell pattern for the whole name of a layer, as in `fnmatch`. `*` also matches dots, so "*.experts.*"
    matches "layers.0.experts.3.up".

    Attributes:
      op: name of the caller in errors.
      recipes: recipe of each pattern, in order of precedence.

    >>> rules = Rules.of({"*.experts.*": "BlockScaling", "head": None, "*": "MXFP8"}, "convert")
    >>> [rules.pattern_of(name) for name in ("layers.0.experts.3.up", "head", "layers.0.q")]
    ['*.experts.*', 'head', '*']
    """

    op: str
    recipes: Mapping[str, Recipe | None]

    @classmethod
    def of(cls, value: Any, op: str) -> Rules:
        """Build the rules from the argument `recipe` of `op`.

        Raises:
          TypeError: a value is not a recipe, or a pattern is not a string.
          ValueError: a name is not the name of a recipe, or all values are None.
        """
        if not isinstance(value, Mapping):
            return cls(op, {"*": as_recipe(value, op)})
        for pattern in value:
            if not isinstance(pattern, str):
                raise TypeError(f"{op}: pattern ({quote(pattern)}) is not a string; write names such as 'layers.0.*'")
        recipes = {
            pattern: None if recipe is None else as_recipe(recipe, op, f"recipe[{pattern!r}]")
            for pattern, recipe in value.items()
        }
        if not any(recipe is not None for recipe in recipes.values()):
            raise ValueError(
                f"{op}: recipe ({quote(value)}) gives no layer a recipe; pass at least one, such as {{'*': 'MXFP8'}}"
            )
        return cls(op, recipes)

    def pattern_of(self, *names: str) -> str | None:
        """Return the first pattern that matches one of the names of a layer, or None."""
        return next((pattern for pattern in self.recipes if any(fnmatchcase(name, pattern) for name in names)), None)

    def choose(
        self, candidates: Mapping[str, tuple[Any, Sequence[str], bool]], filter: Callable[[Any, str], bool] | None
    ) -> Iterator[tuple[str, Recipe | None]]:
        """Yield names and recipes of the modules to convert; the recipe is None if no pattern matches.

        Modules that `filter` rejects, or that match a pattern with None, are skipped.

        Args:
          candidates: name -> (module, names that patterns may match, whether it is a linear layer).
          filter: function of a module and its name that returns whether to convert it; None: convert all.
        """
        for name, (module, names, is_layer) in candidates.items():
            pattern = self.pattern_of(*names)
            recipe = None if pattern is None else self.recipes[pattern]
            if keeps(filter, module, name, is_layer) and (pattern is None or recipe is not None):
                yield name, recipe

    def check_used(self, layers: Iterable[Iterable[str]], others: Iterable[str] = ()) -> None:
        """Raise ValueError if a pattern applies to no layer.

        Args:
          layers: names of each layer.
          others: names of all other modules, such as embeddings. A pattern with None may match only these.
        """
        every = [tuple(names) for names in layers]
        used = {self.pattern_of(*names) for names in every}
        used |= {each for name in others if (each := self.pattern_of(name)) is not None and self.recipes[each] is None}
        unused = next((each for each in self.recipes if each not in used), None)
        if unused is None or not every:  # the caller reports that there are no layers
            return
        known = [*dict.fromkeys(name for names in every for name in names)]
        if (name := next((name for name in known if fnmatchcase(name, unused)), None)) is not None:
            raise ValueError(
                f"{self.op}: pattern {unused!r} has no effect: {self.pattern_of(name)!r} before it matches all of its "
                f"layers, such as {name!r}; put the narrower pattern first"
            )
        raise ValueError(f"{self.op}: pattern {unused!r} matches no layer; {closest_names(unused, known)}")


def check_filter(
    op: str,
    filter: Any,
    takes: str = "a layer and its name",
    example: str = "lambda _, name: 'head' not in name",
    argument: str = "filter",
) -> None:
    """Raise TypeError unless `filter` is None or can be called with two arguments.

    >>> check_filter("convert", lambda name: True)
    Traceback (most recent call last):
    TypeError: convert: filter (<lambda>(name)) does not take two arguments; pass a function of a layer and its name...
    """
    if filter is None and argument == "filter":
        return
    if not callable(filter):
        raise TypeError(
            f"{op}: {argument} ({quote(filter)}) is not a function; pass a function of {takes}, such as {example}"
        )
    try:
        signature = inspect.signature(filter)
    except (TypeError, ValueError):  # C functions may have no signature
        return
    try:
        signature.bind(None, "")
    except TypeError:
        name = getattr(filter, "__name__", type(filter).__name__)
        raise TypeError(
            f"{op}: {argument} ({name}{signature}) does not take two arguments; pass a function of {takes}, such as "
            f"{example}"
        ) from None


def keeps(filter: Callable[[Any, str], bool] | None, module: Any, name: str, is_layer: bool) -> bool:
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
    """Format layers with their reasons for a message.

    Layers with names that differ only in numbers are represented by the first.

    >>> list_layers({f"layers.{i}.{name}": "3-D" for name in ("w1", "w2") for i in range(32)} | {"head": "tied"})
    'layers.0.w1, layers.0.w2 (3-D; 62 more like these), head (tied)'
    """
    groups: dict[str, dict[str, list[str]]] = {}
    for name, reason in reasons.items():
        groups.setdefault(_without_numbers(reason), {}).setdefault(_without_numbers(name), []).append(name)
    listed, left = [], len(reasons)
    for alike in [*groups.values()][:_SHOWN]:
        named = [names[0] for names in alike.values()][:_NAMES]
        count = sum(map(len, alike.values()))
        more = f"; {count - len(named)} more like these" if count > len(named) else ""
        listed.append(f"{', '.join(name or 'the model' for name in named)} ({reasons[named[0]]}{more})")
        left -= count
    return ", ".join(listed) + (f" and {left} more" if left else "")


def check_chosen(op: str, model: Any, chosen: Collection[str], rest: Mapping[str, str], kind: str) -> None:
    """Raise ValueError if no layer of a model is left to convert.

    Args:
      op: name of the caller in the error.
      model: the model.
      chosen: names of the layers to convert.
      rest: name of each other layer -> reason to leave it out.
      kind: description of the layers, in the plural.
    """
    if chosen:
        return
    what = f"{op}: model ({type(model).__name__}) has"
    if rest:
        raise ValueError(f"{what} no layer that can be converted: {list_layers(rest)}; pass a model that has one")
    raise ValueError(f"{what} no {kind} that filter= selects; pass a model that has one")


def warn_of_rest(op: str, chosen: Collection[str], rest: Mapping[str, str]) -> None:
    """Warn the caller of `op` about layers that are not converted; arguments as for `check_chosen`."""
    if rest:
        warnings.warn(
            f"{op}: {len(rest)} of {len(rest) + len(chosen)} layers were not converted: {list_layers(rest)}; exclude "
            "them with filter= to silence this",
            stacklevel=3,
        )


def closest_names(pattern: str, names: Sequence[str]) -> str:
    """Suggest names for a pattern without a match. Names that differ only in numbers are represented by the first.

    >>> closest_names("*.expert.*", [f"layers.{i}.experts" for i in range(4)])
    "the closest are 'layers.0.experts'"
    """
    different = {_without_numbers(name): name for name in reversed(names)}.values()
    like = difflib.get_close_matches(pattern, different, n=_SHOWN, cutoff=0.0)
    return f"the closest are {', '.join(map(repr, like))}" if like else "the model has none"


def is_name_of_table(module: str, parameter: str) -> bool:
    """Return whether the name of a parameter or its module suggests an embedding, position table, token or bias.

    >>> [is_name_of_table("", name) for name in ("pos_embed", "cls_token", "w1")]
    [True, True, False]
    """
    is_table = any(word in module.lower() for word in ("embed", "position", "pos_"))
    return is_table or any(word in parameter.lower() for word in ("embed", "position", "pos_", "token", "bias"))


def _without_numbers(text: str) -> str:
    """Replace numbers: `layers.3.w1` becomes `layers.*.w1`."""
    return re.sub(r"(?<![\w])\d+(?=\.|$)", "*", text)
