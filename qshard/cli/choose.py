"""Which layer loses most, and which format each layer gets for a budget of bytes.

The harm of a choice is the sum over layers of noise for signal: of `y = x @ w.T` with white `x`, the relative variance
that the layer's own product gets. Layers count alike, however large they are.

For each layer the choices that no mix of two others beats make a convex curve of harm over bytes. Steps along these
curves, those with the largest gain a byte first, are the trade-off of the checkpoint: each of its points has the least
harm that so many bytes can have.

Source: Shoham and Gersho, "Efficient bit allocation for an arbitrary set of quantizers", IEEE Transactions on
Acoustics, Speech and Signal Processing 36 (1988).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qshard.cli.layers import Choice, Layer

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
      uniform: the points of one format for all layers, of those that fit all.
    """

    curve: tuple[Point, ...]
    uniform: dict[str, Point]


@dataclass(frozen=True)
class Recommendation:
    """A choice for each layer, by name, and where that lies."""

    choices: dict[str, Choice]
    point: Point


def ranked(layers: Sequence[Layer]) -> tuple[str, list[tuple[Layer, float | None]]]:
    """Layers by harm, the worst first, in the format of the fewest bytes among those that fit half of the layers.

    Returns:
      The name of the format, and with each layer its harm: None where it is not known. Those come first, and those that
      the format does not fit are not there. The name is "" if there is no format.
    """
    names = dict.fromkeys(str(row.stats.format) for layer in layers for row in layer.rows)
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

    >>> made = [Choice("a", 1.0, 8.0), Choice("b", 2.0, 7.0), Choice("c", 3.0, 1.0), Choice("d", 4.0, 2.0)]
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
    names = dict.fromkeys(name for layer in layers for name in layer.choices)
    uniform = {}
    for name in names:
        chosen = {layer.entry.name: layer.choices[name] for layer in layers if name in layer.choices}
        if len(chosen) == len(layers) and all(choice.harm is not None for choice in chosen.values()):
            uniform[name] = _point(chosen, layers)
    return Tradeoff(tuple(curve), uniform)


def recommended(layers: Sequence[Layer], budget: float) -> Recommendation | None:
    """The choices of least harm that the curve has for a budget, and what else still fits.

    Args:
      budget: bytes an element, over all layers.

    Returns:
      None if the smallest choices are too large.
    """
    fronts = {layer.entry.name: front(layer.choices) for layer in layers}
    at = {name: choices[0] for name, choices in fronts.items()}
    left = budget * _elements(layers) - sum(choice.nbytes for choice in at.values())
    if left < 0:
        return None
    for name, before, after in _steps(fronts):
        if at[name] is before and after.nbytes - before.nbytes <= left:
            at[name] = after
            left -= after.nbytes - before.nbytes
    return Recommendation(at, _point(at, layers))


def _elements(layers: Sequence[Layer]) -> int:
    return sum(layer.entry.elements for layer in layers)


def _point(chosen: Mapping[str, Choice], layers: Sequence[Layer]) -> Point:
    nbytes = sum(choice.nbytes for choice in chosen.values())
    return Point(nbytes / _elements(layers), sum(map(_harm, chosen.values())) / len(layers))
