"""Which layer loses most, and which format each layer gets for a budget of bytes.

The harm of a choice is the sum over layers of noise for signal: of `y = x @ w.T` with white `x`, the relative variance
that the layer's own product gets. Layers count alike, however large they are.

For each layer the choices that no mix of two others beats make a convex curve of harm over bytes. Steps along these
curves, those with the largest gain a byte first, are the trade-off of the checkpoint: each of its points has the least
harm that so many bytes can have. A budget lies between two points, and the best mix for it need not lie on any curve:
mixes are made layer by layer, without those that another beats in both.

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

MOST_MIXES = 2**14
"""For a budget, at a time."""
MIXES_IN_ALL = 2**21
"""Over all layers."""
ROUNDING = 1e-12
AS_THEY_ARE = "as they are"
Choices = Mapping[str, Choice]


@dataclass(frozen=True)
class Point:
    """Bytes an element over all layers, and the mean harm of a layer."""

    bytes_per_element: float
    harm: float


@dataclass(frozen=True)
class Tradeoff:
    """What bytes buy.

    Attributes:
      curve: from the fewest bytes to no harm, or as far as it goes.
      uniform: by format, the point of that format for all layers that it fits, and others as they are, as
        `qshard convert` has it, and that of all `AS_THEY_ARE`.
    """

    curve: tuple[Point, ...]
    uniform: dict[str, Point]


@dataclass(frozen=True)
class Recommendation:
    """A choice for each layer, by name, and where that lies."""

    choices: dict[str, Choice]
    point: Point


def rank(layers: Sequence[Layer]) -> tuple[str, list[tuple[Layer, float | None]]]:
    """Layers by harm, the worst first, in the format of the fewest bytes among those that fit half of the layers.

    Returns:
      The name of the format, and with each layer its harm: None where it is not known. Those come first, and those that
      the format does not fit are not there. The name is "" if there is no format.
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
    """The choices that no other, and no mix of two, beats: by bytes, with ever smaller gains.

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
    """All steps, the largest gain first; those of a layer stay in their order, as theirs fall."""
    steps = [(name, *pair) for name, choices in fronts.items() for pair in itertools.pairwise(choices)]
    return sorted(steps, key=lambda step: -_gain(step[1], step[2]))


def tradeoff(layers: Sequence[Layer]) -> Tradeoff:
    """The curve of a checkpoint."""
    fronts = {layer.entry.name: front(layer.choices) for layer in layers}
    steps, elements = _steps(fronts), _elements(layers)
    sizes = [sum(choices[0].nbytes for choices in fronts.values())]
    harms = [sum(_harm(choices[-1]) for choices in fronts.values())]
    for _, before, after in steps:
        sizes.append(sizes[-1] + after.nbytes - before.nbytes)
    for _, before, after in reversed(steps):  # From the small to the large, so that small ones are not lost.
        harms.append(harms[-1] + _harm(before) - _harm(after))
    curve = [Point(size / elements, harm / len(layers)) for size, harm in zip(sizes, reversed(harms), strict=True)]
    uniform = {}
    for name in (*_formats(layers), AS_THEY_ARE):
        chosen = {layer.entry.name: layer.choices.get(name, layer.choices[layer.entry.dtype]) for layer in layers}
        if all(choice.harm is not None for choice in chosen.values()):
            uniform[name] = _point(chosen, layers)
    return Tradeoff(tuple(curve), uniform)


def recommend(layers: Sequence[Layer], budget: float) -> Recommendation | None:
    """The choices of least harm for a budget.

    Of all mixes, as long as no more than `MOST_MIXES` at a time are beaten by no other. Of more, or of many layers,
    some are kept that are spread over the bytes: what is found is at least as good as the last point of the curve.

    Args:
      budget: bytes an element, over all layers.

    Returns:
      None if the smallest choices of known harm are too large.
    """
    left = budget * _elements(layers) * (1 + ROUNDING)  # Bytes are whole, and their quotients are not.
    known = [[choice for choice in layer.choices.values() if choice.harm is not None] for layer in layers]
    along = _along(layers, left)
    if along is None:
        return None
    found = [dict(zip(along, mix, strict=True)) for mix in (list(along.values()), _best_mix(known, left))]
    best = min(found, key=lambda mix: (sum(map(_harm, mix.values())), sum(choice.nbytes for choice in mix.values())))
    return Recommendation(best, _point(best, layers))


def _along(layers: Sequence[Layer], left: float) -> dict[str, Choice] | None:
    """The last point of the curve that so many bytes allow, and the steps after it that still fit."""
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
    """The mix of least harm of at most so many bytes, a choice of each, if `MOST_MIXES` are enough."""
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
        ]  # Each with less than all before.
        if len(order) > kept:
            span = sizes[order[-1]] - sizes[order[0]]
            place = ((sizes[order] - sizes[order[0]]) * (kept / span)).astype(np.int64)
            order = order[np.diff(place, append=-1) != 0]  # The last of each has the least harm.
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
