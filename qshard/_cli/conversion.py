"""The conversion of `qshard convert`: plan the output file, quantize one tensor at a time, read the file back.

All sizes are known before the data. The file has the safetensors layout: eight bytes with the length of the header, the
JSON header padded to eight bytes, and the data without gaps. Tensors with wide elements come first, so that every
tensor is aligned to its elements.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from qshard._cli.errors import Failure, Misuse
from qshard._cli.options import matching
from qshard._cli.plan import NOT_PLANNED, Plan
from qshard._cli.quantized_entry import QuantizedEntry
from qshard._cli.selection import KEPT, LEAST_AXES, Selection, select
from qshard._core import quantize_steps
from qshard._core.serialization import KEY, Description, flat, key_of, parse_metadata, text_of
from qshard._files.checkpoint import BITS, LENGTH, LONGEST_HEADER, METADATA, Checkpoint, Entry, read_header
from qshard._files.engine_formats import STORED
from qshard._files.names import quote
from qshard._plans.fit import fold_kernel, refusal
from qshard.formats import Format, Usage
from qshard.layout import Shape, matrix_shape
from qshard.numerics import _kernels as kernels
from qshard.numerics._display import progress_bar
from qshard.numerics._reductions import as_float

OP = "qshard convert"
UNQUANTIZED = (
    "an embedding, router or output layer, which engines read as values; --format with its full name quantizes it"
)
_VALUES = ("lm_head", "wte", "wpe", "gate", "router", "shared_expert_gate")
"""Modules, other than embeddings, that engines do not quantize, by their names in Hugging Face checkpoints."""


@dataclass
class Conversion:
    """Result of a conversion, with remarks for the user.

    Attributes:
      quantized: description of each quantized tensor, by name.
      kept: name of each copied tensor -> reason.
      nbytes: bytes of all tensors before and after.
      requantized: weights that had codes of other formats, and were quantized again from their values.
    """

    quantized: dict[str, Description]
    kept: dict[str, str]
    nbytes: tuple[int, int]
    remarks: list[str] = field(default_factory=list)
    requantized: list[str] = field(default_factory=list)


def plan_conversion(
    checkpoint: Checkpoint, plan: Plan, usage: Usage, keep: Sequence[str], *, for_engine: bool = False
) -> Conversion:
    """Choose the weights to quantize. `keep` has patterns of tensors to copy unchanged.

    Weights that are quantized already and have no format in `plan` keep their codes. `for_engine` leaves out the
    shapes that serving engines do not store.

    Raises Misuse if nothing is left to quantize, a tensor has codes and does not match `keep`, or `plan` names a tensor
    that its format does not fit.
    """
    entries = checkpoint.entries
    selection = select(checkpoint, entries, keep=_names_to_keep(entries, keep), advice="exclude it with --keep")
    weights, unfit = _fitting(selection, plan, plan.formats(entries), usage, for_engine)
    kept = selection.left_out | unfit
    if not weights:
        raise Misuse(f"{quote(checkpoint.path)} has nothing to quantize: {_explain_nothing(kept, unfit)}")
    remarks = [*checkpoint.notes, *selection.notes, *selection.remarks.values()]
    remarks += [
        f"{quote(name)}: a convolution, stored as {' x '.join(map(str, what.shape))}"
        for name, what in weights.items()
        if what.shape != entries[name].shape
    ]
    return Conversion(weights, kept, (0, 0), remarks)


def _names_to_keep(entries: Mapping[str, Entry], keep: Sequence[str]) -> set[str]:
    """Return the names of entries that a pattern of `keep` matches, by their own name or the name of their codes.

    A pattern that matches only scales has no effect: their codes would be misread.
    """
    if not keep:
        return set()
    owners = {each.name: name for name, entry in entries.items() for each in entry.tensors}
    of_codes = {*entries, *(entry.tensors[0].name for entry in entries.values())}
    return {owners.get(name, name) for name in matching({*entries, *owners}, keep, "--keep") if name in of_codes}


def write_file(out: Path, checkpoint: Checkpoint, done: Conversion, seed: int) -> None:
    """Write the file `out` in the form of `to_plain`, and complete `done`.

    Raises `Failure` if the file that was read back differs from the data that was written.
    """
    entries, weights = checkpoint.entries, done.quantized
    tensors = _tensors(entries, weights)
    metadata = checkpoint.metadata | {KEY: text_of(weights)}
    with replacing(out) as file, progress_bar(sum(entry.nbytes for entry in entries.values())) as update:
        writer, read = Writer(file, Path(file.name), tensors, metadata), 0
        for i, (name, entry) in enumerate(entries.items()):
            update(f"{i + 1} of {len(entries)}: {quote(name)}", read)
            if name in weights:
                for part, array in arrays_of(entry, weights[name], seed, done).items():
                    writer.write(key_of(name, part), [array.reshape(-1).view(np.uint8).data])
            else:
                for each in entry.tensors:
                    writer.write(each.name, each.bytes())
            read += entry.nbytes
        update("reading it back", read)
        if parse_metadata(writer.check().metadata[KEY], op=OP) != weights:
            raise Failure(f"{quote(out)} was read back with other metadata; this is a bug in qshard, please report it")
    before = sum(entry.nbytes for entry in entries.values())
    done.nbytes = before, sum(each.nbytes for each in writer.entries.values())


def arrays_of(
    entry: Entry, what: Description, seed: int, done: Conversion, amax: NDArray[Any] | None = None
) -> dict[str, NDArray[Any]]:
    """Return the arrays of a weight: its codes if it has codes of this format, else quantized from its values.

    `amax` is the amax of a tensor that contains the weight, for the global scale.
    """
    if isinstance(entry, QuantizedEntry):
        planes = entry.planes_as(what.format, what.planes)
        if planes is not None:
            return _in_shapes(planes, what)
        done.requantized.append(entry.name)
    return quantize_entry(entry, what, seed, done.remarks, amax)


def amax_of(entry: Entry) -> NDArray[Any]:
    """Return the amax of a weight, as it is quantized."""
    amax: NDArray[Any] = kernels.ops.amax_tensor(np.ascontiguousarray(as_float(entry.read(), OP).array))
    return amax


def quantize_entry(
    entry: Entry, what: Description, seed: int, remarks: list[str], amax: NDArray[Any] | None = None
) -> dict[str, NDArray[Any]]:
    """Quantize a weight and return its arrays, by their names without the name of the weight."""
    fmt, x = what.format, as_float(entry.read(), OP)
    matrix = np.ascontiguousarray(x.array).reshape(matrix_shape(what.shape))
    philox = kernels.philox(OP, seed_of(entry.name, seed)) if fmt.stochastic else None
    usage = Usage.BOTH if len(what.planes) > 1 else what.planes[0]
    planes = quantize_steps.quantize(kernels.ops, matrix, fmt, usage, philox=philox, amax=amax)
    if not np.isfinite(kernels.ops.amax_tensor(matrix)):
        remarks.append(
            f"{quote(entry.name)} has infinities or NaN, stored by the rule nonfinite={fmt.nonfinite} of {fmt}"
        )
    if x.beyond:
        remarks.append(
            f"{quote(entry.name)} has {x.beyond} elements outside the range of float32, which became 0 or infinite "
            "first"
        )
    return _in_shapes(planes, what)


def _in_shapes(planes: Mapping[Usage, quantize_steps.Plane], what: Description) -> dict[str, NDArray[Any]]:
    shapes = {part: shape for part, (_, shape) in what.arrays().items()}
    return {part: array.reshape(shapes[part]) for part, array in flat(planes).items()}


def seed_of(name: str, seed: int) -> int:
    """Derive a seed from the name of a tensor, so that different tensors round independently."""
    own = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return (seed + int.from_bytes(own, "little")) % 2**64


def _fitting(
    selection: Selection, plan: Plan, formats: Mapping[str, Format], usage: Usage, for_engine: bool
) -> tuple[dict[str, Description], dict[str, str]]:
    """Return descriptions of the layers that their formats fit, and name -> reason for the others.

    Raises Misuse if `plan` names a tensor in full, and it is not a layer or its format does not fit.
    """
    weights: dict[str, Description] = {}
    unfit: dict[str, str] = {}
    for entry in selection.layers:
        fmt, shape, own = formats.get(entry.name), fold_kernel(entry.shape), None
        if fmt is None and isinstance(entry, QuantizedEntry):
            weights[entry.name] = entry.weight.description
            continue
        if fmt is None:
            unfit[entry.name] = NOT_PLANNED
            continue
        why = refusal(fmt, shape, usage)
        if for_engine and shape != entry.shape:
            why = "a convolution, which engines do not store quantized"
        elif for_engine and _is_unquantized(entry) and not (plan.origin == "--format" and entry.name in plan.rules):
            unfit[entry.name] = UNQUANTIZED
            continue
        if why is not None:
            unfit[entry.name] = f"{fmt}: {why}"
            continue
        if isinstance(entry, QuantizedEntry):
            own = entry.format_as(fmt, usage.planes)
        weights[entry.name] = Description(format=own or fmt, shape=shape, dtype=entry.kernel_dtype, planes=usage.planes)
    reasons = selection.left_out | unfit
    for name, fmt in plan.rules.items():
        if (why := reasons.get(name)) is not None and why not in (KEPT, UNQUANTIZED):
            raise Misuse(f"{plan.origin} {quote(name)}={fmt}: {why}; choose another format, or leave it out")
    return weights, unfit


def _is_unquantized(entry: Entry) -> bool:
    """Return whether engines expect values of a weight, by its name in Hugging Face checkpoints."""
    module = entry.name.removesuffix(".weight").rpartition(".")[2]
    return not isinstance(entry, QuantizedEntry) and ("embed" in module or module in _VALUES)


def _explain_nothing(kept: dict[str, str], unfit: dict[str, str]) -> str:
    by_name = {name: why for name, why in kept.items() if why == KEPT}
    # The reason that is easiest to change comes first.
    for names, advice in (
        ({name: why for name, why in unfit.items() if why != NOT_PLANNED}, "choose another format"),
        (
            {name: why for name, why in unfit.items() if why == NOT_PLANNED},
            "give one by --format, such as --format NVFP4, or by --plan",
        ),
        (by_name, "keep fewer"),
        (kept, f"use a checkpoint that has tensors of real numbers with {LEAST_AXES} or more axes"),
    ):
        for name, why in names.items():
            return f"{quote(name)}: {why}; {advice}"
    return "it has no tensors; use a checkpoint that has some"


def _tensors(entries: dict[str, Entry], weights: dict[str, Description]) -> dict[str, tuple[str, Shape]]:
    """Return the dtype and shape of every tensor of the output, by name."""
    found: dict[str, tuple[str, Shape]] = {}
    for name, entry in entries.items():
        made = {each.name: (each.dtype, each.shape) for each in entry.tensors}
        if name in weights:
            arrays = weights[name].arrays(op=OP, name=name)
            made = {key_of(name, part): (STORED[dtype], shape) for part, (dtype, shape) in arrays.items()}
        if twice := sorted(made.keys() & found.keys()):
            raise Misuse(f"{quote(twice[0])} is also the name of the codes of {quote(name)}; add --keep {quote(name)}")
        found |= made
    return found


class Writer:
    """Writer of a safetensors file. Tensors may be written in any order.

    Attributes:
      digests: hash of each tensor written so far.
      entries: each tensor by name.
    """

    def __init__(
        self, file: BinaryIO, path: Path, tensors: Mapping[str, tuple[str, Shape]], metadata: Mapping[str, str]
    ) -> None:
        """Write the header of `file`, open for reading and writing at `path`.

        `tensors` has safetensors dtypes and shapes.

        Raises `Failure` if the header is longer than safetensors reads.
        """
        self.file, self.path, self.metadata = file, path, dict(metadata)
        self.digests: dict[str, bytes] = {}
        header: dict[str, object] = {METADATA: self.metadata} if metadata else {}
        at, entries = 0, []
        for name in sorted(tensors, key=lambda name: (-BITS[tensors[name][0]], name)):
            entry = Entry(name, *tensors[name], path, at)
            end = at + entry.nbytes
            header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [at, end]}
            entries.append(entry)
            at = end
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % LENGTH)
        if len(text) > LONGEST_HEADER:
            raise Failure(
                f"the header would have {len(text)} bytes, more than safetensors reads; convert fewer tensors"
            )
        file.write(len(text).to_bytes(LENGTH, "little") + text)
        first = LENGTH + len(text)
        self.entries = {each.name: replace(each, offset=first + each.offset) for each in entries}
        file.truncate(first + at)

    def write(self, name: str, parts: Iterable[bytes | memoryview[int]]) -> None:
        """Write the bytes of a tensor, or raise `Failure` if their number is wrong."""
        entry, digest = self.entries[name], hashlib.blake2b()
        self.file.seek(entry.offset)
        written = 0
        for part in parts:
            self.file.write(part)
            digest.update(part)
            written += len(part)
        if written != entry.nbytes:
            raise Failure(
                f"{quote(name)} has {written} bytes instead of {entry.nbytes}; this is a bug in qshard, please report "
                "it"
            )
        self.digests[name] = digest.digest()

    def check(self) -> Checkpoint:
        """Read the file back, from the disk if the system allows, and return its contents.

        Raises `Failure` if it has other tensors or other bytes than were written.
        """
        self.file.flush()
        os.fsync(self.file.fileno())
        os.posix_fadvise(self.file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        found = read_header(self.path)
        if found.metadata != self.metadata or not found.entries.keys() == self.entries.keys() == self.digests.keys():
            raise Failure(f"{quote(self.path)} does not contain what was written to it; check the disk")
        for name, entry in found.entries.items():
            digest = hashlib.blake2b()
            for part in entry.bytes():
                digest.update(part)
            if entry != self.entries[name] or digest.digest() != self.digests[name]:
                raise Failure(f"{quote(name)} was read back with other bytes than were written; check the disk")
        return found


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file for reading and writing that replaces `path` on success and is deleted on failure.

    Raises Misuse if `path` is a folder, or its folder does not exist or is not writable.
    """
    if path.is_dir():
        raise Misuse(f"{quote(path)} is a folder; name a file in it")
    _check_folder(path.parent)  # before `resolve`, which takes "missing/../name" for "name"
    path = path.resolve()  # writes to the target of a link
    handle, temporary = make_beside(path, tempfile.mkstemp)
    os.close(handle)
    try:
        with open(temporary, "w+b") as file:
            yield file
            file.flush()
            os.fchmod(file.fileno(), path.stat().st_mode & 0o7777 if path.exists() else permissions_of(0o666))
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def make_beside(path: Path, make: Callable[..., Any]) -> Any:
    """Make a temporary file or folder beside `path` by a function of tempfile, or raise `Misuse`."""
    _check_folder(path.parent)
    try:
        return make(prefix=".qshard.", suffix=".part", dir=path.parent)
    except OSError as error:
        raise Misuse(f"{quote(path.parent)} cannot be written to: {error.strerror}; write to another folder") from None


def permissions_of(mode: int) -> int:
    """Return the permissions of `mode` that new files get."""
    mask = os.umask(0)
    os.umask(mask)
    return mode & ~mask


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise Misuse(f"{quote(folder)} is not a folder; create it first")
