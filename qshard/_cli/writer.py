"""Files of safetensors whose sizes are known before their data: written tensor by tensor, and read back.

The layout is that of safetensors: eight bytes with the length of the header, the header in JSON, padded to eight bytes,
and all data without holes. Wide elements come first, so that each tensor lies on a whole number of its elements.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from qshard._cli.checkpoint import BITS, LENGTH, Entry, File, read_header
from qshard._cli.errors import Failure, shown
from qshard.layout import Shape

LONGEST_HEADER = 100_000_000
"""Bytes, as safetensors reads them."""


@dataclass(frozen=True)
class Slot:
    """Where a tensor goes: its place in the file."""

    dtype: str
    shape: Shape
    offset: int
    nbytes: int


class Writer:
    """A file to be filled in any order.

    Attributes:
      slots: by name.
    """

    def __init__(self, file: BinaryIO, tensors: Mapping[str, tuple[str, Shape]], metadata: Mapping[str, str]) -> None:
        """Writes the header.

        Args:
          tensors: dtype, as safetensors has it, and shape, by name.

        Raises:
          Failure: the header is longer than safetensors reads.
        """
        self.file, self.metadata = file, dict(metadata)
        self.digests: dict[str, bytes] = {}
        header: dict[str, object] = {"__metadata__": self.metadata} if metadata else {}
        at, sizes = 0, {}
        for name in sorted(tensors, key=lambda name: (-BITS[tensors[name][0]], name)):
            dtype, shape = tensors[name]
            nbytes = Entry(name, dtype, shape, Path(), 0).nbytes
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
            sizes[name] = at, nbytes
            at += nbytes
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % LENGTH)
        if len(text) > LONGEST_HEADER:
            raise Failure(f"the header would have {len(text)} bytes, more than safetensors reads; convert a part")
        file.write(len(text).to_bytes(LENGTH, "little") + text)
        first = LENGTH + len(text)
        self.slots = {name: Slot(*tensors[name], first + start, size) for name, (start, size) in sizes.items()}
        file.truncate(first + at)

    def write(self, name: str, parts: Iterable[bytes | memoryview[int]]) -> None:
        """The bytes of a tensor."""
        slot, digest = self.slots[name], hashlib.blake2b()
        self.file.seek(slot.offset)
        written = 0
        for part in parts:
            self.file.write(part)
            digest.update(part)
            written += len(part)
        if written != slot.nbytes:
            raise Failure(f"{shown(name)} has {written} bytes in place of {slot.nbytes}; this is a bug of qshard")
        self.digests[name] = digest.digest()

    def check(self, path: Path) -> File:
        """Reads the file back, from the disk where the system allows.

        Args:
          path: where the file is now.

        Raises:
          Failure: safetensors does not find in it, bit for bit, what was written.
        """
        self.file.flush()
        os.fsync(self.file.fileno())
        os.posix_fadvise(self.file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        found = read_header(path)
        if found.metadata != self.metadata or not found.entries.keys() == self.slots.keys() == self.digests.keys():
            raise Failure(f"{shown(path)} does not hold what was written to it; check the disk")
        for name, entry in found.entries.items():
            slot, digest = self.slots[name], hashlib.blake2b()
            for part in entry.bytes():
                digest.update(part)
            same = (entry.dtype, entry.shape, entry.offset) == (slot.dtype, slot.shape, slot.offset)
            if not same or digest.digest() != self.digests[name]:
                raise Failure(f"{shown(name)} was read back with other bytes than were written; check the disk")
        return found
