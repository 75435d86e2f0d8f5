"""What a report says, for programs: JSON and CSV. Numbers that are not finite are null, or empty."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator
from typing import Any

from qshard._cli.choose import Point
from qshard._cli.findings import Findings
from qshard._cli.layers import Layer, Row

NUMBERS = (
    "sqnr_db",
    "max_relative_error",
    "mean_relative_error",
    "zeros_made",
    "saturated",
    "subnormal",
    "worst_block_db",
    "nonfinite_given",
    "nonfinite_made",
    "beyond_float32",
    "bits_per_element",
)
"""Of `Stats`, by their names there."""


def as_json(findings: Findings) -> str:
    """One object; docs/command.md says what it holds."""
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
    """A line for each layer, format and plane, and for each pair that was left out, with the reason."""
    heads = [
        "layer",
        "dtype",
        "shape",
        "format",
        "usage",
        *NUMBERS,
        "worst_block",
        "harm",
        "output_noise",
        "outliers",
        "notes",
    ]
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


def _point(point: Point) -> dict[str, float]:
    return {"bytes_per_element": point.bytes_per_element, "harm": point.harm}


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
