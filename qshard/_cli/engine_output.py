"""The output of `qshard convert --to`: a folder in the format of a serving engine.

    OUT/model.safetensors                  or model-00001-of-00002.safetensors, ... and model.safetensors.index.json
    OUT/config.json                        of the checkpoint, with the engine's `quantization_config`
    OUT/tokenizer.json, ...                other small files of the checkpoint's folder

The folder is written under another name beside OUT and renamed when it is complete.

vLLM multiplies some layers as one weight, such as q, k and v, and takes one of their global scales for all. So they are
quantized with the global scale of the merged weight: their codes are its rows.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qshard._cli.conversion import Conversion, Writer, amax_of, arrays_of, make_beside, permissions_of
from qshard._cli.errors import Misuse
from qshard._cli.quantized_entry import QuantizedEntry
from qshard._core.serialization import Description, key_of
from qshard._files.checkpoint import FILE, INDEX, Checkpoint, Entry, read_config
from qshard._files.engine_configs import CONFIG, CONFIGS, engine_configs
from qshard._files.engine_configs import KEY as QUANTIZATION
from qshard._files.engine_formats import EngineTensor, engine_tensors
from qshard._files.engine_stream import merged_weights
from qshard._files.names import quote
from qshard.layout import Shape
from qshard.numerics._display import progress_bar

OP = "qshard convert"
COPIES = (".json", ".txt", ".model", ".jinja", ".md", "LICENSE")  # ends of the names of small files to copy
LARGEST_COPY = 2**28  # bytes
MOST_BYTES = 5 * 10**9  # of a shard, as Hugging Face splits files


@dataclass(frozen=True)
class _Item:
    """Tensors that one entry of the checkpoint becomes.

    Attributes:
      tensors: safetensors dtype and shape of each, by name.
      weight: tensors of an engine to compute; None if the tensors of the entry are copied.
    """

    entry: Entry
    tensors: dict[str, tuple[str, Shape]]
    weight: tuple[EngineTensor, ...] | None = None


def write_engine(
    out: Path, checkpoint: Checkpoint, engine: str, done: Conversion, seed: int, *, most_bytes: int = MOST_BYTES
) -> None:
    """Write the folder `out`, and complete `done`, which has the weights to quantize.

    A file has at most `most_bytes` of tensors, or one tensor.

    Raises:
      Misuse: `out` cannot be created, or the engine has no form for a weight.
      Failure: a file that was read back differs from the data that was written.
    """
    items = [_item(entry, done.quantized.get(name), engine) for name, entry in checkpoint.entries.items()]
    configs = _configs(checkpoint, engine, done.quantized, items)
    amaxes = _shared_amaxes(checkpoint, done)
    shards, total = _shards(items, most_bytes), sum(_nbytes(item) for item in items)
    names = [f"model-{i + 1:05}-of-{len(shards):05}{FILE}" for i in range(len(shards))]
    names = [f"model{FILE}"] if len(shards) == 1 else names
    before = sum(item.entry.nbytes for item in items)
    with _new_folder(out) as folder, progress_bar(before) as update:
        read = 0
        for name, shard in zip(names, shards, strict=True):
            tensors = {key: value for item in shard for key, value in item.tensors.items()}
            with (folder / name).open("w+b") as file:
                writer = Writer(file, folder / name, tensors, checkpoint.metadata | {"format": "pt"})
                for item in shard:
                    update(f"{name}: {quote(item.entry.name)}", read)
                    for key, parts in _contents(item, done, seed, amaxes):
                        writer.write(key, parts)
                    read += item.entry.nbytes
                writer.check()
        if len(shards) > 1:
            where = {
                key: name for name, shard in zip(names, shards, strict=True) for item in shard for key in item.tensors
            }
            _write_json(folder / f"model{INDEX}", {"metadata": {"total_size": total}, "weight_map": where})
        _copy_others(checkpoint.path.parent, folder)
        for name, config in configs.items():
            _write_json(folder / name, config)
    done.nbytes = before, total


def _item(entry: Entry, what: Description | None, engine: str) -> _Item:
    """Plan the tensors of an entry. A weight in the engine's format is copied bit for bit."""
    own = {each.name: (each.dtype, each.shape) for each in entry.tensors}
    if what is None:
        return _Item(entry, own)
    try:
        weight = engine_tensors(engine, entry.name, what, op=OP)
    except ValueError as error:
        raise Misuse(str(error).removeprefix(f"{OP}: ")) from None
    is_same = isinstance(entry, QuantizedEntry) and entry.weight.description.format == what.format
    if is_same and {each.name: each.shape for each in weight} == {name: shape for name, (_, shape) in own.items()}:
        return _Item(entry, own)
    return _Item(entry, {each.name: (each.dtype, each.shape) for each in weight}, weight)


def _shared_amaxes(checkpoint: Checkpoint, done: Conversion) -> dict[str, NDArray[Any]]:
    """Return the amax of the merged weight for each NVFP4 weight that engines merge, by its name.

    Weights that keep their codes keep their global scales. Weights that are merged with them get their own, as alone,
    and a remark says that engines take one of them for all.
    """
    found: dict[str, NDArray[Any]] = {}
    weights = done.quantized
    for names in merged_weights({name: what.format for name, what in weights.items()}):
        entries = [checkpoint.entries[name] for name in names]
        coded = [
            each
            for each in entries
            if isinstance(each, QuantizedEntry)
            and each.format_as(weights[each.name].format, weights[each.name].planes) is not None
        ]
        if not coded:
            found |= dict.fromkeys(names, functools.reduce(np.maximum, map(amax_of, entries)))
            continue
        scales = {np.asarray(each.read_plane(scales_only=True).global_scale_inv).tobytes() for each in coded}
        if len(coded) < len(entries) or len(scales) > 1:
            done.remarks.append(
                f"{', '.join(map(quote, names))} have codes with global scales of their own, but vLLM takes one for "
                "all, so its values are wrong; convert the checkpoint that they were made from"
            )
    return found


def _contents(
    item: _Item, done: Conversion, seed: int, amaxes: Mapping[str, NDArray[Any]]
) -> Iterator[tuple[str, Any]]:
    """Yield the name and the parts of each tensor."""
    if item.weight is None:
        for each in item.entry.tensors:
            yield each.name, each.bytes()
        return
    name = item.entry.name
    arrays = arrays_of(item.entry, done.quantized[name], seed, done, amaxes.get(name))
    for tensor in item.weight:
        array: NDArray[Any] = tensor.encode(arrays[key_of("rowwise", tensor.part)], np)
        yield tensor.name, [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data]


def _shards(items: list[_Item], most_bytes: int) -> list[list[_Item]]:
    """Split items, in their order, into files of at most `most_bytes`, or of one item."""
    shards: list[list[_Item]] = [[]]
    size = 0
    for item in items:
        if shards[-1] and size + _nbytes(item) > most_bytes:
            shards.append([])
            size = 0
        shards[-1].append(item)
        size += _nbytes(item)
    return shards


def _nbytes(item: _Item) -> int:
    return sum(Entry(name, *what, Path(), 0).nbytes for name, what in item.tensors.items())


def _configs(
    checkpoint: Checkpoint, engine: str, weights: Mapping[str, Description], items: list[_Item]
) -> dict[str, dict[str, Any]]:
    """Return the contents of the config files. If all weights are copied, so are the config files."""
    found = {name: read_config(checkpoint.path.parent / name) for name in CONFIGS}
    if all(item.weight is None for item in items) and found[CONFIG].get(QUANTIZATION):
        return {}
    others = [item.entry.name for item in items if item.entry.name not in weights and len(item.entry.shape) > 1]
    return {
        name: {**found.get(name, {}), **entry} for name, entry in engine_configs(engine, weights, others, op=OP).items()
    }


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _copy_others(source: Path, folder: Path) -> None:
    """Copy the small files of a model's folder: its configuration and tokenizer."""
    if not (source / CONFIG).is_file():
        return
    for path in source.iterdir():
        is_ours = path.name.endswith(INDEX) or not path.name.endswith(COPIES) or path.name.startswith(".")
        if path.is_file() and not is_ours and path.stat().st_size <= LARGEST_COPY:
            shutil.copyfile(path, folder / path.name)


@contextlib.contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """Create a temporary folder that becomes `out` on success and is deleted on failure."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise Misuse(f"{quote(out)} already exists; name a new folder")
    folder = Path(make_beside(out, tempfile.mkdtemp))
    try:
        yield folder
        folder.chmod(permissions_of(0o777))
        os.replace(folder, out)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
