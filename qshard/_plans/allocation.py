"""Format allocation: ranks layers by harm, and plans a format per layer for a budget of bytes.

The harm of a plan is the mean of the layers' noise-to-signal ratios, weighted by their sizes. For `y = x @ w.T` with
white `x`, the ratio of a layer is the relative variance of the error of `y`.

A plan has few formats, because each needs a kernel where the model is served, and no layer keeps a wide dtype that a
format of the plan could replace. For a set of formats, the choices of a layer that no mix of two others beats form a
convex curve of harm over bytes. The steps along the curves of all layers, in order of decreasing gain per byte, are the
plans of this set. The trade-off of the checkpoint is the least harm over all sets for each number of bytes.

Source: Shoham and Gersho, "Efficient bit allocation for an arbitrary set of quantizers", IEEE Transactions on
Acoustics, Speech and Signal Processing 36 (1988).
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from qshard._plans.layer import Choice, Layer

MOST_FORMATS = 3  # maximum number of formats of a plan
NO_GAIN = 10**-0.01  # Ratio of two harms 0.1 dB apart. A change that gains less is not made.
NARROW = 8  # bits of the widest dtype that a layer may keep although a format could replace it
ROUNDING = 1e-12
AS_THEY_ARE = "as they are"


@dataclass(frozen=True)
class Point:
    """A point of the trade-off: bytes per element, mean harm of an element, and the number of layers by format."""

    bytes_per_element: float
    harm: float
    formats: Mapping[str, int]


@dataclass(frozen=True)
class Tradeoff:
    """Harm as a function of bytes.

    Attributes:
      curve: plans from the fewest bytes to the least harm, at least 0.1 dB apart.
      uniform: name of a format -> the point with this format for all layers that it supports, and all others unchanged,
        as `qshard convert` does. `AS_THEY_ARE` -> the point of the unconverted checkpoint.
    """

    curve: tuple[Point, ...]
    uniform: dict[str, Point]


@dataclass(frozen=True)
class Recommendation:
    """A recommended choice per layer, by name, and its point in the trade-off."""

    choices: dict[str, Choice]
    point: Point


def rank(layers: Sequence[Layer]) -> tuple[str, list[tuple[Layer, float | None]]]:
    """Rank layers by harm, worst first, in the smallest format that supports half of the layers (or the most).

    Return the name of the format ("" if there is none), and the layers that it supports with their harm. Unknown harm
    is None and comes first.
    """
    names = _formats(layers)
    fits = {name: [layer for layer in layers if name in layer.choices] for name in names}
    enough = min(max(map(len, fits.values()), default=0), len(layers) / 2)

    def bits(name: str) -> float:
        return sum(each.choices[name].nbytes for each in fits[name]) / sum(each.entry.elements for each in fits[name])

    name = min((name for name in names if len(fits[name]) >= enough), key=bits, default="")
    found = [(layer, layer.choices[name].harm) for layer in fits.get(name, [])]
    found.sort(key=lambda each: (each[1] is not None, -(each[1] or 0.0)))
    return name, found


def front(choices: Collection[Choice]) -> list[Choice]:
    """Return the choices that no other choice and no mix of two beats, by increasing bytes and decreasing gain.

    A choice with more bytes and less than 0.1 dB less harm is left out.

    >>> made = [("a", 1, 8.0), ("b", 2, 7.0), ("c", 3, 1.0), ("d", 4, 2.0), ("e", 5, 0.99)]
    >>> [choice.name for choice in front([Choice(*each) for each in made])]
    ['a', 'c']
    """
    kept: list[Choice] = []
    for choice in sorted(choices, key=lambda each: (each.nbytes, _harm(each))):
        if choice.harm is None or (kept and _harm(choice) >= _harm(kept[-1]) * NO_GAIN):
            continue
        while len(kept) > 1 and _gain(kept[-2], kept[-1]) <= _gain(kept[-1], choice):
            kept.pop()
        kept.append(choice)
    return kept


def _harm(choice: Choice) -> float:
    return float("inf") if choice.harm is None else choice.harm


def _gain(low: Choice, high: Choice) -> float:
    return (_harm(low) - _harm(high)) / (high.nbytes - low.nbytes)


class _Options:
    """Choices of a plan for one layer: formats of known harm, and its own dtype if narrow or without alternative."""

    def __init__(self, layer: Layer) -> None:
        choices, own = dict(layer.choices), layer.entry.dtype
        self.elements, self.own = layer.entry.elements, choices.pop(own)
        known = {name: each for name, each in choices.items() if each.harm is not None}
        self.formats = {name: each for name, each in known.items() if each.nbytes < self.own.nbytes}
        self.keeps = not self.formats or layer.entry.bits <= NARROW

    def front(self, formats: Collection[str]) -> list[Choice]:
        """Return the front of the choices with these formats."""
        some = [each for name, each in self.formats.items() if name in formats]
        return front([*some, self.own] if self.keeps or not some else some)

    def covered(self, formats: Collection[str]) -> int:
        """Return the number of elements that need not stay in a wide dtype with these formats."""
        return self.elements if self.keeps or any(name in formats for name in self.formats) else 0


class _Step(NamedTuple):
    """A change of one layer to a choice with more bytes and less harm. `saved` is the harm of all its elements."""

    layer: int
    before: Choice
    after: Choice
    saved: float

    @property
    def nbytes(self) -> int:
        return self.after.nbytes - self.before.nbytes


class _Plans:
    """The plans of one set of formats: a start with the fewest bytes, and steps of decreasing gain per byte."""

    def __init__(self, options: Sequence[_Options], formats: Collection[str]) -> None:
        self.options = options
        self.fronts = [each.front(formats) for each in options]
        self.least = sum(choices[0].nbytes for choices in self.fronts)
        steps = [
            _Step(i, low, high, options[i].elements * (_harm(low) - _harm(high)))
            for i, choices in enumerate(self.fronts)
            for low, high in itertools.pairwise(choices)
        ]
        self.steps = sorted(steps, key=lambda step: -step.saved / step.nbytes)

    def totals(self) -> list[tuple[int, float]]:
        """Return bytes and harm of the start, and of the plan after each step."""
        harms = [self.harm([choices[-1] for choices in self.fronts])]
        for step in reversed(self.steps):  # from small to large, so that small terms are not lost
            harms.append(harms[-1] + step.saved)
        nbytes = itertools.accumulate((step.nbytes for step in self.steps), initial=self.least)
        return list(zip(nbytes, reversed(harms), strict=True))

    def harm(self, plan: Sequence[Choice]) -> float:
        """Return the harm of all elements."""
        return math.fsum(of.elements * _harm(choice) for of, choice in zip(self.options, plan, strict=True))

    def plan(self, steps: Iterable[_Step]) -> list[Choice]:
        """Return the choices after some steps."""
        made = [choices[0] for choices in self.fronts]
        for step in steps:
            made[step.layer] = step.after
        return made

    def within(self, nbytes: float) -> list[list[_Step]]:
        """Return the steps of plans within a size, none if the start does not fit.

        One plan has all steps that fit, in order. If a step of a large layer did not fit, another plan begins with it.
        """
        if nbytes < self.least:
            return []
        made, missed = self._fill(nbytes, [])
        if missed is None:
            return [made]
        first = [step for step in self.steps[: self.steps.index(missed) + 1] if step.layer == missed.layer]
        if self.least + sum(step.nbytes for step in first) > nbytes:
            return [made]
        return [made, self._fill(nbytes, first)[0]]

    def _fill(self, nbytes: float, first: list[_Step]) -> tuple[list[_Step], _Step | None]:
        """Return `first`, then all steps that fit in order, and the first step that does not fit."""
        made, missed, at = list(first), None, self.plan(first)
        left = nbytes - sum(choice.nbytes for choice in at)
        for step in self.steps:
            if at[step.layer] is not step.before:
                continue
            if step.nbytes <= left:
                at[step.layer] = step.after
                left -= step.nbytes
                made.append(step)
            else:
                missed = missed or step
        return made, missed

    def trimmed(self, steps: list[_Step], harm: float) -> list[Choice]:
        """Return the plan with the fewest of these steps, from the first on, that has at most `harm`."""
        left = self.harm(self.plan(steps))
        for i in range(len(steps), 0, -1):
            left += steps[i - 1].saved
            if left > harm:
                return self.plan(steps[:i])
        return self.plan(())


def _sets(options: Sequence[_Options]) -> list[tuple[str, ...]]:
    """Return the sets of at most `MOST_FORMATS` formats that leave the fewest elements in a wide dtype."""
    used = [choice.name for each in options for choice in each.front(each.formats) if choice.name in each.formats]
    names = list(dict.fromkeys(used))
    every = [made for size in range(MOST_FORMATS + 1) for made in itertools.combinations(names, size)]
    covered = {made: sum(each.covered(made) for each in options) for made in every}
    return [made for made in every if covered[made] == max(covered.values())]


def tradeoff(layers: Sequence[Layer]) -> Tradeoff:
    """Compute the trade-off between bytes and harm."""
    options = [_Options(layer) for layer in layers]
    sets = [_Plans(options, formats) for formats in _sets(options)]
    totals = [(*total, i, each) for i, plans in enumerate(sets) for each, total in enumerate(plans.totals())]
    totals.sort(key=lambda each: (each[0], _level(each[1]), each[2]))  # of equal ones, the smallest set first
    curve: list[Point] = []
    least = math.inf
    for _, harm, i, steps in totals:
        if harm < least * NO_GAIN or (harm == 0 < least):
            curve.append(_point(sets[i].plan(sets[i].steps[:steps]), layers))
            least = harm
    uniform = {}
    for name in (*_formats(layers), AS_THEY_ARE):
        chosen = [
            choices.get(name, choices[layer.entry.dtype])
            for layer, choices in ((each, each.choices) for each in layers)
        ]
        if all(choice.harm is not None for choice in chosen):
            uniform[name] = _point(chosen, layers)
    return Tradeoff(tuple(curve), uniform)


def recommend(layers: Sequence[Layer], budget: float) -> Recommendation | None:
    """Plan formats for a budget in bytes per element; None if the smallest choices exceed it.

    Of the plans within 0.1 dB of the best, the one with the fewest formats is returned, and of those the smallest.
    """
    most = budget * sum(layer.entry.elements for layer in layers) * (1 + ROUNDING)  # quotients of bytes are rounded
    options = [_Options(layer) for layer in layers]
    found = []
    for plans in (_Plans(options, formats) for formats in _sets(options)):
        found += [(plans, steps, plans.harm(plans.plan(steps))) for steps in plans.within(most)]
    if not found:
        return None
    enough = min(harm for *_, harm in found) / NO_GAIN
    good = [plans.trimmed(steps, enough) for plans, steps, harm in found if harm <= enough]

    def cost(plan: Sequence[Choice]) -> tuple[int, int]:
        formats = {choice.name for choice, each in zip(plan, options, strict=True) if choice is not each.own}
        return len(formats), sum(choice.nbytes for choice in plan)

    best = min(good, key=cost)
    return Recommendation(
        {layer.entry.name: choice for layer, choice in zip(layers, best, strict=True)}, _point(best, layers)
    )


def _level(harm: float) -> float:
    """Return a harm in steps of 0.1 dB."""
    return -round(math.log(harm, NO_GAIN)) if harm else -math.inf


def _formats(layers: Sequence[Layer]) -> list[str]:
    return list(dict.fromkeys(name for layer in layers for name in layer.choices if name != layer.entry.dtype))


def _point(chosen: Sequence[Choice], layers: Sequence[Layer]) -> Point:
    sizes = [layer.entry.elements for layer in layers]
    harm = math.fsum(size * _harm(choice) for size, choice in zip(sizes, chosen, strict=True))
    nbytes = sum(choice.nbytes for choice in chosen)
    return Point(nbytes / sum(sizes), harm / sum(sizes), collections.Counter(choice.name for choice in chosen))
