"""Results of `qshard report`, and their JSON and CSV forms. Non-finite numbers are null in JSON and empty in CSV."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qshard._cli.errors import Misuse
from qshard._cli.layers import Question, measure, open_activations
from qshard._cli.options import Budget, matching
from qshard._cli.plan import text_of
from qshard._cli.selection import select
from qshard._files.checkpoint import Checkpoint
from qshard._files.names import count_of, quote
from qshard._plans.allocation import Point, Recommendation, Tradeoff, rank, recommend, tradeoff
from qshard._plans.layer import Layer, Row
from qshard.formats import Usage

RANKING = "SQNR of each layer, worst first"
NO_PLAN = "no recommendation"
QUALITY = "SQNR of all layers, weighed by their sizes"

# Fields of `Stats` that are written.
NUMBERS = ["sqnr_db", "max_relative_error", "mean_relative_error", "zeros_made", "saturated", "subnormal"]
NUMBERS += ["worst_block_db", "nonfinite_given", "nonfinite_made", "beyond_float32", "bits_per_element"]


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Results of a report, for text, JSON, CSV and HTML.

    Attributes:
      left_out: name of each tensor that is not a layer -> reason.
      ranked_by: name of the format of the ranking, from `allocation.rank`.
      ranking: layers with their harm, from `allocation.rank`.
      budget: bytes per element; None without a budget.
      recommendation: recommended formats; None without a budget, or if none fits it.
    """

    checkpoint: Checkpoint
    layers: tuple[Layer, ...]
    left_out: dict[str, str]
    ranked_by: str
    ranking: list[tuple[Layer, float | None]]
    tradeoff: Tradeoff
    budget: float | None
    recommendation: Recommendation | None


def find(
    checkpoint: Checkpoint,
    question: Question,
    globs: Sequence[str],
    given: Budget | None,
    activations: Path | None = None,
) -> Findings:
    """Measure a checkpoint.

    `globs` has patterns of layer names; none selects all layers. `activations` is a file of `numpy.savez` with inputs
    of the layers.

    Raises Misuse if a pattern matches no layer, no layer can be measured, the budget is too small for every choice, or
    a tensor has codes.
    """
    notes = list(checkpoint.notes)
    names = matching(checkpoint.entries, globs, "--layers") if globs else set(checkpoint.entries)
    selection = select(checkpoint, names, any_axes=bool(globs), advice="name other layers with --layers")
    notes, left_out = notes + selection.notes, selection.left_out
    entries = sorted(selection.layers, key=lambda entry: natural(entry.name))
    if not entries:
        name, why = next(iter(left_out.items()), ("none", "it has no tensors"))
        some = f"{count_of(len(left_out), 'tensor')}, such as {quote(name)} ({why})" if left_out else why
        raise Misuse(f"{quote(checkpoint.path)} has no layer to measure: {some}; name layers with --layers")
    budget, elements = None, sum(entry.elements for entry in entries)
    if given is not None:
        budget, least = given.of_an_element(elements), sum(map(question.least_bytes, entries))
        if budget < least / elements:
            at_least = f"{least:.0f} bytes, {math.ceil(least / elements * 1e4) / 1e4:.4f} an element"
            raise Misuse(f"--budget {quote(given.text)} is too small: the formats take {at_least}")
    if activations is not None:
        found, more = open_activations(activations, entries)
        question, notes = dataclasses.replace(question, activations=found), notes + more
    layers = tuple(measure(entries, question, selection.remarks))
    ranked_by, ranking = rank(layers)
    choice, curve = None if budget is None else recommend(layers, budget), tradeoff(layers)
    if budget is not None and choice is None:
        least = curve.curve[0].bytes_per_element
        notes.append(f"{NO_PLAN}: the smallest plan with known noise takes {least:.4f} bytes per element")
    if any(fmt.hadamard for fmt in question.formats) and Usage.COLUMNWISE not in question.usage.planes:
        notes.append(
            "rotated formats exist only for the columnwise plane; add --usage columnwise or --usage both to include "
            "them"
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
    """Return a sort key that compares numbers in names by value.

    >>> sorted(["h.10.w", "h.9.w", "a"], key=natural)
    ['a', 'h.9.w', 'h.10.w']
    """
    parts = re.split(r"([0-9]+)", name)
    return [(len(part.lstrip("0")), part.lstrip("0")) if i % 2 else (0, part) for i, part in enumerate(parts)]


def title(layer: Layer) -> str:
    """Return the heading of a layer's rows, without its name."""
    shape = " x ".join(map(str, layer.entry.shape)) or "one number"
    return f"{shape}, {layer.entry.dtype}, outliers {layer.outliers:.4%}"


def draws(layer: Layer) -> list[str]:
    """Return a line for each format that was measured several times."""
    return [
        f"{row.stats.format}: the mean of {len(row.draws)} draws, of {min(row.draws):.2f} to {max(row.draws):.2f} dB"
        for row in layer.rows
        if len(row.draws) > 1
    ]


def outputs(layer: Layer) -> list[str]:
    """Return a line about the harm with activations, if there are any."""
    found = [f"{row.stats.format} {decibels(row.output)}" for row in layer.rows if row.output is not None]
    return [f"SQNR of its output with its activations, in dB: {', '.join(found)}"] if found else []


def level(harm: float) -> str:
    """Format harm as SQNR for a sentence."""
    return f"{decibels(harm)} dB" if harm else "exact"


def decibels(harm: float | None) -> str:
    """Format a noise-to-signal ratio as SQNR in dB.

    >>> decibels(0.01), decibels(0.0), decibels(None)
    ('20.0', 'exact', 'unknown')
    """
    if harm is None:
        return "unknown"
    return f"{-10 * math.log10(harm):.1f}" if harm else "exact"


def mix(formats: Mapping[str, int]) -> str:
    """Format the number of layers by format.

    >>> mix({"FP8_E4M3": 1, "NVFP4": 12}), mix({"NVFP4": 12})
    ('NVFP4 12, FP8_E4M3 1', 'NVFP4')
    """
    names = sorted(formats, key=lambda name: -formats[name])
    return names[0] if len(names) == 1 else ", ".join(f"{name} {formats[name]}" for name in names)


def as_plan(findings: Findings) -> str:
    """Return the plan file of the recommendation: the format of each layer that does not keep its dtype.

    Raises Misuse without a recommendation.
    """
    chosen = findings.recommendation
    if chosen is None:
        why = next(note for note in findings.checkpoint.notes if note.startswith(NO_PLAN))
        raise Misuse(f"--plan: {why}; raise --budget")
    own = {layer.entry.name: layer.entry.dtype for layer in findings.layers}
    formats = {name: choice.name for name, choice in chosen.choices.items() if choice.name != own[name]}
    if not formats:
        raise Misuse("--plan: no layer would get a format; measure other formats with --formats")
    return text_of(formats, findings.layers[0].usage)


def as_json(findings: Findings) -> str:
    """Return the report as a JSON object; docs/command.md lists its keys."""
    tradeoff, chosen = findings.tradeoff, findings.recommendation
    return json.dumps(
        {
            "checkpoint": str(findings.checkpoint.path),
            "notes": findings.checkpoint.notes,
            "layers": [_layer(layer) for layer in findings.layers],
            "left_out": findings.left_out,
            "ranking": {
                "format": findings.ranked_by,
                "layers": [{"name": layer.entry.name, "harm": harm} for layer, harm in findings.ranking],
            },
            "tradeoff": {
                "curve": [_point(point) for point in tradeoff.curve],
                "uniform": {name: _point(point) for name, point in tradeoff.uniform.items()},
            },
            "recommendation": None
            if chosen is None
            else {
                "budget": findings.budget,
                **_point(chosen.point),
                "formats": {name: choice.name for name, choice in chosen.choices.items()},
            },
        },
        indent=1,
        allow_nan=False,
    )


def as_csv(findings: Findings) -> str:
    """Return a CSV line per layer, format and plane, and per combination that was left out, with the reason."""
    heads = ["layer", "dtype", "shape", "format", "usage", *NUMBERS]
    heads += ["worst_block", "harm", "output_noise", "outliers", "notes"]
    made = io.StringIO()
    writer = csv.DictWriter(made, heads, lineterminator="\n")
    writer.writeheader()
    writer.writerows(_lines(findings))
    return made.getvalue()


def _lines(findings: Findings) -> Iterator[dict[str, Any]]:
    for layer in findings.layers:
        about = {
            "layer": layer.entry.name,
            "dtype": layer.entry.dtype,
            "shape": _by(layer.entry.shape),
            "outliers": layer.outliers,
        }
        for row in layer.rows:
            read = _row(row)
            notes = "; ".join([*read.pop("notes"), *layer.remarks])
            del read["draws"]
            yield about | read | {"worst_block": _by(row.stats.worst_block or ()), "notes": notes}
        for name, why in layer.left_out.items():
            yield about | {"format": name, "notes": f"left out: {why}"}
    for name, why in findings.left_out.items():
        yield {"layer": name, "notes": f"left out: {why}"}


def _by(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes))


def _layer(layer: Layer) -> dict[str, Any]:
    return {
        "name": layer.entry.name,
        "dtype": layer.entry.dtype,
        "shape": layer.entry.shape,
        "outliers": layer.outliers,
        "remarks": layer.remarks,
        "formats": [_row(row) for row in layer.rows],
        "left_out": layer.left_out,
    }


def _row(row: Row) -> dict[str, Any]:
    stats = row.stats
    return {
        "format": str(stats.format),
        "usage": str(stats.usage.name).lower(),
        **{name: _number(getattr(stats, name)) for name in NUMBERS},
        "worst_block": stats.worst_block,
        "harm": row.harm,
        "output_noise": row.output,
        "draws": [_number(value) for value in row.draws],
        "notes": [str(note) for note in stats.notes],
    }


def _point(point: Point) -> dict[str, Any]:
    return {"bytes_per_element": point.bytes_per_element, "harm": point.harm, "formats": dict(point.formats)}


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
