"""All that a report has found, for whoever shows it."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qshard._cli.activations import open_activations
from qshard._cli.choose import Recommendation, Tradeoff, ranked, recommended, tradeoff
from qshard._cli.errors import Misuse, counted, shown
from qshard._cli.layers import Layer, Question, measured
from qshard._cli.options import Budget
from qshard._cli.selection import select
from qshard._cli.sources import Checkpoint, matching
from qshard.formats import Usage

RANKING = "noise for signal, from the layer that loses most"
HARM = "noise for signal, mean over layers"


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What is shown as text, JSON, CSV and HTML.

    Attributes:
      left_out: name of each tensor that is no layer -> why.
      ranked_by, ranking: of `choose.ranked`.
      budget: bytes an element.
      budget, recommendation: None if no budget was given.
    """

    checkpoint: Checkpoint
    layers: tuple[Layer, ...]
    left_out: dict[str, str]
    ranked_by: str
    ranking: list[tuple[Layer, float | None]]
    tradeoff: Tradeoff
    budget: float | None
    recommendation: Recommendation | None

    @property
    def grouped(self) -> dict[str, list[str]]:
        """Reason -> the tensors that are left out for it."""
        found: dict[str, list[str]] = {}
        for name, why in self.left_out.items():
            found.setdefault(why, []).append(name)
        return found


def find(
    checkpoint: Checkpoint,
    question: Question,
    globs: Sequence[str],
    given: Budget | None,
    activations: Path | None = None,
) -> Findings:
    """Measures a checkpoint.

    Args:
      globs: of the layers; none for all.
      given: the budget.
      activations: a file of `numpy.savez`.

    Raises:
      Misuse: no layer has such a name, none can be measured, the budget is too small for every choice, or a tensor
        holds codes.
    """
    notes = list(checkpoint.notes)
    names = matching(checkpoint.entries, globs, "--layers") if globs else set(checkpoint.entries)
    selection = select(checkpoint, names, any_axes=bool(globs), advice="name other layers with --layers")
    notes, left_out = notes + selection.notes, selection.left_out
    entries = sorted(selection.layers, key=lambda entry: natural(entry.name))
    if not entries:
        name, why = next(iter(left_out.items()), ("none", "it has no tensors"))
        some = f"{counted(len(left_out), 'tensor')}, such as {shown(name)} ({why})" if left_out else why
        raise Misuse(f"{shown(checkpoint.path)} has no layer to measure: {some}; name layers with --layers")
    budget, elements = None, sum(entry.elements for entry in entries)
    if given is not None:
        budget, least = given.of_an_element(elements), sum(map(question.least_bytes, entries))
        if budget < least / elements:
            at_least = f"{least:.0f} bytes, {math.ceil(least / elements * 1e4) / 1e4:.4f} an element"
            raise Misuse(f"--budget {shown(given.text)} is too small: the formats take {at_least}")
    if activations is not None:
        found, more = open_activations(activations, entries)
        question, notes = dataclasses.replace(question, activations=found), notes + more
    layers = tuple(measured(entries, question, selection.remarks))
    ranked_by, ranking = ranked(layers)
    choice, curve = None if budget is None else recommended(layers, budget), tradeoff(layers)
    if budget is not None and choice is None:
        least = curve.curve[0].bytes_per_element
        notes.append(f"no recommendation: choices whose harm is known take {least:.4f} bytes an element at least")
    if any(fmt.hadamard for fmt in question.formats) and Usage.COLUMNWISE not in question.usage.planes:
        notes.append(
            "what is rotated is of the columnwise plane, and no choice: --usage columnwise or both makes it one"
        )
    return Findings(
        checkpoint=dataclasses.replace(checkpoint, notes=notes),
        layers=layers,
        left_out=left_out,
        ranked_by=ranked_by,
        ranking=ranking,
        tradeoff=curve,
        budget=budget,
        recommendation=choice,
    )


def natural(name: str) -> list[tuple[int, str]]:
    """For sorting as people do: numbers by their size.

    >>> sorted(["h.10.w", "h.9.w", "a"], key=natural)
    ['a', 'h.9.w', 'h.10.w']
    """
    parts = re.split(r"([0-9]+)", name)
    return [(len(part.lstrip("0")), part.lstrip("0")) if i % 2 else (0, part) for i, part in enumerate(parts)]


def title(layer: Layer) -> str:
    """What stands above the rows of a layer, after its name."""
    shape = " x ".join(map(str, layer.entry.shape)) or "one number"
    return f"{shape}, {layer.entry.dtype}, outliers {layer.outliers:.4%}"


def draws(layer: Layer) -> list[str]:
    """A line for each format of a layer that was drawn several times."""
    return [
        f"{row.stats.format}: the mean of {len(row.draws)} draws, of {min(row.draws):.2f} to {max(row.draws):.2f} dB"
        for row in layer.rows
        if len(row.draws) > 1
    ]


def outputs(layer: Layer) -> list[str]:
    """A line on the harm with activations, if they are there."""
    found = [f"{row.stats.format} {decibels(row.output)}" for row in layer.rows if row.output is not None]
    return [f"dB of noise for signal with its activations: {', '.join(found)}"] if found else []


def level(harm: float) -> str:
    """`decibels` in a sentence."""
    return f"{decibels(harm)} dB" if harm else "no noise"


def decibels(harm: float | None) -> str:
    """Noise for signal in dB.

    >>> decibels(0.01), decibels(0.0), decibels(None)
    ('-20.0', 'none', 'not known')
    """
    if harm is None:
        return "not known"
    return f"{10 * math.log10(harm):.1f}" if harm else "none"
