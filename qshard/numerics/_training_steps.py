"""Statistics of a training step, with a row per layer and role, and the log of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from qshard.formats import ElementFormat, Format
from qshard.numerics._display import Frame
from qshard.numerics._plots import bar_chart, line_chart
from qshard.numerics._statistics import decibels
from qshard.recipes import Role

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class StepSums(NamedTuple):
    """Sums over a tensor of a step, or over a part of it: 0-d arrays on the device of the tensor.

    The counts have the names of shares in `LayerStats`. `signal` is the sum of `(x / amax)**2`, `noise` the sum of
    `((value - x) / amax)**2`, over elements that are finite and stored as finite. `scale_low` and `scale_high` are the
    smallest and largest scale of nonzero elements; infinity and 0 if there are none.
    """

    amax: Any
    signal: Any
    noise: Any
    scale_low: Any
    scale_high: Any
    zeros_made: Any
    subnormal: Any
    saturated: Any
    nonfinite_given: Any
    nonfinite_made: Any


COUNTS = StepSums._fields[5:]


def step_sums(xp: Any, x: Any, value: Any, scale: Any, element: ElementFormat, count: Callable[[Any], Any]) -> StepSums:
    """Compute the sums over a nonempty tensor, in both front ends.

    Sums are in float32 over elements divided by the amax, so that squares of small gradients do not underflow.

    `xp` is `torch` or `jax.numpy`, and `count` counts the true elements of a mask. `x` is float32; `value` and `scale`,
    of the same shape, are its quantized values and the scale of each element.
    """
    size, given, made = xp.abs(x), xp.isfinite(x), xp.isfinite(value)
    counted, nonzero = given & made, x != 0
    amax = xp.amax(xp.where(given, size, 0.0))
    unit = xp.where(amax > 0, amax, 1.0)
    step = 2.0 ** (element.max_exponent - element.mantissa_bits)
    stored, least = xp.abs(value), 2.0 ** (1 - element.bias)
    scaled = nonzero & (scale > 0) & xp.isfinite(scale)
    return StepSums(
        amax=amax,
        signal=xp.sum(xp.square(xp.where(counted, x, 0.0) / unit)),
        noise=xp.sum(xp.square(xp.where(counted, value - x, 0.0) / unit)),
        scale_low=xp.amin(xp.where(scaled, scale, math.inf)),
        scale_high=xp.amax(xp.where(scaled, scale, 0.0)),
        zeros_made=count(nonzero & (value == 0)),
        subnormal=count((stored > 0) & (stored < least * scale)),
        saturated=count(made & (scale > 0) & (size > (element.max + step / 2) * scale)),
        nonfinite_given=count(~given),
        nonfinite_made=count(given & ~made),
    )


@dataclass
class Totals:
    """`StepSums` of several calls or parts, added up on the host. Sums of squares are in units of `x` itself."""

    amax: float = 0.0
    signal: float = 0.0
    noise: float = 0.0
    scale_low: float = math.inf
    scale_high: float = 0.0
    zeros_made: int = 0
    subnormal: int = 0
    saturated: int = 0
    nonfinite_given: int = 0
    nonfinite_made: int = 0
    elements: int = 0
    calls: int = 0

    def __iadd__(self, other: Totals) -> Totals:
        for name in (field.name for field in fields(self)):
            merge = {"amax": max, "scale_high": max, "scale_low": min}.get(name, lambda a, b: a + b)
            setattr(self, name, merge(getattr(self, name), getattr(other, name)))
        return self


@dataclass(frozen=True, kw_only=True)
class LayerStats:
    """Statistics of one tensor of one layer in one step, for the plane that the forward product or `dy @ w` reads.

    Shares refer to all elements of all calls and ranks. SQNR is over elements that are finite and stored as finite.

    Attributes:
      calls: number of calls of the layer on all ranks. For a weight, the number of ranks that have a part of it.
      amax: largest finite magnitude.
      sqnr_db: `10 * log10(sum(x**2) / sum((value - x)**2))`; infinity without noise, NaN without a signal.
      zeros_made: share of elements with `x != 0` stored as 0 (underflow).
      subnormal: share stored as a subnormal of the element format.
      saturated: share beyond the largest element by more than rounding explains.
      nonfinite_given: share that is infinite or NaN in `x`.
      nonfinite_made: share that is finite in `x` and stored as infinity or NaN.
      scale_low: smallest scale of nonzero elements; NaN if there are none.
      scale_high: largest scale of nonzero elements; NaN if there are none.
    """

    layer: str
    role: Role
    format: str
    calls: int
    elements: int
    amax: float
    sqnr_db: float
    zeros_made: float
    subnormal: float
    saturated: float
    nonfinite_given: float
    nonfinite_made: float
    scale_low: float
    scale_high: float


RECORD = tuple(field.name for field in fields(LayerStats))
TEXTS, NUMBERS = RECORD[:3], RECORD[3:]
NONFINITE = ("nan", "inf", "-inf")


def layer_stats(layer: str, role: Role, fmt: Format, total: Totals) -> LayerStats:
    """Compute the row of one tensor."""

    def share(count: int) -> float:
        return count / total.elements if total.elements else 0.0

    return LayerStats(
        layer=layer,
        role=role,
        format=str(fmt),
        calls=total.calls,
        elements=total.elements,
        amax=total.amax,
        sqnr_db=decibels(total.signal, total.noise),
        zeros_made=share(total.zeros_made),
        subnormal=share(total.subnormal),
        saturated=share(total.saturated),
        nonfinite_given=share(total.nonfinite_given),
        nonfinite_made=share(total.nonfinite_made),
        scale_low=total.scale_low if total.scale_high else math.nan,
        scale_high=total.scale_high or math.nan,
    )


@dataclass(frozen=True)
class StepStats(Frame):
    """The statistics of a step, one row per tensor.

    >>> from qshard.formats import FP8_E4M3
    >>> row = layer_stats("up", Role.WEIGHT, FP8_E4M3, Totals(amax=2.0, signal=4.0, noise=0.04, elements=8, calls=1))
    >>> step = StepStats((row,))
    >>> step.of("up", Role.WEIGHT).sqnr_db
    20.0
    """

    rows: tuple[LayerStats, ...]

    def of(self, layer: str, role: Role) -> LayerStats:
        """Return the row of one tensor.

        Raises:
          KeyError: `rows` does not have it.
        """
        for row in self.rows:
            if (row.layer, row.role) == (layer, role):
                return row
        raise KeyError(f"no {role.value} of {layer!r} among {len(self.rows)} rows")

    def records(self) -> list[dict[str, Any]]:
        """Return one row per tensor, with the role as a string."""
        return [{**vars(row), "role": row.role.value} for row in self.rows]

    def plot(self) -> Figure:
        """Plot the SQNR, and the shares that became 0 and that saturated, for each tensor.

        Raises:
          ImportError: matplotlib is not installed.
        """
        names = [f"{row.layer}, {row.role.value}" for row in self.rows]
        parts = {
            "SQNR in dB": [row.sqnr_db for row in self.rows],
            "made 0, %": [100 * row.zeros_made for row in self.rows],
            "saturated, %": [100 * row.saturated for row in self.rows],
        }
        return bar_chart(names, parts)


@dataclass(frozen=True)
class Log(Frame):
    """A log that `read_log` has parsed, with a record per step and tensor as `write_log` wrote it."""

    given: tuple[Mapping[str, Any], ...]

    def records(self) -> list[dict[str, Any]]:
        """Return a copy of the records."""
        return [dict(record) for record in self.given]

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers, in order of appearance."""
        return tuple(dict.fromkeys(record["layer"] for record in self.given))

    def series(self, name: str, layer: str, role: Role | str, **where: Any) -> dict[int, float]:
        """Return one statistic of one tensor as a mapping from step to value.

        Args:
          name: name of the statistic, such as "amax".
          layer: name of the layer.
          role: role of the tensor.
          **where: values that other fields must have, such as `run="fp8"` to select a run.

        Returns:
          One value for each step. If a resumed run has logged a step again, the last one.

        Raises:
          KeyError: no record matches, or the records do not have that statistic.
          ValueError: several runs match: two records of a step differ in a field of text.
        """
        wanted = {"layer": layer, "role": Role(role).value, **where}
        found = [record for record in self.given if all(record.get(key) == value for key, value in wanted.items())]
        if not found or name not in found[0]:
            raise KeyError(f"no {name!r} of {wanted} among {len(self.given)} records")
        steps: dict[int, Mapping[str, Any]] = {}
        for record in found:
            before = steps.setdefault(record["step"], record)
            for key in before.keys() & record.keys():
                if isinstance(record[key], str) and before[key] != record[key]:
                    raise ValueError(
                        f"series: step {record['step']} has records of {key}={before[key]!r} and {record[key]!r}; pass "
                        f"{key}= to select one"
                    )
            steps[record["step"]] = record
        return {step: record[name] for step, record in steps.items()}

    def plot(self, name: str = "amax", role: Role | str = Role.GRADIENT, **where: Any) -> Figure:
        """Plot one statistic of one role over steps, with a line per layer.

        Args:
          name: name of the statistic.
          role: role of the tensors.
          **where: as in `series`.

        Raises:
          ImportError: matplotlib is not installed.
          KeyError, ValueError: as in `series`.
        """
        lines = {layer: self.series(name, layer, role, **where) for layer in self.layers}
        return line_chart(lines, f"{name}, {Role(role).value}", "step")


def write_log(file: IO[str], step: int, seen: StepStats, **more: Any) -> None:
    """Append the statistics of a step to a log: a line of JSON per row.

    Args:
      file: file opened for writing text.
      step: number of the step.
      seen: statistics from `numerics_of` of a front end.
      **more: additional fields of each line, such as `loss=` and `run=`.

    Raises:
      TypeError: an additional field has the name of a statistic.

    JSON has no non-finite numbers, so they are written as the strings "nan", "inf" and "-inf". `read_log` reads these
    strings as numbers, except as names of layers.

    >>> import io
    >>> from qshard.formats import FP8_E4M3
    >>> total = Totals(amax=2.0, signal=4.0, elements=8, calls=1)
    >>> file = io.StringIO()
    >>> write_log(file, 7, StepStats((layer_stats("up", Role.WEIGHT, FP8_E4M3, total),)), loss=0.5)
    >>> file.getvalue()[:60]
    '{"step": 7, "loss": 0.5, "layer": "up", "role": "weight", "f'
    """
    if taken := more.keys() & RECORD:
        raise TypeError(f"write_log: {min(taken)} is a field of each record already; give it another name")
    for record in seen.records():
        values = {"step": step, **more, **record}
        file.write(json.dumps({name: _plain(value) for name, value in values.items()}, allow_nan=False) + "\n")
    file.flush()


def read_log(path: str | Path | Iterable[str]) -> Log:
    """Read a log that `write_log`, or `--log-numerics` of an example, has written.

    Args:
      path: path of the file, or its lines. The last line may be truncated, as a stopped run leaves it.

    Raises:
      ValueError: a line is not a record of a log.

    >>> line = '{"step": 0, "loss": 0.5, "layer": "up", "role": "weight", "amax": 2.0, "sqnr_db": "inf"}'
    >>> read_log([line]).series("sqnr_db", "up", "weight")
    {0: inf}
    """
    lines: Sequence[str] = Path(path).read_text().splitlines(keepends=True) if isinstance(path, str | Path) else [*path]
    found = []
    for i, line in enumerate(lines):
        try:
            record = json.loads(line)
            if not isinstance(record, dict) or not {"step", "layer", "role"} <= record.keys():
                raise ValueError("it lacks step, layer or role")
        except ValueError as error:
            if i == len(lines) - 1 and not line.endswith("\n"):
                break
            raise ValueError(
                f"read_log: line {i + 1} ({line[:40]!r}) is not a record: {error}; pass a file written with "
                "--log-numerics"
            ) from None
        found.append({name: _parse_field(name, value) for name, value in record.items()})
    return Log(tuple(found))


def _parse_field(name: str, value: Any) -> Any:
    is_number = name in NUMBERS or (name not in TEXTS and isinstance(value, str) and value in NONFINITE)
    return float(value) if is_number else value


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
