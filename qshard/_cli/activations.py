"""Activations of layers, in a file of NumPy: what each weight was multiplied with in a real run."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from qshard._cli.checkpoint import Entry
from qshard._cli.errors import Misuse, shown
from qshard.layout import Shape

END = ".weight"
SUFFIX = ".npy"
KINDS = "fiu"
HEADER = 2**16
"""Bytes that hold the header of an array."""
PACKED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""As `numpy.savez` and `numpy.savez_compressed` do."""
BROKEN = (zipfile.BadZipFile, zlib.error, ValueError, EOFError, RuntimeError)
"""What zipfile and NumPy raise for files that are not whole, or not theirs."""


@dataclass(frozen=True)
class Activations:
    """Names of arrays by names of layers; the arrays are read one at a time."""

    path: Path
    names: dict[str, str]

    def of(self, name: str) -> NDArray[Any] | None:
        """Those of a layer, `[..., K]`; None if there are none.

        Raises:
          Misuse: they are not there whole.
        """
        if name not in self.names:
            return None
        try:
            with np.load(self.path, allow_pickle=False) as file:
                return cast(NDArray[Any], file[self.names[name]])
        except BROKEN as error:
            raise _not_whole(self.path, f"{self.names[name]}: {error}") from None


def open_activations(path: Path, entries: Iterable[Entry]) -> tuple[Activations, list[str]]:
    """Finds activations for layers: an array has the name of a layer, with `.weight` or without.

    Returns:
      The activations, and notes: arrays that are for no layer.

    Raises:
      Misuse: it is no file of `numpy.savez`, an array does not fit its layer, or none is for a layer.
    """
    there = _headers(path)
    names: dict[str, str] = {}
    for entry in entries:
        name = next((name for name in (entry.name, entry.name.removesuffix(END)) if name in there), None)
        if name is None:
            continue
        shape, dtype = there[name]
        if dtype.kind not in KINDS or dtype.fields is not None:
            raise Misuse(f"{shown(path)}: {shown(name)} ({dtype}) is not of real numbers; save it as float32")
        if shape[-1:] != entry.shape[-1:]:
            what = f"{shown(name)} {shape} does not end in the {entry.shape[-1:]} of {shown(entry.name)} {entry.shape}"
            raise Misuse(f"{shown(path)}: {what}; save what the layer is given")
        names[entry.name] = name
    rest = sorted(there.keys() - set(names.values()))
    if not names:
        raise Misuse(f"{shown(path)} has {len(there)} arrays, and none by the name of a layer; name them as the layers")
    return Activations(path, names), [f"activations of no layer: {', '.join(map(shown, rest))}"] if rest else []


def _headers(path: Path) -> dict[str, tuple[Shape, np.dtype[Any]]]:
    """Shape and dtype of each array, without its numbers."""
    found = {}
    try:
        with zipfile.ZipFile(path) as file:
            for member in file.infolist():
                if member.compress_type not in PACKED:
                    raise ValueError(f"{member.filename} is compressed in another way")
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
    return Misuse(f"{shown(path)} is not a file of numpy.savez: {shown(why)}; save it again")
