"""Runner for benchmarks with many cases on several ranks: a case that fails does not stop the others."""

from __future__ import annotations

import argparse
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

import rows

Row = dict[str, object]
Rows = Row | list[Row]
Measure = Callable[[Any, argparse.Namespace], Mapping[str, Rows]]
"""Measures a case on every rank, given the arguments. Returns rows per results file. The rows of rank 0 count."""


def measure_cases(measure: Measure, cases: Sequence[Any], arguments: argparse.Namespace, device: str = "cuda") -> int:
    """Measure each case on `arguments.ranks` ranks, and write all rows so far after each case.

    One process per rank measures all cases. If one fails, all ranks are ended, because others may wait for it in a
    collective, and the state of a GPU after an error is unknown. New processes continue with the next case.

    Args:
      measure: a module-level function, which is pickled.
      cases: picklable values, printed if they fail.
      arguments: the parsed command line, with `ranks`.
      device: "cuda" or "cpu".

    Returns:
      The exit status: 1 if any case failed.
    """
    os.environ.setdefault("NCCL_DEBUG", "WARN")
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        done: list[Mapping[str, Rows] | None] = []
        while len(done) < len(cases):
            _write(folder, done)
            try:
                torch.multiprocessing.spawn(_rank, (measure, cases, arguments, device, folder), nprocs=arguments.ranks)
                break
            except (ProcessRaisedException, ProcessExitedException) as error:
                done = _read(folder)
                if len(done) == len(cases):
                    raise
                failed.append(str(cases[len(done)]))
                print(f"{failed[-1]}: {error}", file=sys.stderr, flush=True)
                done.append(None)
    if failed:
        print(f"{len(failed)} of {len(cases)} failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _rank(
    rank: int, measure: Measure, cases: Sequence[Any], arguments: argparse.Namespace, device: str, folder: str
) -> None:
    done = _read(folder)
    given: dict[str, Any] = {"world_size": arguments.ranks, "rank": rank}
    if device == "cuda":
        torch.cuda.set_device(rank)
        given["device_id"] = torch.device("cuda", rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, f"file://{folder}/store{len(done)}", **given)
    machine = torch.cuda.get_device_name() if device == "cuda" else rows.cpu_name()
    for case in cases[len(done) :]:
        done.append(measure(case, arguments))
        if rank == 0:
            _write(folder, done)
            by_case = [found for found in done if found is not None]
            for name, last in by_case[-1].items():
                print(*_listed(last), sep="\n", flush=True)
                rows.write(name, machine, [row for found in by_case for row in _listed(found[name])], quiet=True)
        dist.barrier()  # no rank may fail in the next case before this one is written
    dist.destroy_process_group()


def _listed(rows: Rows) -> list[Row]:
    return rows if isinstance(rows, list) else [rows]


def _read(folder: str) -> list[Mapping[str, Rows] | None]:
    found: list[Mapping[str, Rows] | None] = pickle.loads(Path(folder, "done").read_bytes())
    return found


def _write(folder: str, done: list[Mapping[str, Rows] | None]) -> None:
    """Store the results so far: rows of each case, or None if it failed."""
    path = Path(folder, "done")
    path.with_suffix(".new").write_bytes(pickle.dumps(done))
    path.with_suffix(".new").replace(path)
