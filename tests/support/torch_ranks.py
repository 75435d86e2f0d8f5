"""Ranks for distributed torch tests: processes that stay, and form a new process group for every case.

`run(world, case, **arguments)` calls `case(**arguments)` on `world` ranks with the group up, and fails with the
tracebacks of the ranks that failed. A case is a function at the top level of a test module; ranks load that file
themselves. Four processes import torch once and serve all cases of a test session, over gloo or, on GPUs, NCCL.

A case that hangs shows where each rank stood, and takes only its own test with it: the next case gets new processes.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib.util
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

RANKS = 4
TIMEOUT = 150.0  # Of a case, in seconds; a few times what the slowest takes on a busy machine.
GRACE = 10.0  # How long the others may take once one rank has failed.


device = "cpu"  # On a rank: where the case that runs is to put its tensors.


def run(world: int, case: Callable[..., None] | str, *, on: str = "cpu", **arguments: Any) -> None:
    """Runs a case on ranks 0 .. world - 1.

    Args:
      world: number of ranks, at most `RANKS`.
      case: a function of a test module; "folder/file.py::name" for one of a module that is not imported.
      on: "cpu", or "cuda" with a GPU for each rank.
      arguments: what pickles.
    """
    global _pool
    if _pool is None:
        _pool = _Pool()
    if isinstance(case, str):
        path, _, name = case.partition("::")
        file = str(Path(__file__).parents[1] / path)
    else:
        file, name = str(sys.modules[case.__module__].__file__), case.__name__
    try:
        _pool.run(world, _Case(file, name, arguments, world, on))
    except _Broken as broken:
        _pool.stop()
        _pool = None
        raise AssertionError(str(broken)) from None


def mesh(shape: tuple[int, ...] | None = None) -> Any:
    """On a rank: a mesh of all ranks, one group of shards or replicas of such groups. FSDP2's own would be of GPUs."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    shape = shape or (dist.get_world_size(),)
    return init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


class _Case(NamedTuple):
    file: str
    name: str
    arguments: dict[str, Any]
    world: int
    on: str
    store: str = ""


class _Broken(Exception):
    """The ranks can serve no more cases."""


class _Pool:
    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory(prefix="ranks")
        self.cases = 0
        self.ranks = []
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs, self.folder.name), daemon=True)
            process.start()
            theirs.close()
            self.ranks.append((process, ours))

    def run(self, world: int, case: _Case) -> None:
        self.cases += 1
        case = case._replace(store=f"file://{self.folder.name}/store{self.cases}")
        for _, connection in self.ranks[:world]:
            connection.send(case)
        waiting = {connection: rank for rank, (_, connection) in enumerate(self.ranks[:world])}
        failures: list[str] = []
        deadline = time.monotonic() + TIMEOUT
        while waiting and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(waiting), timeout=left):
                rank = waiting.pop(connection)
                try:
                    failure = connection.recv()
                except EOFError:
                    failure = "died"
                if failure is not None:
                    failures.append(f"rank {rank} of {world}: {failure}")
                    deadline = min(deadline, time.monotonic() + GRACE)
        if waiting:
            where = "\n".join(f"rank {rank} stood at:\n{self._stack(rank)}" for rank in waiting.values())
            raise _Broken("\n".join([*failures, f"ranks {sorted(waiting.values())} did not finish", where]))
        if any(failure.endswith("died") for failure in failures):
            raise _Broken("\n".join(failures))
        if failures:
            raise AssertionError("\n".join(failures))

    def _stack(self, rank: int) -> str:
        process = self.ranks[rank][0]
        if process.pid is None or not process.is_alive():
            return "(dead)"
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return Path(self.folder.name, f"stack{rank}").read_text()

    def stop(self) -> None:
        for process, connection in self.ranks:
            connection.close()
            process.kill()
            process.join()
        self.folder.cleanup()


_pool: _Pool | None = None


def own_rows(rows: int) -> slice:
    """What FSDP2 gives this rank of so many rows."""
    import torch.distributed as dist

    each = -(-rows // dist.get_world_size())
    start = min(rows, each * dist.get_rank())
    return slice(start, min(rows, start + each))


@atexit.register
def _stop() -> None:
    if _pool is not None:
        _pool.stop()


def _serve(rank: int, connection: Connection, folder: str) -> None:
    """What a rank does, until its connection closes."""
    stack = Path(folder, f"stack{rank}").open("w")  # noqa: SIM115 - faulthandler writes to it until the end.
    faulthandler.register(signal.SIGUSR1, file=stack)
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    import torch

    from qshard import _ffi

    torch.set_num_threads(1)
    _ffi.set_num_threads(1)
    modules: dict[str, Any] = {}
    while True:
        try:
            case = connection.recv()
        except EOFError:
            return
        try:
            if case.file not in modules:
                spec = importlib.util.spec_from_file_location(Path(case.file).stem, case.file)
                assert spec is not None
                assert spec.loader is not None
                modules[case.file] = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(modules[case.file])
            _run_case(case, getattr(modules[case.file], case.name), rank)
            connection.send(None)
        except BaseException:
            connection.send(traceback.format_exc())


def _run_case(case: _Case, function: Callable[..., None], rank: int) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    global device
    device = case.on
    if device == "cuda":
        torch.cuda.set_device(rank)
    torch.manual_seed(0)
    dist.init_process_group(
        {"cpu": "gloo", "cuda": "nccl"}[device],
        init_method=case.store,
        rank=rank,
        world_size=case.world,
        timeout=timedelta(seconds=TIMEOUT),
        device_id=torch.device(device, rank) if device == "cuda" else None,
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # FSDP2 of torch 2.13 calls collectives that torch 2.13 has deprecated.
            warnings.filterwarnings("ignore", r".*(all_gather_into_tensor|reduce_scatter_tensor).*", FutureWarning)
            # torch.compile imports torch.utils.mkldnn.
            warnings.filterwarnings("ignore", ".torch.jit.script_method. is deprecated", DeprecationWarning)
            function(**case.arguments)
            dist.barrier()
    finally:
        dist.destroy_process_group()
