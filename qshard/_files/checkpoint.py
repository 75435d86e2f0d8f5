"""Safetensors checkpoints: a file, an index of shards, or a folder with either.

Headers are checked in full: names, dtypes and sizes, and that data has no gaps. The command reads the data of a tensor
instead of mapping it, so no pages of a file stay in memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from qshard._core.serialization import KEY, merge_texts
from qshard._files.engine_configs import CONFIGS
from qshard._files.names import count_of, quote
from qshard._files.recognition import RecognizedWeight, TensorSpec, block_of_config, recognize
from qshard.layout import Shape

FLOATS: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
}
"""Safetensors dtypes of real numbers, one per element."""
BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E8M0": 8}
BITS |= {"I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64, "C64": 64}
BITS |= {name: 8 * np.dtype(dtype).itemsize for name, dtype in FLOATS.items()}
CODES = ("F4", "F6_E2M3", "F6_E3M2", "F8_E8M0")  # dtypes of codes or scales, which need other tensors to be decoded
MOST_AXES = 64  # maximum number of axes of a NumPy array
OTHERS = {
    b"PK\x03\x04": "torch.save or numpy.savez",
    b"\x80\x02\x8a\nl": "an old torch.save",
    b"\x89HDF": "HDF5",
    b"GGUF": "GGUF",
}
"""First bytes of other checkpoint formats."""
SAVE = "save it with save_file of safetensors.torch, .flax or .numpy"
FILE, INDEX = ".safetensors", ".safetensors.index.json"
LENGTH = 8  # bytes of the length of a header
LONGEST_HEADER = 100_000_000  # maximum bytes of a header that safetensors reads
METADATA = "__metadata__"
LARGEST_INDEX = 2**26  # Maximum size in bytes. The index of a model with 100,000 tensors has about 2**23.
MOST_NESTED = 2**20  # Maximum number of objects and lists in an index or a config, which may have one for each weight.
QUANTIZATION = re.compile(rb'"(?:quantization_config|compression_config|quantization)"\s*:\s*(?!null|\{\s*\}|\s)')
"""A nonempty key of a config file that marks a quantized model, at any depth: a text model's config may be nested."""
PART = re.compile(r".*-[0-9]+-of-(?!0*1\.)[0-9]+\.safetensors", re.DOTALL)  # file name of one of several shards
STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')


class CheckpointError(ValueError):
    """A file of a checkpoint is broken, or changed while it was read."""


class MissingFileError(CheckpointError, FileNotFoundError):
    """A file of a checkpoint is missing."""


class CheckpointPathError(CheckpointError, FileNotFoundError):
    """A path does not name one checkpoint."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file. `dtype` is a safetensors dtype, `offset` the position of its first byte in the file."""

    name: str
    dtype: str
    shape: Shape
    file: Path
    offset: int

    @property
    def elements(self) -> int:
        return 0 if 0 in self.shape else math.prod(self.shape)

    @property
    def bits(self) -> int:
        """Bits of an element, without scales."""
        return BITS[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.elements * self.bits // 8

    @property
    def kernel_dtype(self) -> str:
        """Dtype of the tensor in kernels. 8-bit floats become bfloat16, which is exact; float64 becomes float32."""
        return {"F64": "float32", "F32": "float32", "F16": "float16"}.get(self.dtype, "bfloat16")

    @property
    def refusal(self) -> str | None:
        """Reason why no format can apply to the tensor; None if some may."""
        if self.dtype in CODES:
            return f"{self.dtype}: codes or scales already"
        if self.dtype not in FLOATS:
            return f"{self.dtype}: not of real numbers"
        if not self.elements:
            return "no elements"
        if len(self.shape) > MOST_AXES:
            return f"{len(self.shape)} axes: more than {MOST_AXES}"
        return None

    @property
    def tensors(self) -> tuple[Entry, ...]:
        """The tensors in the file that belong to the entry."""
        return (self,)

    def read(self) -> NDArray[Any]:
        """Read the tensor, 8-bit floats as bfloat16, which is exact, or raise as `bytes`."""
        numbers: NDArray[Any] = self.read_bytes().view(FLOATS[self.dtype]).reshape(self.shape)
        return numbers.astype(ml_dtypes.bfloat16) if numbers.dtype.itemsize == 1 else numbers

    def read_bytes(self) -> NDArray[np.uint8]:
        """Read the bytes of the tensor, or raise as `bytes`."""
        array = np.empty(self.nbytes, np.uint8)
        first = 0
        for part in self.bytes():
            array[first : first + len(part)] = np.frombuffer(part, np.uint8)
            first += len(part)
        return array

    def bytes(self, most: int = 2**24) -> Iterator[bytes]:
        """Yield the bytes of the tensor in parts of at most `most`.

        Raises `CheckpointError` if the file became shorter.
        """
        with self.file.open("rb", buffering=0) as file:
            file.seek(self.offset)
            left = self.nbytes
            while left:
                part = file.read(min(left, most))
                if not part:
                    raise CheckpointError(
                        f"{quote(self.file)} ends within {quote(self.name)}, so it changed during the run; run again"
                    )
                left -= len(part)
                yield part


@dataclass(frozen=True)
class Checkpoint:
    """All tensors of a file or checkpoint by name, in the order of files.

    Attributes:
      path: path of the file or index.
      notes: remarks for the user.
      outside: names of tensors that are not read: absent from the index, or in other shards.
    """

    path: Path
    files: list[Path]
    entries: dict[str, Entry]
    metadata: dict[str, str]
    notes: list[str]
    outside: frozenset[str] = frozenset()

    def quantized_weights(self) -> dict[str, RecognizedWeight]:
        """Return the quantized weights that `recognize` finds, by name."""
        specs = {name: TensorSpec(entry.dtype, entry.shape) for name, entry in self.entries.items()}
        configs = {name: read_config(self.path.parent / name) for name in CONFIGS}
        return recognize(specs, block_of_config(configs), self.outside)


def read_header(path: Path) -> Checkpoint:
    """Read the header of a safetensors file, or raise `CheckpointError` if the file is incomplete."""
    if not path.is_file():
        raise CheckpointError(f"{quote(path)} is not a file; name a safetensors file")
    with path.open("rb") as file:
        size = path.stat().st_size
        first = file.read(LENGTH)
        length = int.from_bytes(first, "little")
        text = file.read(length) if length <= min(size, LONGEST_HEADER) else b""
    try:
        if len(first) < LENGTH or len(text) < length:
            raise ValueError("its header is longer than the file, or than safetensors reads")
        return _parse_header(path, text, size)
    except (ValueError, RecursionError) as error:
        what = f"{quote(path)} ({size} bytes) is not a complete safetensors file"
        if (of := next((of for begin, of in OTHERS.items() if first.startswith(begin)), None)) is not None:
            raise CheckpointError(f"{what}, but looks like a file of {of}; {SAVE}") from None
        raise CheckpointError(f"{what}: {quote(error)}; copy or save it again") from None


def _parse_header(path: Path, text: bytes, size: int) -> Checkpoint:
    """Parse the header of a file of `size` bytes. Raises ValueError if its tensors are not all of the data."""
    header = json.loads(text.decode(), object_pairs_hook=unique_keys)
    metadata = header.pop(METADATA, {}) if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or not all(isinstance(each, str) for each in metadata.values()):
        raise ValueError("its header is not a JSON object of tensors, and of strings as metadata")
    "".join([*header, *metadata, *metadata.values()]).encode()  # JSON may have half a character, and UTF-8 not
    found = []
    for name, each in header.items():
        match each:
            case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(stop)]} if all(
                type(axis) is int and axis >= 0 for axis in shape
            ):
                found.append((start, stop, Entry(name, dtype, tuple(shape), path, LENGTH + len(text) + start)))
            case _:
                raise ValueError(f"{quote(name)} lacks a dtype, a shape or two offsets")
    end = 0
    found.sort(key=lambda each: each[:2])
    for start, stop, entry in found:
        if entry.dtype not in BITS:
            raise ValueError(f"{quote(entry.name)} has dtype {quote(entry.dtype)}, unknown to this version of qshard")
        if start != end:
            raise ValueError(f"{quote(entry.name)} does not begin where the tensor before it ends")
        if 8 * (stop - start) != BITS[entry.dtype] * _count(entry.shape, 8 * size):
            raise ValueError(f"{quote(entry.name)} has {stop - start} bytes, but shape {quote(entry.shape)}")
        end = stop
    if LENGTH + len(text) + end != size:
        raise ValueError(f"its tensors have {end} bytes, and its data {size - LENGTH - len(text)}")
    return Checkpoint(path, [path], {entry.name: entry for *_, entry in found}, metadata, [])


def _count(shape: Shape, most: int) -> int:
    """Return the number of elements, or any number above `most`: hostile shapes have products of millions of digits."""
    count = int(0 not in shape)
    for axis in shape:
        count *= axis
        if count > most:
            break
    return count


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object, as `object_pairs_hook`. Raises ValueError if a key occurs twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice")
    return found


def open_checkpoint(path: Path) -> Checkpoint:
    """Open the checkpoint at a path: a safetensors file, an index of shards, or a folder with either.

    Raises:
      CheckpointPathError: the path has no checkpoint, or several.
      MissingFileError: a shard is missing.
      CheckpointError: a file is incomplete.
    """
    if not path.exists():
        raise CheckpointPathError(f"{quote(path)} does not exist; name a safetensors file, index or folder")
    if path.is_dir():
        path = _in_folder(path)
    if path.name.endswith(".json"):
        return _from_index(path)
    file = read_header(path)
    return dataclasses.replace(file, outside=_in_other_shards(file))


def _in_folder(folder: Path) -> Path:
    names = sorted(each.name for each in folder.iterdir() if each.is_file() and not each.name.startswith("."))
    found = [name for name in names if name.endswith(INDEX)]
    found = found or [name for name in names if name.endswith(FILE)]
    if len(found) == 1:
        return folder / found[0]
    if not found:
        raise CheckpointPathError(f"{quote(folder)} has no {FILE} file; name a folder that has one, or {SAVE}")
    what = f"{len(found)} ({', '.join(map(quote, found[:3]))}{', ...' if len(found) > 3 else ''})"
    raise CheckpointPathError(f"{quote(folder)} has more than one safetensors checkpoint: {what}; name a file")


def _from_index(path: Path) -> Checkpoint:
    where = _weight_map(path)
    files = {name: path.parent / name for name in sorted(set(where.values()))}
    missing = [name for name, file in files.items() if not file.is_file()]
    if missing:
        many = f"{count_of(len(files), 'shard')}, {len(missing)} missing"
        raise MissingFileError(f"{quote(path)} names {many}, such as {quote(missing[0])}; put them beside it")
    read = {name: read_header(file) for name, file in files.items()}
    entries = {}
    for name, shard in where.items():
        if name not in read[shard].entries:
            raise CheckpointError(
                f"{quote(path)} lists {quote(name)} in {quote(shard)}, which does not have it; copy or save them again"
            )
        entries[name] = read[shard].entries[name]
    extra = [name for file in read.values() for name in file.entries if name not in where]
    notes = (
        [f"not in the index, and ignored: {count_of(len(extra), 'tensor')}, such as {quote(extra[0])}"] if extra else []
    )
    metadata = {key: value for file in read.values() for key, value in file.metadata.items()}
    described = {file.metadata[KEY] for file in read.values() if KEY in file.metadata}
    if len(described) > 1:  # Each shard may describe its own tensors.
        try:
            metadata[KEY] = merge_texts(sorted(described), op=quote(path))
        except ValueError as error:
            raise CheckpointError(str(error)) from None
    return Checkpoint(path, list(files.values()), entries, metadata, notes, frozenset(extra))


def _in_other_shards(file: Checkpoint) -> frozenset[str]:
    """Return the names of tensors in other shards, if an index beside the file lists the file."""
    found: set[str] = set()
    with contextlib.suppress(OSError):  # the folder may not be readable
        for index in (each for each in file.path.parent.iterdir() if each.name.endswith(INDEX)):
            where = _json_object(_read_optional(index)).get("weight_map")
            if isinstance(where, dict) and file.path.name in where.values():
                found |= where.keys() - file.entries.keys()
    return frozenset(found)


def quantization_of(checkpoint: Checkpoint) -> str | None:
    """Return evidence outside the tensors that a checkpoint is quantized, as a clause, or None."""
    if key := next((key for key in checkpoint.metadata if "quant" in key.lower()), None):
        return f"the metadata of the file has {quote(key)}"
    for name in CONFIGS:
        if QUANTIZATION.search(_read_optional(checkpoint.path.parent / name)):
            return f"{name} beside it says that the checkpoint is quantized"
    if not checkpoint.outside and PART.fullmatch(checkpoint.path.name):
        return "the file is one shard of several, and others may have it"
    return None


def read_config(path: Path) -> dict[str, Any]:
    """Read a config file beside a checkpoint; empty if it is absent or no JSON object."""
    return _json_object(_read_optional(path))


def _weight_map(path: Path) -> dict[str, str]:
    """Read the map from names of tensors to names of files."""
    problem = f"{quote(path)} ({path.stat().st_size} bytes) is not a safetensors index"
    text = path.read_bytes() if path.stat().st_size <= LARGEST_INDEX else b""
    where = _json_object(text).get("weight_map")
    if not isinstance(where, dict) or not where or not all(isinstance(file, str) for file in where.values()):
        raise CheckpointError(f'{problem}: it has no "weight_map"; copy it again')
    for file in set(where.values()):
        if Path(file).name != file or not file.endswith(FILE):
            raise CheckpointError(f"{problem}: {quote(file)} is not the name of a safetensors file in its folder")
    return where


def _read_optional(path: Path) -> bytes:
    """Read the first bytes of an optional file beside a checkpoint; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        if path.is_file():
            with path.open("rb") as file:
                return file.read(LARGEST_INDEX)
    return b""


def _json_object(text: bytes) -> dict[str, Any]:
    """Parse a JSON object; empty if the text is something else, or nested too deeply."""
    bare = STRING.sub(b"", text)  # count first: small JSON objects are large in memory
    if bare.count(b"{") + bare.count(b"[") > MOST_NESTED:
        return {}
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}
