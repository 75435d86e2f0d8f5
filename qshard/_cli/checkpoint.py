"""Checkpoints of safetensors: what is in them, read from headers alone, and tensors, one at a time.

safetensors itself reads and checks a header; where a tensor begins follows from the sizes of those before it, as their
data lie without holes. Data are read and not mapped, so that no page of a file stays in memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from qshard._cli.errors import Failure, shown
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
"""The dtypes of safetensors that hold real numbers, one an element."""
BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E8M0": 8}
BITS |= {"I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64, "C64": 64}
BITS |= {name: 8 * np.dtype(dtype).itemsize for name, dtype in FLOATS.items()}
CODES = ("F4", "F6_E2M3", "F6_E3M2", "F8_E8M0")
"""Those of codes or scales, which are numbers only together with others."""
MOST_AXES = 64
"""Of an array of NumPy."""
OTHERS = {
    b"PK\x03\x04": "torch.save or numpy.savez",
    b"\x80\x02\x8a\nl": "an old torch.save",
    b"\x89HDF": "HDF5",
    b"GGUF": "GGUF",
}
"""How files begin that are checkpoints, too."""
SAVE = "save it with save_file of safetensors.torch, .flax or .numpy"
PLACE_KEY = "data_offsets"
PLACE = re.compile(rb'"data_offsets"\s*:')
LENGTH = 8
"""Bytes of the length of the header, in front of it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file.

    Attributes:
      dtype: as safetensors writes it.
      offset: of its first byte in the file.
    """

    name: str
    dtype: str
    shape: Shape
    file: Path
    offset: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * BITS[self.dtype] // 8

    @property
    def given_as(self) -> str:
        """Dtype string of what kernels are given of it: bfloat16 has all of 8 bits; float64 is rounded."""
        return {"F64": "float32", "F32": "float32", "F16": "float16"}.get(self.dtype, "bfloat16")

    @property
    def refusal(self) -> str | None:
        """Why no format is for it; None if one may be."""
        if self.dtype in CODES:
            return f"{self.dtype}: codes or scales already"
        if self.dtype not in FLOATS:
            return f"{self.dtype}: not of real numbers"
        if not self.elements:
            return "no elements"
        if len(self.shape) > MOST_AXES:
            return f"{len(self.shape)} axes: more than {MOST_AXES}"
        return None

    def read(self) -> NDArray[Any]:
        """The numbers. Those of 8 bits as bfloat16, which has them all.

        Raises:
          Failure: the file has become shorter.
        """
        array = np.empty(self.nbytes, np.uint8)
        first = 0
        for part in self.bytes():
            array[first : first + len(part)] = np.frombuffer(part, np.uint8)
            first += len(part)
        numbers: NDArray[Any] = array.view(FLOATS[self.dtype]).reshape(self.shape)
        return numbers.astype(ml_dtypes.bfloat16) if numbers.dtype.itemsize == 1 else numbers

    def bytes(self, most: int = 2**24) -> Iterator[bytes]:
        """Its bytes, at most so many at a time. Raises as `read` does."""
        with self.file.open("rb", buffering=0) as file:
            file.seek(self.offset)
            left = self.nbytes
            while left:
                part = file.read(min(left, most))
                if not part:
                    raise Failure(
                        f"{shown(self.file)} ends within {shown(self.name)}: it was changed meanwhile; run again"
                    )
                left -= len(part)
                yield part


@dataclass(frozen=True, slots=True)
class File:
    """A file of safetensors: its tensors in the order of their bytes, and the strings beside them."""

    entries: dict[str, Entry]
    metadata: dict[str, str]


def read_header(path: Path) -> File:
    """What a file holds.

    Raises:
      Failure: it is not a whole file of safetensors.
    """
    if not path.is_file():
        raise Failure(f"{shown(path)} is not a file; name a file of safetensors")
    try:
        with safe_open(path, framework="numpy") as file:
            slices = ((name, file.get_slice(name)) for name in file.offset_keys())
            there = [(name, each.get_dtype(), tuple(each.get_shape())) for name, each in slices]
            metadata = file.metadata() or {}
    except SafetensorError as error:
        with path.open("rb") as opened:
            first = opened.read(LENGTH)
        what = f"{shown(path)} ({path.stat().st_size} bytes) is not a whole file of safetensors"
        for begin, of in OTHERS.items():
            if first.startswith(begin):
                raise Failure(f"{what}, but begins as those of {of} do; {SAVE}") from None
        why = shown(str(error).removeprefix("Error while deserializing header: "))
        raise Failure(f"{what}: {why}; copy or save it again") from None
    _refuse_twice(path, [name for name, _, _ in there], metadata)
    # Data follow the header without holes up to the end, which safetensors has made sure of.
    total = sum(math.prod(shape) * _bits(path, dtype) // 8 for _, dtype, shape in there)
    offset = path.stat().st_size - total
    entries = {}
    for name, dtype, shape in there:
        entries[name] = Entry(name, dtype, shape, path, offset)
        offset += entries[name].nbytes
    if offset - total < LENGTH:
        raise Failure(f"{shown(path)} was changed while it was read; run again")
    return File(entries, metadata)


def _refuse_twice(path: Path, names: Sequence[str], metadata: Mapping[str, str]) -> None:
    """Of two tensors of one name safetensors has the last: they show in how often the header says where data are."""
    with path.open("rb") as file:
        header = file.read(int.from_bytes(file.read(LENGTH), "little"))
    times = sum(1 for _ in PLACE.finditer(header))
    if times > len(names) + names.count(PLACE_KEY) + (PLACE_KEY in metadata):
        raise Failure(f"{shown(path)} has several tensors of one name; save it again")


def _bits(path: Path, dtype: str) -> int:
    if dtype not in BITS:
        raise Failure(f"{shown(path)} has tensors of {shown(dtype)}, which this qshard does not know; use a newer one")
    return BITS[dtype]
