"""Runner for benchmarks in JAX: one process for each kind, so that peak memory is the peak of its step."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import rows

Row = dict[str, Any]


def has_device() -> bool:
    """Return whether there is a GPU, or `JAX_PLATFORMS=cpu` needs none. Does not start JAX."""
    smi = shutil.which("nvidia-smi")
    has_gpu = smi is not None and not subprocess.run([smi, "-L"], capture_output=True, check=False).returncode
    return has_gpu or os.environ.get("JAX_PLATFORMS") == "cpu"


def measure_kinds(
    script: str,
    kinds: Sequence[str],
    arguments: Sequence[str],
    out: str,
    complete: Callable[[Row, list[Row]], None] = lambda row, others: None,
) -> int:
    """Run `script --one KIND` for each kind, and write all rows so far after each. A failure does not stop the others.

    Args:
      script: prints the row of one kind as JSON in its last line, with the machine.
      kinds: the kinds.
      arguments: further arguments of the script.
      out: the file of results, without .csv.
      complete: adds columns to a row, given the earlier rows.

    Returns:
      The exit status: 1 if any kind failed.
    """
    found: list[Row] = []
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    status = 0
    for kind in kinds:
        command = [sys.executable, script, "--one", kind, *arguments]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if result.returncode:
            print(f"{kind}: {result.stderr[-2000:]}", file=sys.stderr)
            status = 1
            continue
        row = json.loads(result.stdout.splitlines()[-1])
        machine = str(row.pop("machine"))
        complete(row, found)
        found.append(row)
        print(row, flush=True)
        rows.write(out, machine, found, quiet=True)
    return status


def peak_gib(device: Any) -> str:
    """Return the peak of XLA's allocator. A CPU has none: 0."""
    return f"{(device.memory_stats() or {}).get('peak_bytes_in_use', 0) / 2**30:.2f}"
