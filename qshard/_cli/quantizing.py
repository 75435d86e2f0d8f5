"""What `qshard convert` does: a plan of the file, then tensor by tensor, then reading it back."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qshard._cli.bar import bar
from qshard._cli.checkpoint import Entry
from qshard._cli.errors import Failure, Misuse, shown
from qshard._cli.output import replacing
from qshard._cli.selection import KEPT, LEAST_AXES, Selection, select
from qshard._cli.sources import Checkpoint, matching
from qshard._cli.writer import Writer
from qshard._core import quantize_steps
from qshard._core.serialization import KEY, Description, described, flat, joined, text_of
from qshard.formats import Format, Usage
from qshard.layout import Shape, matrix_shape, plane
from qshard.numerics import _kernels as kernels
from qshard.numerics._measures import as_float
from qshard.numerics._tables import unplaced

WORDS = {"uint8": "U8", "float32": "F32"}
"""Dtypes of codes and scales, as safetensors writes them."""
OP = "qshard convert"


@dataclass
class Conversion:
    """What was written.

    Attributes:
      quantized: by name.
      kept: name -> why it is as it was.
      nbytes: before and after, of all tensors.
      remarks: what else there is to know.
    """

    quantized: dict[str, Description]
    kept: dict[str, str]
    nbytes: tuple[int, int]
    remarks: list[str] = field(default_factory=list)


def quantize_to(
    out: Path, checkpoint: Checkpoint, fmt: Format, usage: Usage, keep: Sequence[str], seed: int
) -> Conversion:
    """Converts a checkpoint.

    Raises:
      Misuse: nothing is left to quantize, or a tensor holds codes and is not named by `keep`.
      Failure: what was read back is not what was written.
    """
    entries = checkpoint.entries
    named = matching(entries, keep, "--keep") if keep else set()
    selection = select(checkpoint, entries, keep=named, advice="name with --keep what is to stay as it is")
    weights, unfit = _fitting(selection, fmt, usage)
    kept = selection.left_out | unfit
    if not weights:
        raise Misuse(f"{shown(checkpoint.path)} has nothing to quantize: {_nothing(kept, unfit)}")
    tensors = _tensors(entries, weights)
    metadata = checkpoint.metadata | {KEY: text_of(weights)}
    remarks = [*checkpoint.notes, *selection.notes, *selection.remarks.values()]
    done = Conversion(weights, kept, (0, 0), remarks)
    with replacing(out) as file, bar(sum(entry.nbytes for entry in entries.values())) as update:
        writer, read = Writer(file, tensors, metadata), 0
        for i, (name, entry) in enumerate(entries.items()):
            update(f"{i + 1} of {len(entries)}: {shown(name)}", read)
            if name in weights:
                for part, array in quantized(entry, weights[name], seed, done.remarks).items():
                    writer.write(joined(name, part), [array.reshape(-1).view(np.uint8).data])
            else:
                writer.write(name, entry.bytes())
            read += entry.nbytes
        update("reading it back", read)
        if described(writer.check(Path(file.name)).metadata[KEY], op=OP) != weights:
            raise Failure(f"{shown(out)} was read back as something else; this is a bug of qshard")
    before = sum(entry.nbytes for entry in entries.values())
    done.nbytes = before, sum(slot.nbytes for slot in writer.slots.values())
    return done


def quantized(entry: Entry, what: Description, seed: int, remarks: list[str]) -> dict[str, NDArray[Any]]:
    """The arrays of a weight, by their names without its own."""
    fmt, x = what.format, as_float(entry.read(), OP)
    matrix = np.ascontiguousarray(x.array).reshape(matrix_shape(entry.shape))
    draws = kernels.draws(OP, seed_of(entry.name, seed)) if fmt.stochastic else None
    usage = Usage.BOTH if len(what.planes) > 1 else what.planes[0]
    planes = quantize_steps.quantize(kernels.ops, matrix, fmt, usage, draws=draws)
    if not np.isfinite(kernels.ops.amax_tensor(matrix)):
        remarks.append(f"{shown(entry.name)} has infinities or NaN, stored as nonfinite={fmt.nonfinite} of {fmt} says")
    if x.beyond:
        remarks.append(f"{shown(entry.name)} has {x.beyond} elements beyond float32, which became 0 or infinite first")
    shapes = {part: shape for part, (_, shape) in what.arrays().items()}
    return {part: array.reshape(shapes[part]) for part, array in flat(planes).items()}


def seed_of(name: str, seed: int) -> int:
    """The seed of a tensor: another one for each name, so that no two round alike."""
    own = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return (seed + int.from_bytes(own, "little")) % 2**64


def _fitting(selection: Selection, fmt: Format, usage: Usage) -> tuple[dict[str, Description], dict[str, str]]:
    """Descriptions of the layers that fit a format, and why the others do not."""
    weights, unfit = {}, {}
    for entry in selection.layers:
        try:
            for each in usage.planes:
                plane(fmt, entry.shape, each, op=str(fmt), name="shape")
        except ValueError as error:
            (unfit[entry.name],) = unplaced({str(fmt): str(error)})
            continue
        weights[entry.name] = Description(format=fmt, shape=entry.shape, dtype=entry.given_as, planes=usage.planes)
    return weights, unfit


def _nothing(kept: dict[str, str], unfit: dict[str, str]) -> str:
    """Says why nothing is left to quantize: the reason that is easiest to change, with a tensor and a remedy."""
    by_name = {name: why for name, why in kept.items() if why == KEPT}
    for names, advice in (
        (unfit, "choose another format"),
        (by_name, "keep fewer"),
        (kept, f"take a checkpoint with tensors of real numbers and {LEAST_AXES} axes or more"),
    ):
        for name, why in names.items():
            return f"{shown(name)}: {why}; {advice}"
    return "it has no tensors; take a checkpoint that has some"


def _tensors(entries: dict[str, Entry], weights: dict[str, Description]) -> dict[str, tuple[str, Shape]]:
    """Dtype and shape of all that is written, by name."""
    found: dict[str, tuple[str, Shape]] = {}
    for name, entry in entries.items():
        made = {name: (entry.dtype, entry.shape)}
        if name in weights:
            arrays = weights[name].arrays(op=OP, name=name)
            made = {joined(name, part): (WORDS[dtype], shape) for part, (dtype, shape) in arrays.items()}
        if twice := sorted(made.keys() & found.keys()):
            raise Misuse(
                f"{shown(twice[0])} would be there twice, as the codes of {shown(name)} have that name; --keep it"
            )
        found |= made
    return found
