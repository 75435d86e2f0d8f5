"""Benchmarks of many cases on several ranks, a process each: what fails takes its own case with it, and no other."""

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
Measure = Callable[[Any, argparse.Namespace], Mapping[str, Row]]
"""Given a case and the arguments, on every rank: rows by the file that each is for. Those of rank 0 count."""


def measure_cases(measure: Measure, cases: Sequence[Any], arguments: argparse.Namespace, device: str = "cuda") -> int:
    """Measures each case on `arguments.ranks` ranks and writes all rows there are after each; the status to exit with.

    One process a rank measures all of them. One that fails ends those of all ranks, for others may wait for it in a
    collective, and nothing is sure of a GPU after an error. New ones go on with the next case.

    Args:
      measure: a function of a module, given to other processes.
      cases: what pickles; it is shown where one fails.
    """
    os.environ.setdefault("NCCL_DEBUG", "WARN")
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        done: list[Mapping[str, Row] | None] = []
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
            for name, row in by_case[-1].items():
                print(row, flush=True)
                rows.write(name, machine, [found[name] for found in by_case], quiet=True)
        dist.barrier()  # None fails in the next case before this one is written.
    dist.destroy_process_group()


def _read(folder: str) -> list[Mapping[str, Row] | None]:
    found: list[Mapping[str, Row] | None] = pickle.loads(Path(folder, "done").read_bytes())
    return found


def _write(folder: str, done: list[Mapping[str, Row] | None]) -> None:
    """What became of the cases so far: rows, or None where one failed."""
    path = Path(folder, "done")
    path.with_suffix(".new").write_bytes(pickle.dumps(done))
    path.with_suffix(".new").replace(path)
