"""Where the tensors of a checkpoint are: in a file, in the shards of an index, or in a folder of Hugging Face."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from qshard._cli.checkpoint import SAVE, Entry, File, read_header
from qshard._cli.errors import Failure, Misuse, counted, shown
from qshard._core.serialization import KEY
from qshard._core.validation import closest

FILE, INDEX = ".safetensors", ".safetensors.index.json"
LARGEST_INDEX = 2**26
"""Bytes. That of a model with 100,000 tensors has 2**23."""
MOST_NESTED = 1000
"""Objects and lists in an index, of which two are needed."""
CONFIGS = ("config.json", "hf_quant_config.json")
QUANTIZATION = re.compile(rb'"(?:quantization_config|compression_config|quantization)"\s*:\s*(?!null|\{\s*\}|\s)')
"""A key of such files with a value, at any depth: the config of a text model may be a part of another one."""
PART = re.compile(r".*-[0-9]+-of-(?!0*1\.)[0-9]+\.safetensors", re.DOTALL)
"""Names of one shard of several."""
STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')


@dataclass(frozen=True)
class Checkpoint:
    """All tensors by name.

    Attributes:
      path: what was asked for.
      files: that hold them.
      metadata: the strings beside them, of all files.
      notes: what else its reader has to know.
      outside: names of tensors that are not read: absent from the index, or in other shards.
    """

    path: Path
    files: list[Path]
    entries: dict[str, Entry]
    metadata: dict[str, str]
    notes: list[str]
    outside: frozenset[str] = frozenset()


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at a path: a file of safetensors, an index of shards, or a folder with either.

    Raises:
      Misuse: there is none, or what is there was written by `qshard convert`.
      Failure: a shard is missing, or a file is not whole.
    """
    if not path.exists():
        raise Misuse(f"{shown(path)} does not exist; name a file, an index or a folder of safetensors")
    if path.is_dir():
        path = _in_folder(path)
    if path.name.endswith(".json"):
        found = _sharded(path)
    else:
        file = read_header(path)
        found = Checkpoint(path, [path], file.entries, file.metadata, [], _in_other_shards(path, file))
    if KEY in found.metadata:  # Its scales would pass for layers.
        raise Misuse(f"{shown(path)} has codes of qshard already; take what it was made of")
    return found


def _in_folder(folder: Path) -> Path:
    names = sorted(each.name for each in folder.iterdir() if each.is_file() and not each.name.startswith("."))
    found = [name for name in names if name.endswith(INDEX)]
    found = found or [name for name in names if name.endswith(FILE)]
    if len(found) == 1:
        return folder / found[0]
    if not found:
        raise Misuse(f"{shown(folder)} has no {FILE} file; name a folder that has, or {SAVE}")
    what = f"{len(found)} ({', '.join(map(shown, found[:3]))}{', ...' if len(found) > 3 else ''})"
    raise Misuse(f"{shown(folder)} is not a folder with one checkpoint of safetensors, but with {what}; name a file")


def _sharded(path: Path) -> Checkpoint:
    where = _weight_map(path)
    files = {name: path.parent / name for name in sorted(set(where.values()))}
    missing = [name for name, file in files.items() if not file.is_file()]
    if missing:
        many = f"{counted(len(files), 'shard')}, of which {len(missing)} {'is' if len(missing) == 1 else 'are'} missing"
        raise Failure(f"{shown(path)} names {many}, such as {shown(missing[0])}; put what is missing beside it")
    read: dict[str, File] = {name: read_header(file) for name, file in files.items()}
    entries = {}
    for name, shard in where.items():
        if name not in read[shard].entries:
            raise Failure(
                f"{shown(path)} has {shown(name)} in {shown(shard)}, where it is not; copy or save them again"
            )
        entries[name] = read[shard].entries[name]
    extra = [name for file in read.values() for name in file.entries if name not in where]
    notes = [f"not in the index, and left out: {_some(extra)}"] if extra else []
    metadata = {key: value for file in read.values() for key, value in file.metadata.items()}
    return Checkpoint(path, list(files.values()), entries, metadata, notes, frozenset(extra))


def _in_other_shards(path: Path, file: File) -> frozenset[str]:
    """Names of the tensors in other shards, if an index beside the file lists it."""
    found: set[str] = set()
    with contextlib.suppress(OSError):  # A folder that may not be listed.
        for index in (each for each in path.parent.iterdir() if each.name.endswith(INDEX)):
            where = _json_value("weight_map", _read_optional(index))
            if isinstance(where, dict) and path.name in where.values():
                found |= where.keys() - file.entries.keys()
    return frozenset(found)


def quantization_of(checkpoint: Checkpoint) -> str | None:
    """A sign beside the tensors that the checkpoint is quantized, as a clause, or None."""
    if key := next((key for key in checkpoint.metadata if "quant" in key.lower()), None):
        return f"the metadata of the file has {shown(key)}"
    for name in CONFIGS:
        if QUANTIZATION.search(_read_optional(checkpoint.path.parent / name)):
            return f"{name} beside it says that the checkpoint is quantized"
    if not checkpoint.outside and PART.fullmatch(checkpoint.path.name):
        return "the file is one shard of several, and others may have it"
    return None


def _weight_map(path: Path) -> dict[str, str]:
    """Name of each tensor -> name of its file."""
    problem = f"{shown(path)} ({path.stat().st_size} bytes) is not an index of safetensors"
    where = _json_value("weight_map", path.read_bytes() if path.stat().st_size <= LARGEST_INDEX else b"")
    if not isinstance(where, dict) or not where or not all(isinstance(file, str) for file in where.values()):
        raise Failure(f'{problem}: it has no "weight_map" of names of files; copy it again')
    for file in set(where.values()):
        if Path(file).name != file or not file.endswith(FILE):
            raise Failure(f"{problem}: {shown(file)} is not the name of a file of safetensors beside it")
    return where


def _read_optional(path: Path) -> bytes:
    """The first bytes of an optional file beside a checkpoint; none if it cannot be read."""
    with contextlib.suppress(OSError):
        if path.is_file():
            with path.open("rb") as file:
                return file.read(LARGEST_INDEX)
    return b""


def _json_value(key: str, text: bytes) -> object:
    """The value of a key in a JSON object; None if it is absent, or the text is not JSON or too deeply nested."""
    bare = STRING.sub(b"", text)  # Small things of JSON are large in memory, so they are counted first.
    if bare.count(b"{") + bare.count(b"[") > MOST_NESTED:
        return None
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return read.get(key) if isinstance(read, dict) else None


def matching(names: Collection[str], globs: Iterable[str], option: str) -> set[str]:
    """The names that any of some patterns is for. A name is a pattern for itself, whatever characters it has.

    Raises:
      Misuse: a pattern is for none.
    """
    found: set[str] = set()
    for glob in globs:
        these = {name for name in names if name == glob} or set(fnmatch.filter(names, glob))
        if not these:
            like = closest(glob, map(shown, names), "its names") if len(names) else "it has none"
            raise Misuse(f"{option} {shown(glob)} is the name of no tensor; {shown(like)}")
        found |= these
    return found


def _some(names: list[str]) -> str:
    return f"{counted(len(names), 'tensor')}, such as {shown(names[0])}"
