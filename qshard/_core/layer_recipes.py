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

RecipesLike = RecipeLike | Mapping[str, RecipeLike | None]
"""A recipe for all layers, or a mapping from patterns to recipes; None keeps matching layers in high precision."""
NO_PATTERN = "no pattern matches it"  # reason for leaving out a layer that no pattern of `Rules` matches

_SLICE = re.compile(r"\[(-?\d+%?)?:(-?\d+%?)?\]")
_SHOWN, _NAMES = 3, 5  # limits of a message: number of reasons, and number of layer names per reason


@dataclass(frozen=True)
class Rules:
    """Recipes by pattern of layer names.

    A pattern is a shell pattern for the whole name of a layer, as in `fnmatch`. `*` also matches dots, so "*.experts.*"
    matches "layers.0.experts.3.up". A slice selects numbered blocks: "layers[-2:].*" matches every layer of the last
    two blocks, and "layers[-15%:].*" every layer of the last 15 % of blocks, rounded up.

    Attributes:
      recipes: recipe of each pattern, in order of precedence.
      shells: the shell patterns that each pattern stands for.

    >>> rules = Rules.of({"*.experts.*": "BlockScaling", "head": None, "*": "MXFP8"}, "convert", [])
    >>> [rules.pattern_of(name) for name in ("layers.0.experts.3.up", "head", "layers.0.q")]
    ['*.experts.*', 'head', '*']
    >>> rules = Rules.of({"layers[-15%:].*": None, "*": "NVFP4"}, "convert", [f"layers.{i}.q" for i in range(12)])
    >>> rules.shells["layers[-15%:].*"]
    ('layers.10.*', 'layers.11.*')
    """

    op: str
    recipes: Mapping[str, Recipe | None]
    shells: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, value: Any, op: str, names: Iterable[str]) -> Rules:
        """Build the rules from the argument `recipe` of `op`, for a model with modules of these names.

        Raises:
          TypeError: a value is not a recipe, or a pattern is not a string.
          ValueError: a name is not the name of a recipe, or all values are None.
        """
        if not isinstance(value, Mapping):
            return cls(op, {"*": as_recipe(value, op)}, {"*": ("*",)})
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
        blocks = _count_blocks(names)
        return cls(op, recipes, {pattern: _shells_of(pattern, blocks) for pattern in recipes})

    def pattern_of(self, *names: str) -> str | None:
        """Return the first pattern that matches one of the names of a layer, or None."""
        return next((pattern for pattern in self.recipes if any(self._matches(name, pattern) for name in names)), None)

    def _matches(self, name: str, pattern: str) -> bool:
        return any(fnmatchcase(name, shell) for shell in self.shells[pattern])

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

    def check_used(self, layers: Iterable[Iterable[str]], others: Iterable[str] = ()) -> None:
        """Raise ValueError if a pattern applies to no layer.

        `layers` has the names of each layer. `others` has the names of other modules, such as embeddings: only a
        pattern with None may match them.
        """
        every = [tuple(names) for names in layers]
        used = {self.pattern_of(*names) for names in every}
        used |= {each for name in others if (each := self.pattern_of(name)) is not None and self.recipes[each] is None}
        unused = next((each for each in self.recipes if each not in used), None)
        if unused is None or not every:  # the caller reports that there are no layers
            return
        known = [*dict.fromkeys(name for names in every for name in names)]
        if (name := next((name for name in known if self._matches(name, unused)), None)) is not None:
            raise ValueError(
                f"{self.op}: pattern {unused!r} has no effect: {self.pattern_of(name)!r} before it matches all of its "
                f"layers, such as {name!r}; put the narrower pattern first"
            )
        raise ValueError(f"{self.op}: pattern {unused!r} matches no layer; {closest_names(unused, known)}")


def _count_blocks(names: Iterable[str]) -> dict[str, int]:
    """Return the number of blocks of each numbered list of modules.

    >>> _count_blocks(["layers.0.experts.0", "layers.1.experts.7", "head"])
    {'layers': 2, 'layers.0.experts': 1, 'layers.1.experts': 8}
    >>> _count_blocks(["0", "1", "2"])  # The model itself is the list.
    {'': 3}
    """
    counts: dict[str, int] = {}
    for name in names:
        parts = name.split(".")
        for i, part in enumerate(parts):
            if part.isdecimal():
                prefix = ".".join(parts[:i])
                counts[prefix] = max(counts.get(prefix, 0), int(part) + 1)
    return counts


def _shells_of(pattern: str, blocks: Mapping[str, int]) -> tuple[str, ...]:
    """Return a pattern as shell patterns, one for each block that its slice selects."""
    selected = _SLICE.search(pattern)
    if selected is None:
        return (pattern,)
    lists, rest = pattern[: selected.start()], pattern[selected.end() :]
    return tuple(
        f"{name and name + '.'}{i}{rest}"
        for name, count in blocks.items()
        if fnmatchcase(name, lists)
        for i in range(count)[slice(*(_bound(text, count) for text in selected.groups()))]
    )


def _bound(text: str | None, count: int) -> int | None:
    """Return a bound of a slice of `count` blocks; parts of a block count as a block.

    >>> [_bound(text, 12) for text in ("-15%", "25%", "-3", None)]
    [-2, 3, -3, None]
    """
    if text is None or not text.endswith("%"):
        return None if text is None else int(text)
    percent = int(text[:-1])
    return (abs(percent) * count + 99) // 100 * (-1 if percent < 0 else 1)


def check_filter(
    op: str,
    filter: Any,
    takes: str = "a layer and its name",
    example: str = "lambda _, name: 'head' not in name",
    argument: str = "filter",
) -> None:
    """Raise TypeError unless `filter` is None or can be called with two arguments."""
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
