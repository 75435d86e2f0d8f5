"""Measured layers of a checkpoint: the statistics of each format, and the choices between formats."""

from __future__ import annotations

import math
from dataclasses import dataclass

from qshard._files.checkpoint import Entry
from qshard.formats import Usage
from qshard.numerics._statistics import Note, Stats


@dataclass(frozen=True)
class Row:
    """Statistics of one plane of a layer in one format.

    Attributes:
      stats: the statistics; for stochastic rounding, means over all draws.
      draws: SQNR of each draw for stochastic rounding, else empty.
      output: `output_noise` with the activations of the layer, the mean over draws; None without activations.
    """

    stats: Stats
    draws: tuple[float, ...] = ()
    output: float | None = None

    @property
    def harm(self) -> float | None:
        """Noise-to-signal ratio: of the output if there are activations, else `harm_of` the plane; None if unknown."""
        known = harm_of(self.stats)
        return known if known is None or self.output is None else self.output


@dataclass(frozen=True)
class Choice:
    """A way to store a layer.

    Attributes:
      name: name of the format, or the layer's own dtype.
      nbytes: bytes of codes and scales of all requested planes.
      harm: largest noise-to-signal ratio of the requested planes, which is the relative error variance of the product
        with white or recorded activations. None if unknown, because finite numbers became NaN or infinite.
    """

    name: str
    nbytes: int
    harm: float | None


@dataclass(frozen=True)
class Layer:
    """A tensor and its measurements, one row per format and plane, for the planes of `usage`.

    Attributes:
      left_out: name of a format that does not support the shape -> reason.
    """

    entry: Entry
    outliers: float
    rows: tuple[Row, ...]
    left_out: dict[str, str]
    remarks: tuple[str, ...]
    usage: Usage

    @property
    def choices(self) -> dict[str, Choice]:
        """Choices by name: the measured formats in the requested planes, and the layer's own dtype with zero harm."""
        by_format: dict[str, list[Row]] = {}
        for row in self.rows:
            if row.stats.usage in self.usage.planes:
                by_format.setdefault(str(row.stats.format), []).append(row)
        found = {self.entry.dtype: Choice(self.entry.dtype, self.entry.nbytes, 0.0)}
        for name, rows in by_format.items():
            harms = [row.harm for row in rows]
            known = [harm for harm in harms if harm is not None]
            nbytes = sum(round(row.stats.bits_per_element * self.entry.elements / 8) for row in rows)
            found[name] = Choice(name, nbytes, max(known) if len(known) == len(harms) else None)
        return found


def harm_of(stats: Stats) -> float | None:
    """Return the noise-to-signal ratio `10**(-sqnr_db / 10)`, or None if it is unknown."""
    if stats.nonfinite_made or Note.NOTHING_COUNTS in stats.notes:
        return None
    return 0.0 if math.isnan(stats.sqnr_db) else 10 ** (-stats.sqnr_db / 10)
