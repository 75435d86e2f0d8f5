"""Reading of safetensors checkpoints by front ends: whole tensors, parts of them, and quantized weights of any origin.

A checkpoint is a file, an index of shards, or a folder with either. Files are mapped, so a part of a tensor costs the
memory of that part. The header is checked as far as reading needs it; `qshard report` checks all of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from qshard._core.quantize_steps import Plane
from qshard._core.serialization import KEY, Description, key_of, parse_metadata
from qshard._files.engine_configs import CONFIGS
from qshard._files.recognition import TensorSpec, block_of_config, recognize
from qshard._files.regrid import regrid
from qshard.formats import ELEMENTS, Format, Usage
from qshard.layout import matrix_shape, plane

DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
ONE_BYTE = ("F8_E8M0",)  # read as bytes
LENGTH = 8  # bytes of the length of a header
FILE, INDEX = ".safetensors", ".safetensors.index.json"
Part = tuple[slice, ...]


@dataclass(frozen=True)
class _Position:
    """Position of a tensor in a file."""

    spec: TensorSpec
    file: Path
    offset: int


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
        self.op, self.path = op, Path(path)
        where, metadata, outside = self._open()
        self._where = where
        described = parse_metadata(metadata[KEY], op=op) if KEY in metadata else {}
        own = {key_of(name, part) for name, what in described.items() for part in what.arrays(op=op, name=name)}
        if missing := sorted(own - where.keys()):
            raise ValueError(f"{op}: {self.path} lacks {missing[0]}, which its metadata describes; copy the file again")
        specs = {name: each.spec for name, each in where.items() if name not in own}
        configs = {name: self._read_json(self.path.parent / name, optional=True) for name in CONFIGS}
        self._engine = recognize(specs, block_of_config(configs), outside)
        taken = own | {tensor.name for weight in self._engine.values() for tensor in weight.tensors}
        self.weights = described | {name: weight.description for name, weight in self._engine.items()}
        self.arrays = {name: spec for name, spec in specs.items() if name not in taken}
        for name, spec in self.arrays.items():
            if spec.dtype.startswith(("F8_E4", "F8_E5", "F4", "F6")) and len(spec.shape) > 1:
                raise ValueError(
                    f"{op}: {name} ({spec.dtype}) in {self.path} has no scale that qshard recognizes; qshard report "
                    "says what it found"
                )

    def read(self, name: str, part: Part = ()) -> NDArray[Any]:
        """Read a tensor, or a part of it, in its own dtype; E8M0 as bytes."""
        spec = self._where[name].spec
        if spec.dtype not in DTYPES and spec.dtype not in ONE_BYTE:
            raise ValueError(f"{self.op}: {name} has dtype {spec.dtype}, which qshard does not read; leave it out")
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

    def read_values(self, name: str, part: Part = ()) -> NDArray[np.float32]:
        """Read the values of a quantized weight, or of a part of it, as float32 `fl(code * scale)`."""
        return values_of(self.read_plane(name), self.weights[name], part)

    def _map(self, name: str) -> NDArray[Any]:
        spec = self._where[name].spec
        typed: NDArray[Any] = self._bytes(name).view(DTYPES.get(spec.dtype, np.uint8))
        return typed.reshape(spec.shape)

    def _bytes(self, name: str) -> NDArray[np.uint8]:
        where = self._where[name]
        size = where.spec.elements * np.dtype(DTYPES.get(where.spec.dtype, np.uint8)).itemsize
        return np.memmap(where.file, np.uint8, "r", where.offset, (size,)) if size else np.empty(0, np.uint8)

    def _open(self) -> tuple[dict[str, _Position], dict[str, str], set[str]]:
        path = self.path
        if path.is_dir():
            names = sorted(each.name for each in path.iterdir() if not each.name.startswith("."))
            found = [name for name in names if name.endswith(INDEX)] or [name for name in names if name.endswith(FILE)]
            if len(found) != 1:
                raise ValueError(f"{self.op}: {path} has {len(found)} safetensors checkpoints; name a file")
            self.path = path = path / found[0]
        if not path.is_file():
            raise FileNotFoundError(f"{self.op}: {path} does not exist; name a safetensors file, index or folder")
        if not path.name.endswith(".json"):
            return (*self._header(path), set())
        index = self._read_json(path).get("weight_map")
        if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
            raise ValueError(f'{self.op}: {path} is not an index: it has no "weight_map"; copy it again')
        where: dict[str, _Position] = {}
        metadata: dict[str, str] = {}
        outside: set[str] = set()
        for file in sorted(set(index.values())):
            if Path(file).name != file:
                raise ValueError(f"{self.op}: {path} names {file!r}, which is not in its folder; copy it again")
            there, own = self._header(path.parent / file)
            where |= {name: each for name, each in there.items() if index.get(name) == file}
            outside |= there.keys() - index.keys()
            metadata |= own
        if missing := sorted(index.keys() - where.keys()):
            raise ValueError(f"{self.op}: {path} lists {missing[0]}, which its file does not have; copy them again")
        return where, metadata, outside

    def _header(self, path: Path) -> tuple[dict[str, _Position], dict[str, str]]:
        """Read the header of a file."""
        if not path.is_file():
            raise FileNotFoundError(f"{self.op}: {path} is missing; put it beside the index")
        size = path.stat().st_size
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(LENGTH), "little")
                if length > size - LENGTH:
                    raise ValueError("its header is longer than the file")
                header = json.loads(file.read(length))
            metadata = header.pop("__metadata__", {})
            where = {}
            for name, each in header.items():
                spec = TensorSpec(each["dtype"], tuple(each["shape"]))
                start, stop = each["data_offsets"]
                first = LENGTH + length + start
                itemsize = np.dtype(DTYPES.get(spec.dtype, np.uint8)).itemsize
                if not 0 <= start <= stop <= size - LENGTH - length or not all(
                    type(axis) is int and axis >= 0 for axis in spec.shape
                ):
                    raise ValueError(f"{name} lies outside of the file")
                if (spec.dtype in DTYPES or spec.dtype in ONE_BYTE) and stop - start != spec.elements * itemsize:
                    raise ValueError(f"{name} has {stop - start} bytes instead of {spec.elements * itemsize}")
                where[name] = _Position(spec, path, first)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{self.op}: {path} is not a complete safetensors file: {error}; copy it again") from None
        return where, metadata

    def _read_json(self, path: Path, *, optional: bool = False) -> Mapping[str, Any]:
        try:
            read = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            if optional:
                return {}
            raise ValueError(f"{self.op}: {path} is not a JSON file: {error}; copy it again") from None
        return read if isinstance(read, dict) else {}


def values_of(parts: Plane, what: Description, part: Part = ()) -> NDArray[np.float32]:
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
