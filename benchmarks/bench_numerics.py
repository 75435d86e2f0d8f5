"""`qshard.numerics.stats` of 4096 x 4096 float32, for each format and option: time and additional memory.

Each row is measured in its own process, on `--threads` cores. Seconds are the best of `--rounds` calls after a warm-up.
Memory is the peak of the process minus its memory with the array, in multiples of the array. `us_per_element` is
compared with the NumPy implementation of the same formulas over `qshard.reference`, the oracle of the tests, on a
matrix of 512 x 512 in the same process. `load` is the machine's load before the row. `cpu_seconds` is the least CPU
time of all threads in a call, which the load does not affect.

    python benchmarks/bench_numerics.py [--rounds 5] [--threads 2] [--formats NVFP4 ...]
"""

from __future__ import annotations

import argparse
import csv
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import rows

SIZE, SMALL = 4096, 512
COLUMNS = (
    "operation",
    "shape",
    "threads",
    "load",
    "seconds",
    "cpu_seconds",
    "memory_per_array",
    "us_per_element",
    "reference_us_per_element",
    "times_faster",
)


def cases() -> list[tuple[str, str]]:
    """Return (format, usage) names: all of `FORMATS`, then options that need other steps."""
    from qshard.formats import FORMATS, MXFP8_E4M3, NVFP4, NVFP4_16x16, Usage

    named = [(fmt, usage) for fmt in FORMATS.values() for usage in Usage.BOTH]
    options = [
        (MXFP8_E4M3.with_options(scale_rounding="floor"), Usage.ROWWISE),
        (NVFP4.with_options(global_scale="row"), Usage.ROWWISE),
        (NVFP4.with_options(rounding="stochastic"), Usage.ROWWISE),
        (NVFP4.with_options(four_over_six="mse"), Usage.ROWWISE),
        (NVFP4_16x16.with_options(four_over_six="mae"), Usage.ROWWISE),
        (NVFP4.with_options(four_over_six="mse"), Usage.COLUMNWISE),
        (NVFP4.with_options(rounding="stochastic"), Usage.COLUMNWISE),
        (NVFP4.with_options(hadamard=True), Usage.COLUMNWISE),
        (NVFP4.with_options(hadamard=True, rounding="stochastic"), Usage.COLUMNWISE),
    ]
    return [(str(fmt), usage.name) for fmt, usage in named + options]


def seconds(call: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Return the least wall-clock time and the least CPU time of all threads."""

    def time_once() -> tuple[float, float]:
        start, busy = time.perf_counter(), time.process_time()
        call()
        return time.perf_counter() - start, time.process_time() - busy

    time_once()
    wall, cpu = zip(*(time_once() for _ in range(rounds)), strict=True)
    return min(wall), min(cpu)


def measure(name: str, usage_name: str, rounds: int, threads: int) -> dict[str, object]:
    """Measure one row. `ru_maxrss` never decreases, so memory is measured first."""
    import numpy as np

    import qshard
    from qshard._core.validation import as_format
    from qshard.numerics import stats

    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from support.stats import expected_stats

    load = round(os.getloadavg()[0], 1)
    qshard.set_num_threads(threads)
    fmt, usage = as_format(name, "bench"), qshard.Usage[usage_name]
    x = np.random.default_rng(0).standard_normal((SIZE, SIZE), np.float32)
    small = np.ascontiguousarray(x[:SMALL, :SMALL])
    stats(small, fmt, usage)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    stats(x, fmt, usage)
    memory = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / x.nbytes
    best, cpu = seconds(lambda: stats(x, fmt, usage), rounds)
    reference, _ = seconds(lambda: expected_stats(small, fmt, usage), 2)
    return {
        "operation": f"stats {name} {usage_name.lower()}",
        "shape": f"{SIZE}x{SIZE}",
        "threads": threads,
        "load": load,
        "seconds": round(best, 3),
        "cpu_seconds": round(cpu, 3),
        "memory_per_array": round(memory, 2),
        "us_per_element": round(best / x.size * 1e6, 4),
        "reference_us_per_element": round(reference / small.size * 1e6, 3),
        "times_faster": round(reference / small.size / (best / x.size)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--formats", nargs="*", help="only those of these names; writes no file")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    if options.one:
        row = measure(*options.one, options.rounds, options.threads)
        csv.DictWriter(sys.stdout, row).writerow(row)
        return
    table = []
    for name, usage in cases():
        if options.formats and name not in options.formats:
            continue
        command = [sys.executable, __file__, "--one", name, usage]
        command += ["--rounds", str(options.rounds), "--threads", str(options.threads)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            raise SystemExit(f"bench_numerics: {name} {usage}\n{run.stderr}")
        print(run.stdout, end="", flush=True)
        table.append(dict(zip(COLUMNS, next(csv.reader([run.stdout])), strict=True)))
    if not options.formats:
        rows.write("numerics", rows.cpu_name(), table)


if __name__ == "__main__":
    main()
