"""Facts about this machine for bug reports, and timings of the CPU kernels relative to a memory copy."""

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
        "grouped products": environment.describe_grouped(),
    }


def processor() -> str:
    """Return the name of the processor from /proc/cpuinfo, else from `platform`."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def gpus() -> list[str]:
    """Return name, compute capability and driver of each GPU from nvidia-smi, or the reason why they are unknown."""
    if shutil.which(SMI[0]) is None:
        return [f"none: no {SMI[0]}"]
    try:
        done = subprocess.run(SMI, capture_output=True, text=True, check=False, timeout=SMI_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"unknown: {error}"]
    if done.returncode:
        return [f"unknown: {SMI[0]} ended with {done.returncode}"]
    return [line.strip() for line in done.stdout.splitlines()]


SLICE = 5e-3  # seconds that each contender runs per round
COPY = "copy float32"
SEED = 0

Contenders = dict[str, tuple[float, Callable[[], object]]]
"""Name -> (fewest bytes that the call must read and write, the call)."""


@dataclass(frozen=True)
class Timing:
    """Timing of one contender: medians over rounds."""

    name: str
    us: float
    gb_per_s: float
    percent_of_copy: float


def contenders(size: int, formats: list[Format]) -> Contenders:
    """Return the calls to time: the copy, ops on single tensors, and whole quantizations."""
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
            call = kernels.call_into(op, inputs, options_of, dtype)
            found[f"{op} {name}"] = float(nbytes * count), call
    found["transpose uint8"] = 2.0 * count, kernels.call_into("transpose", (codes,), {"batch": 0}, None)
    x16 = arrays["bfloat16"]
    for fmt in formats:
        philox = kernels.philox("qshard bench", SEED) if fmt.stochastic else None

        def quantize(fmt: Format = fmt, philox: Any = philox) -> Any:
            return quantize_steps.quantize(kernels.ops, x16, fmt, Usage.ROWWISE, philox=philox)

        parts = quantize()[Usage.ROWWISE]
        stored = sum(part.nbytes for part in parts if part is not None)
        found[f"quantize bfloat16 to {fmt}"] = float(x16.nbytes + stored), quantize
    return found


def timings(found: Contenders, rounds: int) -> list[Timing]:
    """Time the contenders in turn, each for about `SLICE` seconds per round."""
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
