"""The `qshard` command, in this process or a new one, and safetensors files as bytes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "I8": np.int8,
    "I32": np.int32,
    "U32": np.uint32,
    "I64": np.int64,
    "U8": np.uint8,
    "BOOL": np.bool_,
    "C64": np.complex64,
}


COLUMNS = {"COLUMNS": "200"}
"""Terminal width for the command."""


def qshard(*arguments: object, limits: str = "", **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command in this process, which saves imports, or in a new one if it has limits or options.

    Args:
      arguments: command line arguments.
      limits: shell commands to run first. (This process has threads and must not fork.)
      options: options of `subprocess.run`; `env` is added to the environment.
    """
    if not limits and not options:
        return in_this_process(*map(str, arguments))
    environment = os.environ | COLUMNS | {"OMP_NUM_THREADS": "1"} | options.pop("env", {})
    command = [sys.executable, "-P", "-m", "qshard", *map(str, arguments)]
    if limits:
        command = ["bash", "-c", f'{limits} && exec "$@"', "bash", *command]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=250, **options)


def in_this_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    from qshard._cli import main

    with signals_restored(), stream() as out, stream() as error, mock.patch.dict(os.environ, COLUMNS):
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            status = main(arguments)
            out.flush()
            error.flush()
        texts = [each.buffer.getvalue().decode() for each in (out, error)]
    return subprocess.CompletedProcess(arguments, status, *texts)


def stream() -> io.TextIOWrapper:
    """Return a replacement for standard output, which the command reconfigures."""
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="\n")


@contextlib.contextmanager
def signals_restored() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def refused(*arguments: object, status: int = 2, **options: Any) -> str:
    """Run a command that must fail with a single line, and return that line."""
    done = qshard(*arguments, **options)
    assert (done.returncode, done.stdout) == (status, ""), done
    assert done.stderr.startswith("qshard: ")
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr.removeprefix("qshard: ").removesuffix("\n")


def header_of(arrays: dict[str, NDArray[Any]], metadata: dict[str, str] | None = None) -> dict[str, Any]:
    names = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for name, array in arrays.items():
        header[name] = {"dtype": names[array.dtype], "shape": array.shape, "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    return header


def file_of(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """Return the bytes of a file with `header` as bytes or JSON. `length` overrides the header's length field."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def write(path: Path, arrays: dict[str, NDArray[Any]], metadata: dict[str, str] | None = None) -> Path:
    """Write a safetensors file without the library."""
    data = b"".join(array.tobytes() for array in arrays.values())
    path.write_bytes(file_of(header_of(arrays, metadata), data))
    return path


def read(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Read a safetensors file without the library."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    arrays = {}
    for name, each in header.items():
        first, last = each["data_offsets"]
        part = np.frombuffer(raw[8 + length + first : 8 + length + last], DTYPES[each["dtype"]])
        arrays[name] = part.reshape(each["shape"])
    return arrays, metadata


def sharded(folder: Path, shards: list[dict[str, NDArray[Any]]], **changes: str) -> Path:
    """Write a Hugging Face checkpoint folder. `changes` overrides the files of names in the index."""
    folder.mkdir(exist_ok=True)
    where = {}
    for i, arrays in enumerate(shards):
        name = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        write(folder / name, arrays, {"format": "pt"})
        where |= dict.fromkeys(arrays, name)
    (folder / "config.json").write_text("{}")
    index = {"metadata": {"total_size": 1}, "weight_map": where | changes}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def numbers(shape: tuple[int, ...] = (64, 64), seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_t(4, shape).astype(np.float32)


def small_model(path: Path) -> Path:
    """Write layers, and tensors that are not layers: a norm, a shape that most formats reject, integers."""
    arrays = {f"layers.{i}.w": numbers((64, 96 + 32 * i), i) for i in range(4)}
    arrays |= {"norm": np.ones(64, np.float32), "odd": numbers((33, 50)), "ids": np.arange(64).reshape(8, 8)}
    return write(path, arrays)


def ok(*arguments: object) -> str:
    """Run a command that must succeed, and return its output."""
    done = qshard(*arguments)
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


def reported(path: Path, *options: object) -> Any:
    """Return the report as JSON."""
    return json.loads(ok("report", path, "--json", *options))
