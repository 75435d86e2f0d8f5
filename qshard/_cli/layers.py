"""Measurement of formats on the layers of a checkpoint, one tensor in memory at a time, and on activations."""

from __future__ import annotations

import dataclasses
import io
import math
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from qshard._cli.errors import Misuse
from qshard._files.checkpoint import Entry
from qshard._files.engine_configs import END
from qshard._files.names import quote
from qshard._plans.fit import fold_kernel, refusal
from qshard._plans.layer import Layer, Row
from qshard.formats import Format, Usage
from qshard.layout import Shape, plane
from qshard.numerics._display import progress_bar
from qshard.numerics._gemm_error import output_noise
from qshard.numerics._reductions import Floats, as_float
from qshard.numerics._statistics import Stats, outlier_share, stats_of

OP = "qshard report"

SUFFIX = ".npy"
KINDS = "fiu"
HEADER = 2**16  # bytes to read for the header of an array
PACKED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # compression methods of `numpy.savez` and `numpy.savez_compressed`
BROKEN = (zipfile.BadZipFile, zlib.error, ValueError, EOFError, RuntimeError)
"""Exceptions that zipfile and NumPy raise for files that are truncated or not theirs."""


@dataclass(frozen=True)
class Activations:
    """Recorded inputs of layers in a file of `numpy.savez`, read one at a time. `names` maps a layer to its array."""

    path: Path
    names: dict[str, str]

    def of(self, name: str) -> NDArray[Any] | None:
        """Read the activations of a layer, `[..., K]`, or raise `Misuse`; None if the file has none."""
        if name not in self.names:
            return None
        try:
            with np.load(self.path, allow_pickle=False) as file:
                return cast(NDArray[Any], file[self.names[name]])
        except BROKEN as error:
            raise _not_whole(self.path, f"{self.names[name]}: {error}") from None


def open_activations(path: Path, entries: Iterable[Entry]) -> tuple[Activations, list[str]]:
    """Find the activations of layers. An array has the name of its layer, with or without `.weight`.

    Also return a note about arrays that belong to no layer, if there are any.

    Raises Misuse if the file is not from `numpy.savez`, an array does not fit its layer, or no array has the name of a
    layer.
    """
    there = _headers(path)
    names: dict[str, str] = {}
    for entry in entries:
        name = next((name for name in (entry.name, entry.name.removesuffix(END)) if name in there), None)
        if name is None:
            continue
        shape, dtype = there[name]
        if dtype.kind not in KINDS or dtype.fields is not None:
            raise Misuse(f"{quote(path)}: {quote(name)} ({dtype}) does not have real numbers; save it as float32")
        last = fold_kernel(entry.shape)[-1:]
        if shape[-1:] != last:
            what = f"{quote(name)} {shape} does not end in the {last} of {quote(entry.name)} {entry.shape}"
            raise Misuse(f"{quote(path)}: {what}; save the inputs of the layer")
        names[entry.name] = name
    rest = sorted(there.keys() - set(names.values()))
    if not names:
        raise Misuse(
            f"{quote(path)} has {len(there)} arrays, none with the name of a layer; use the names of the layers"
        )
    return Activations(path, names), [f"activations match no layer: {', '.join(map(quote, rest))}"] if rest else []


def _headers(path: Path) -> dict[str, tuple[Shape, np.dtype[Any]]]:
    """Read the shape and dtype of each array, without its data."""
    found = {}
    try:
        with zipfile.ZipFile(path) as file:
            for member in file.infolist():
                if member.compress_type not in PACKED:
                    raise ValueError(f"{member.filename} uses an unsupported compression")
                with file.open(member) as whole:
                    part = io.BytesIO(whole.read(HEADER))
                version = npy.read_magic(part)
                read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
                shape, _, dtype = read(part)
                found[member.filename.removesuffix(SUFFIX)] = tuple(shape), dtype
    except BROKEN as error:
        raise _not_whole(path, error) from None
    return found


def _not_whole(path: Path, why: object) -> Misuse:
    return Misuse(f"{quote(path)} is not a numpy.savez file: {quote(why)}; save it again")


@dataclass(frozen=True, kw_only=True)
class Question:
    """The measurements to make on each layer.

    Attributes:
      formats: formats, including requested variants.
      usage: requested planes. For formats with equal planes only one is measured; for rotated formats always the
        columnwise plane, because the other is not rotated.
      draws: number of measurements of a stochastic format.
      seed: seed of the first draw; later draws count up.
      activations: inputs of the layers, if known.
    """

    formats: tuple[Format, ...]
    usage: Usage
    draws: int
    seed: int
    activations: Activations | None = None

    def planes(self, shape: Shape) -> tuple[list[tuple[Format, Usage]], dict[str, str]]:
        """Return the format and usage pairs to measure for a shape, and name -> reason for the other formats."""
        found, left_out = [], {}
        for fmt in self.formats:
            usages = self.usage.planes[:1] if fmt.shares_codes else self.usage.planes
            if fmt.rotates(Usage.BOTH) and self.usage is Usage.ROWWISE:
                usages = (Usage.COLUMNWISE,)
            whys = [why for why in (refusal(fmt, shape, usage) for usage in usages) if why is not None]
            if whys:
                left_out[str(fmt)] = whys[0]
                continue
            found += [(fmt, usage) for usage in usages]
        return found, left_out

    def least_bytes(self, entry: Entry) -> float:
        """Return the bytes of the smallest way to store a layer, computed from its shape."""
        sizes: dict[str, float] = {entry.dtype: float(entry.nbytes)}
        for fmt, usage in self.planes(fold_kernel(entry.shape))[0]:
            if usage not in self.usage.planes:
                continue
            sizes[str(fmt)] = sizes.get(str(fmt), 0.0) + plane(fmt, fold_kernel(entry.shape), usage).nbytes
        return min(sizes.values())


def measure(entries: list[Entry], question: Question, remarks: Mapping[str, str]) -> list[Layer]:
    """Measure every layer. `remarks` maps the name of a layer to a remark about it."""
    draws = question.draws
    total = sum(entry.elements * (draws if fmt.stochastic else 1) for entry in entries for fmt in question.formats)
    found, done = [], 0
    with progress_bar(total) as update:
        for i, entry in enumerate(entries):
            what = f"{i + 1} of {len(entries)}: {quote(entry.name)}"
            end = done + sum(entry.elements * (draws if fmt.stochastic else 1) for fmt in question.formats)
            update(what, done)

            def advance(elements: int, what: str = what, end: int = end) -> None:
                nonlocal done
                done = min(done + elements, end)
                update(what, done)

            known = [remarks[entry.name]] if entry.name in remarks else []
            found.append(_layer(entry, question, known, advance))
            done = end  # also counts formats that were skipped
    return found


def _layer(entry: Entry, question: Question, known: list[str], advance: Any) -> Layer:
    shape = fold_kernel(entry.shape)
    x = as_float(entry.read().reshape(shape), OP)
    planes, left_out = question.planes(shape)
    given = question.activations.of(entry.name) if question.activations else None
    rows = tuple(_row(x, fmt, usage, question, given, advance) for fmt, usage in planes)
    remarks = list(known)
    if shape != entry.shape:
        remarks.append(f"a convolution, measured as {' x '.join(map(str, shape))}")
    if question.activations is not None and given is None:
        remarks.append("no activations, so its harm is that for white noise")
    if any(row.output is not None and math.isnan(row.output) for row in rows):
        rows = tuple(dataclasses.replace(row, output=None) for row in rows)
        remarks.append("its activations have no signal or are not finite, so its harm is that for white noise")
    return Layer(entry, outlier_share(x.array), rows, left_out, tuple(remarks), question.usage)


def _row(x: Floats, fmt: Format, usage: Usage, question: Question, given: Any, advance: Any) -> Row:
    seeds = range(question.seed, question.seed + (question.draws if fmt.stochastic else 1))
    drawn = [stats_of(x, fmt, usage, seed, OP, advance) for seed in seeds]
    output = None
    if given is not None and (fmt.shares_codes or usage is Usage.ROWWISE):  # other planes are for gradients
        output = float(np.mean([output_noise(given, x.array, fmt, seed=seed) for seed in seeds]))
    if not fmt.stochastic:
        return Row(drawn[0], output=output)
    return Row(_mean(drawn), tuple(stats.sqnr_db for stats in drawn), output)


def _mean(drawn: list[Stats]) -> Stats:
    """Average the statistics of draws. The worst block and the histograms are from the first draw."""
    first = drawn[0]
    means: dict[str, Any] = {}
    for field in dataclasses.fields(Stats):
        values = [getattr(stats, field.name) for stats in drawn]
        if field.name != "worst_block_db" and all(isinstance(value, float) for value in values):
            means[field.name] = float(np.mean(values)) if math.inf not in values else values[0]
    return dataclasses.replace(first, **means)
