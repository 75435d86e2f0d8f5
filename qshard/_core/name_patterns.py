"""Patterns of names, for every argument and option that selects layers, tensors or parameters by name."""

from __future__ import annotations

import difflib
import fnmatch
import glob
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

_SLICE = re.compile(r"\[(-?\d+%?)?:(-?\d+%?)?\]")
_SHOWN = 3  # names in an error


class NamePatterns:
    """Patterns of names, in order of precedence.

    A pattern is a shell pattern for a whole name, as in `fnmatch`. `*` also matches dots, so "*.experts.*" matches
    "layers.0.experts.3.up". A slice selects numbered blocks: "layers[-2:].*" matches every name in the last two blocks,
    "layers[-15%:].*" every name in the last 15 % of blocks, rounded up, and "layers[0:1].experts[:2].*" two experts of
    the first block. A pattern that is itself a name matches only this name.

    >>> patterns = NamePatterns(["*.experts.*", "head", "*"], [])
    >>> [patterns.first(name) for name in ("layers.0.experts.3.up", "head", "layers.0.q")]
    ['*.experts.*', 'head', '*']
    >>> patterns = NamePatterns(["layers[-15%:].*"], [f"layers.{i}.q" for i in range(12)])
    >>> [i for i in range(12) if patterns.matches("layers[-15%:].*", f"layers.{i}.q")]
    [10, 11]
    >>> names = [f"layers.{i}.experts.{j}" for i in range(2) for j in range(3)]
    >>> [name for name in names if NamePatterns(["*[1:].experts[:2]"], names).first(name)]
    ['layers.1.experts.0', 'layers.1.experts.1']
    """

    def __init__(self, patterns: Iterable[str], names: Iterable[str]):
        """Compile patterns for a model or checkpoint. `names` has its names: slices count the blocks in them."""
        names = set(names)
        self._order = {pattern: i for i, pattern in enumerate(patterns)}
        self._exact = names & self._order.keys()
        blocks = _blocks_of(names) if any(map(_SLICE.search, self._order)) else {}
        self._compiled = {
            pattern: re.compile("|".join(map(fnmatch.translate, _shells_of(pattern, blocks))) or "(?!)")
            for pattern in self._order
            if pattern not in self._exact
        }

    def matches(self, pattern: str, name: str) -> bool:
        """Return whether `pattern`, which is one of these patterns, matches `name`."""
        return name == pattern if pattern in self._exact else self._compiled[pattern].match(name) is not None

    def first(self, *names: str) -> str | None:
        """Return the first pattern that matches one of the names of a layer, or None."""
        found = [pattern for pattern, compiled in self._compiled.items() if any(map(compiled.match, names))]
        return min(found + [name for name in names if name in self._exact], key=self._order.__getitem__, default=None)

    def check_used(
        self, op: str, items: Iterable[Sequence[str]], noun: str = "layer", used: Collection[str] = ()
    ) -> None:
        """Raise ValueError if a pattern is not the first match of any item.

        - `items`: the names of each item; without items nothing is checked.
        - `noun`: the noun for an item, for the error.
        - `used`: patterns with another use.
        """
        items = list(items)
        unused = self._order.keys() - {self.first(*names) for names in items} - {*used}
        if not unused or not items:
            return
        pattern = min(unused, key=self._order.__getitem__)
        known = [*dict.fromkeys(name for names in items for name in names)]
        if (name := next((name for name in known if self.matches(pattern, name)), None)) is not None:
            raise ValueError(
                f"{op}: pattern {pattern!r} has no effect: {self.first(name)!r} before it matches all of its {noun}s, "
                f"such as {name!r}; put the narrower pattern first"
            )
        raise ValueError(f"{op}: pattern {pattern!r} matches no {noun}; {closest_names(pattern, known)}")


def closest_names(pattern: str, names: Sequence[str]) -> str:
    """Suggest names for a pattern without a match. Names that differ only in numbers are represented by the first.

    >>> closest_names("*.expert.*", [f"layers.{i}.experts" for i in range(4)])
    "the closest are 'layers.0.experts'"
    """
    different = {without_numbers(name): name for name in reversed(names)}.values()
    like = difflib.get_close_matches(pattern, different, n=_SHOWN, cutoff=0.0)
    return f"the closest are {', '.join(map(repr, like))}" if like else "there are none"


def without_numbers(text: str) -> str:
    """Replace numbers: `layers.3.w1` becomes `layers.*.w1`."""
    return re.sub(r"(?<![\w])\d+(?=\.|$)", "*", text)


def _blocks_of(names: Iterable[str]) -> dict[str, set[int]]:
    """Return the numbers of the blocks of each numbered list of modules.

    >>> _blocks_of(["layers.0.experts.0", "layers.1.experts.7", "head"])
    {'layers': {0, 1}, 'layers.0.experts': {0}, 'layers.1.experts': {7}}
    >>> _blocks_of(["0", "1"])  # The model itself is the list.
    {'': {0, 1}}
    """
    blocks: dict[str, set[int]] = {}
    for name in names:
        parts = name.split(".")
        for i, part in enumerate(parts):
            if part.isdecimal():
                blocks.setdefault(".".join(parts[:i]), set()).add(int(part))
    return blocks


def _shells_of(pattern: str, blocks: Mapping[str, Collection[int]]) -> tuple[str, ...]:
    """Return a pattern as shell patterns, one for each block that its slices select."""
    found = _SLICE.search(pattern)
    if found is None:
        return (pattern,)
    lists, rest = pattern[: found.start()], pattern[found.end() :]
    shells: list[str] = []
    for name, numbers in blocks.items():
        if fnmatch.fnmatchcase(name, lists):
            count, prefix = max(numbers) + 1, glob.escape(name and f"{name}.")
            selected = range(count)[slice(*(_bound(text, count) for text in found.groups()))]
            for i in sorted(numbers):
                if i in selected:
                    shells += _shells_of(f"{prefix}{i}{rest}", blocks)
    return tuple(shells)


def _bound(text: str | None, count: int) -> int | None:
    """Return a bound of a slice of `count` blocks; parts of a block count as a block.

    >>> [_bound(text, 12) for text in ("-15%", "25%", "-3", None)]
    [-2, 3, -3, None]
    """
    if text is None or not text.endswith("%"):
        return None if text is None else int(text)
    percent = int(text[:-1])
    return (abs(percent) * count + 99) // 100 * (-1 if percent < 0 else 1)
