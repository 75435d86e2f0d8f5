"""Reading of safetensors checkpoints by front ends: whole tensors, parts of them, and quantized weights of any origin.

Files are mapped, so a part of a tensor costs the memory of that part.
"""

from __future__ import annotations

import dataclasses
import math
from os import PathLike
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from qshard._core.placement import Index
from qshard._core.quantize_steps import Plane
from qshard._core.serialization import KEY, Description, key_of, parse_metadata
from qshard._files.checkpoint import FLOATS, CheckpointError, open_checkpoint
from qshard._files.names import quote
from qshard._files.regrid import regrid
from qshard._files.unknown_codes import find_unscaled
from qshard.formats import ELEMENTS, Format, Usage
from qshard.layout import matrix_shape, plane

INTEGERS = {"I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_}
DTYPES: dict[str, Any] = {name: each for name, each in FLOATS.items() if "FNUZ" not in name} | INTEGERS
DTYPES |= {"F8_E8M0": np.uint8}  # read as bytes


class CheckpointReader:
    """Reader of a checkpoint.

    Attributes:
      weights: description of each quantized weight, of qshard or of a serving engine, by name.
      arrays: dtype and shape of each other tensor, by name.
    """

    def __init__(self, path: str | PathLike[str], op: str) -> None:
        """Open the checkpoint at `path`. `op` is the name of the caller in errors.

        Raises:
          FileNotFoundError: `path`, or a file that the index names, does not exist.
          ValueError: `path` is not a checkpoint, or has quantized weights of an unknown kind.
        """
        self.op = op
        try:
            found = open_checkpoint(Path(path))
        except CheckpointError as error:
            raise type(error)(f"{op}: {error}") from None
        self._entries = found.entries
        described = parse_metadata(found.metadata[KEY], op=op) if KEY in found.metadata else {}
        own = {key_of(name, part) for name, what in described.items() for part in what.arrays(op=op, name=name)}
        if missing := sorted(own - found.entries.keys()):
            raise ValueError(f"{op}: {path} lacks {missing[0]}, which its metadata describes; copy the file again")
        others = {name: entry for name, entry in found.entries.items() if name not in own}
        self._engine = dataclasses.replace(found, entries=others).quantized_weights()
        taken = {tensor.name for weight in self._engine.values() for tensor in weight.tensors}
        self.weights = described | {name: weight.description for name, weight in self._engine.items()}
        self.arrays = {name: entry for name, entry in others.items() if name not in taken}
        if unknown := find_unscaled(dataclasses.replace(found, entries=self.arrays)):
            name, why = unknown
            raise ValueError(
                f"{op}: {quote(name)} ({self.arrays[name].dtype}) in {path} {why}; qshard report says more"
            )

    def read(self, name: str, part: Index = ()) -> NDArray[Any]:
        """Read a tensor, or a part of it, in its own dtype; E8M0 as bytes."""
        dtype = self._entries[name].dtype
        if dtype not in DTYPES:
            raise ValueError(f"{self.op}: {name} has dtype {dtype}, which qshard does not read; leave it out")
        return np.array(self._map(name)[part])

    def read_plane(self, name: str) -> Plane:
        """Map the rowwise plane of a quantized weight: codes and one-byte scales as uint8, mostly views of the file."""
        what = self.weights[name]
        if Usage.ROWWISE not in what.planes:
            raise ValueError(f"{self.op}: {name} has no rowwise plane; convert it with --usage rowwise")
        if name in self._engine:
            weight = self._engine[name]
            return weight.plane({each.name: self._bytes(each.name) for each in weight.tensors})
        arrays = {part: self._map(key_of(name, part)) for part in what.arrays() if part.startswith("rowwise.")}
        what_is_rowwise = Description(format=what.format, shape=what.shape, dtype=what.dtype, planes=(Usage.ROWWISE,))
        return what_is_rowwise.take({key_of(name, part): each for part, each in arrays.items()}, name)[Usage.ROWWISE]

    def read_codes(self, name: str, fmt: Format) -> tuple[Plane, Format] | None:
        """Read the codes of a weight as a plane of `fmt`, or None if they are not codes of `fmt`."""
        found = regrid(self.read_plane(name), self.weights[name], fmt)
        if found is None:
            return None
        return Plane(*(None if part is None else np.array(part, order="C") for part in found[0])), found[1]

    def read_values(self, name: str, part: Index = ()) -> NDArray[np.float32]:
        """Read the values of a quantized weight, or of a part of it, as float32 `fl(code * scale)`."""
        return values_of(self.read_plane(name), self.weights[name], part)

    def _map(self, name: str) -> NDArray[Any]:
        entry = self._entries[name]
        typed: NDArray[Any] = self._bytes(name).view(DTYPES[entry.dtype])
        return typed.reshape(entry.shape)

    def _bytes(self, name: str) -> NDArray[np.uint8]:
        entry = self._entries[name]
        size = (entry.nbytes,)
        return np.memmap(entry.file, np.uint8, "r", entry.offset, size) if entry.nbytes else np.empty(0, np.uint8)


def values_of(parts: Plane, what: Description, part: Index = ()) -> NDArray[np.float32]:
    """Return the values of a part of a tensor, as float32: `fl(code * scale)`, as `dequantize` of the whole tensor.

    >>> from qshard.formats import FP8_E4M3
    >>> what = Description(format=FP8_E4M3, shape=(2, 2), dtype="bfloat16", planes=(Usage.ROWWISE,))
    >>> codes = np.array([[0x38, 0x40], [0, 0]], np.uint8)
    >>> values_of(Plane(codes, np.float32(0.5)), what, (slice(0, 1),))
    array([[0.5, 1. ]], dtype=float32)
    """
    fmt, shape = what.format, what.shape
    slices = [slice(*each.indices(size)) for each, size in zip(part, shape, strict=False)]
    slices += [slice(0, size) for size in shape[len(slices) :]]
    size = tuple(each.stop - each.start for each in slices)
    rows = np.arange(math.prod(shape[:-1])).reshape(shape[:-1])[tuple(slices[:-1])].reshape(-1)
    columns = np.arange(slices[-1].start, slices[-1].stop)
    where = plane(fmt, shape, Usage.ROWWISE)
    per_byte = fmt.element.codes_per_byte
    first = columns[:1] // per_byte if columns.size else columns
    last = columns[-1] // per_byte + 1 if columns.size else 0
    data = parts.data.reshape(matrix_shape(parts.data.shape))[rows, slice(int(first[0]) if columns.size else 0, last)]
    codes = np.stack([data & 15, data >> 4], -1).reshape(len(rows), -1) if fmt.element.packed else data
    codes = codes[:, columns - per_byte * int(first[0])] if columns.size else codes[:, :0]
    scale = _decode(parts.scale_inv, fmt.scaling.dtype).reshape(matrix_shape(where.scale_shape))
    if parts.global_scale_inv is not None:
        scale = scale * parts.global_scale_inv.reshape(-1, 1)
    block = where.scaled_shape
    of_each = scale[np.ix_(rows // block[0], columns // block[1])]
    with np.errstate(all="ignore"):
        values: NDArray[np.float32] = _decode(codes, fmt.element.name) * of_each
    return values.reshape(size)


def _decode(codes: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """Decode codes of an element format; float32 stays as it is."""
    if dtype not in ELEMENTS:
        return np.asarray(codes, np.float32)
    table = np.arange(2 ** ELEMENTS[dtype].bits, dtype=np.uint8).view(getattr(ml_dtypes, dtype)).astype(np.float32)
    found: NDArray[np.float32] = table[codes]
    return found
