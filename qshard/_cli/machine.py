"""This machine: facts for the report of a bug, and times of the CPU kernels beside a copy of the same run."""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

import qshard
from qshard._core import environment
from qshard.formats import E4M3, FLOATS, Format, Usage

LIBRARIES = ("click", "rich", "safetensors")
SMI_SECONDS = 20
SMI = ("nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader")


def machine_facts() -> dict[str, object]:
    """All facts, by name."""
    from qshard import _ffi

    return {
        "build_info": environment.build_info(),
        "version": environment.__version__,
        "build": dict(_ffi.build_info),
        "simd": _ffi.simd(),
        "cuda_built": bool(_ffi.cuda_built),
        "libraries": [f"{name} {metadata.version(name)}" for name in LIBRARIES],
        "processor": processor(),
        "threads": f"{qshard.num_threads()} of {os.cpu_count()}",
        "gpus": gpus(),
    }


def processor() -> str:
    """The name of the processor, as Linux has it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def gpus() -> list[str]:
    """Name, compute capability and driver of each GPU, as nvidia-smi has them; why not, where it does not."""
    if shutil.which(SMI[0]) is None:
        return [f"none: no {SMI[0]}"]
    try:
        done = subprocess.run(SMI, capture_output=True, text=True, check=False, timeout=SMI_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"not known: {error}"]
    if done.returncode:
        return [f"not known: {SMI[0]} ended with {done.returncode}"]
    return [line.strip() for line in done.stdout.splitlines()]


SLICE = 5e-3
"""Seconds for which each runs in a round."""
COPY = "copy float32"
SEED = 0

Contenders = dict[str, tuple[float, Callable[[], object]]]
"""Name -> the fewest bytes that it must read and write, and a call."""


@dataclass(frozen=True)
class Timing:
    """One contender: the median over rounds."""

    name: str
    us: float
    gb_per_s: float
    percent_of_copy: float


def contenders(size: int, formats: list[Format]) -> Contenders:
    """The copy, ops on single tensors, and whole quantizations."""
    from qshard._core import quantize_steps
    from qshard.numerics import _kernels as kernels

    x32 = np.random.default_rng(SEED).standard_normal((size, size), np.float32)
    arrays = {name: x32.astype(kernels.dtype_of(name)) for name in FLOATS[:2]}
    out, scale, count = np.empty_like(x32), np.array(64, np.float32), x32.size
    codes = kernels.ops.cast_tensor(x32, scale, element=E4M3.name)
    found: Contenders = {COPY: (8.0 * count, lambda: np.copyto(out, x32))}
    for name, x in arrays.items():
        each = x.itemsize
        for op, nbytes, inputs, options_of, dtype in (
            ("amax_tensor", each, (x,), {}, None),
            ("cast_tensor", each + 1, (x, scale), {"element": E4M3.name}, None),
            ("cast_transpose", each + 2, (x, scale), {"element": E4M3.name, "batch": 0}, None),
            ("dequantize", each + 1, (codes, scale), {"element": E4M3.name}, name),
        ):
            call = kernels.into(op, inputs, options_of, dtype)
            found[f"{op} {name}"] = float(nbytes * count), call
    found["transpose uint8"] = 2.0 * count, kernels.into("transpose", (codes,), {"batch": 0}, None)
    x16 = arrays["bfloat16"]
    for fmt in formats:
        draws = kernels.draws("qshard bench", SEED) if fmt.stochastic else None

        def quantize(fmt: Format = fmt, draws: Any = draws) -> Any:
            return quantize_steps.quantize(kernels.ops, x16, fmt, Usage.ROWWISE, draws=draws)

        parts = quantize()[Usage.ROWWISE]
        stored = sum(part.nbytes for part in parts if part is not None)
        found[f"quantize bfloat16 to {fmt}"] = float(x16.nbytes + stored), quantize
    return found


def timings(found: Contenders, rounds: int) -> list[Timing]:
    """Each once a round, as often as fills `SLICE`."""
    repeats, times = {}, {}
    for name, (_, call) in found.items():
        call()
        start = time.perf_counter()
        call()
        repeats[name], times[name] = max(1, int(SLICE / (time.perf_counter() - start))), list[float]()
    for _ in range(rounds):
        for name, (_, call) in found.items():
            start = time.perf_counter()
            for _ in range(repeats[name]):
                call()
            times[name].append((time.perf_counter() - start) / repeats[name])
    seconds = {name: statistics.median(each) for name, each in times.items()}
    rate = {name: found[name][0] / seconds[name] / 1e9 for name in found}
    return [Timing(name, seconds[name] * 1e6, rate[name], 100 * (rate[name] / rate[COPY])) for name in found]
