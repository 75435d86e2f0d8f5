"""Format allocation: ranks layers by harm, and chooses a format per layer for a budget of bytes.

The harm of a choice of formats is the sum over layers of the noise-to-signal ratio. For `y = x @ w.T` with white `x`,
this is the relative variance of the error of `y`. All layers count equally, regardless of size.

For each layer, the choices that no mix of two others beats form a convex curve of harm over bytes. The steps along all
curves, in order of decreasing gain per byte, are the trade-off of the checkpoint: each of its points has the least harm
for its bytes. A budget usually lies between two points, and the best mix for it may lie on no curve. Mixes are
therefore built layer by layer, dropping those that another mix beats in both bytes and harm.

Sources: Shoham and Gersho, "Efficient bit allocation for an arbitrary set of quantizers", IEEE Transactions on
Acoustics, Speech and Signal Processing 36 (1988); of mixes, Nemhauser and Ullmann, "Discrete dynamic programming and
capital allocation", Management Science 15 (1969).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from qshard._cli.layers import Choice, Layer

MOST_MIXES = 2**14  # maximum number of mixes at a time
MIXES_IN_ALL = 2**21  # maximum number of mixes over all layers
ROUNDING = 1e-12
AS_THEY_ARE = "as they are"
Choices = Mapping[str, Choice]


@dataclass(frozen=True)
class Point:
    """A point of the trade-off: bytes per element over all layers, and mean harm per layer."""

    bytes_per_element: float
    harm: float


@dataclass(frozen=True)
class Tradeoff:
    """Harm as a function of bytes.

    Attributes:
      curve: points from the fewest bytes to zero harm, or as far as known.
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


def front(choices: Choices) -> list[Choice]:
    """Return the choices that no other choice and no mix of two beats, by increasing bytes and decreasing gain.

    >>> made = [Choice("a", 1, 8.0), Choice("b", 2, 7.0), Choice("c", 3, 1.0), Choice("d", 4, 2.0)]
    >>> [choice.name for choice in front({choice.name: choice for choice in made})]
    ['a', 'c']
    """
    kept: list[Choice] = []
    for choice in sorted(choices.values(), key=lambda each: (each.nbytes, _harm(each))):
        if choice.harm is None or (kept and _harm(choice) >= _harm(kept[-1])):
            continue
        while len(kept) > 1 and _gain(kept[-2], kept[-1]) <= _gain(kept[-1], choice):
            kept.pop()
        kept.append(choice)
    return kept


def _harm(choice: Choice) -> float:
    return float("inf") if choice.harm is None else choice.harm


def _gain(low: Choice, high: Choice) -> float:
    return (_harm(low) - _harm(high)) / (high.nbytes - low.nbytes)


def _steps(fronts: Mapping[str, Sequence[Choice]]) -> list[tuple[str, Choice, Choice]]:
    """Return all steps by decreasing gain. Gains decrease within a layer, so its steps stay in order."""
    steps = [(name, *pair) for name, choices in fronts.items() for pair in itertools.pairwise(choices)]
    return sorted(steps, key=lambda step: -_gain(step[1], step[2]))


def tradeoff(layers: Sequence[Layer]) -> Tradeoff:
    fronts = {layer.entry.name: front(layer.choices) for layer in layers}
    steps, elements = _steps(fronts), _elements(layers)
    sizes = [sum(choices[0].nbytes for choices in fronts.values())]
    harms = [sum(_harm(choices[-1]) for choices in fronts.values())]
    for _, before, after in steps:
        sizes.append(sizes[-1] + after.nbytes - before.nbytes)
    for _, before, after in reversed(steps):  # from small to large, so that small terms are not lost
        harms.append(harms[-1] + _harm(before) - _harm(after))
    curve = [Point(size / elements, harm / len(layers)) for size, harm in zip(sizes, reversed(harms), strict=True)]
    uniform = {}
    for name in (*_formats(layers), AS_THEY_ARE):
        chosen = {layer.entry.name: layer.choices.get(name, layer.choices[layer.entry.dtype]) for layer in layers}
        if all(choice.harm is not None for choice in chosen.values()):
            uniform[name] = _point(chosen, layers)
    return Tradeoff(tuple(curve), uniform)


def recommend(layers: Sequence[Layer], budget: float) -> Recommendation | None:
    """Choose formats with the least harm for a budget in bytes per element; None if the smallest choices exceed it.

    Only choices of known harm count. The result is optimal if at most `MOST_MIXES` mixes are undominated at a time. If
    there are more, or many layers, a subset that is spread over the bytes is kept. The result is then at least as good
    as the last point of the curve within the budget.
    """
    left = budget * _elements(layers) * (1 + ROUNDING)  # bytes are whole numbers, their quotients are not
    known = [[choice for choice in layer.choices.values() if choice.harm is not None] for layer in layers]
    along = _along(layers, left)
    if along is None:
        return None
    found = [dict(zip(along, mix, strict=True)) for mix in (list(along.values()), _best_mix(known, left))]
    best = min(found, key=lambda mix: (sum(map(_harm, mix.values())), sum(choice.nbytes for choice in mix.values())))
    return Recommendation(best, _point(best, layers))


def _along(layers: Sequence[Layer], left: float) -> dict[str, Choice] | None:
    """Return the last point of the curve within a budget, plus all later steps that still fit."""
    fronts = {layer.entry.name: front(layer.choices) for layer in layers}
    at = {name: choices[0] for name, choices in fronts.items()}
    left -= sum(choice.nbytes for choice in at.values())
    if left < 0:
        return None
    for name, before, after in _steps(fronts):
        if at[name] is before and after.nbytes - before.nbytes <= left:
            at[name] = after
            left -= after.nbytes - before.nbytes
    return at


def _best_mix(known: Sequence[Sequence[Choice]], most: float) -> list[Choice]:
    """Return the mix of least harm within `most` bytes, one choice per layer, if `MOST_MIXES` suffice."""
    rest = sum(min(choice.nbytes for choice in choices) for choices in known)
    kept = min(MOST_MIXES, MIXES_IN_ALL // len(known) + 1)
    sizes, harms, trail = np.zeros(1), np.zeros(1), []
    for choices in known:
        rest -= min(choice.nbytes for choice in choices)
        sizes = np.add.outer(sizes, [choice.nbytes for choice in choices]).reshape(-1)
        harms = np.add.outer(harms, [_harm(choice) for choice in choices]).reshape(-1)
        order = np.lexsort((harms, sizes))
        order = order[sizes[order] + rest <= most]
        order = order[
            np.diff(np.minimum.accumulate(harms[order]), prepend=np.inf) < 0
        ]  # less harm than all smaller mixes
        if len(order) > kept:
            span = sizes[order[-1]] - sizes[order[0]]
            place = ((sizes[order] - sizes[order[0]]) * (kept / span)).astype(np.int64)
            order = order[np.diff(place, append=-1) != 0]  # keep the last of each interval, which has the least harm
        sizes, harms = sizes[order], harms[order]
        trail.append(order)
    at, mix = len(sizes) - 1, []
    for choices, order in zip(reversed(known), reversed(trail), strict=True):
        at, which = divmod(int(order[at]), len(choices))
        mix.append(choices[which])
    return mix[::-1]


def _formats(layers: Sequence[Layer]) -> list[str]:
    return list(dict.fromkeys(name for layer in layers for name in layer.choices if name != layer.entry.dtype))


def _elements(layers: Sequence[Layer]) -> int:
    return sum(layer.entry.elements for layer in layers)


def _point(chosen: Mapping[str, Choice], layers: Sequence[Layer]) -> Point:
    nbytes = sum(choice.nbytes for choice in chosen.values())
    return Point(nbytes / _elements(layers), sum(map(_harm, chosen.values())) / len(layers))
