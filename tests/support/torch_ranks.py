"""Ranks for distributed torch tests: long-lived processes, whose process group serves some cases.

    @on_ranks(1, 3, (2, 2))
    def test_it(fmt): ...  # The body runs on every rank of each world; (2, 2): two replicas of two shards.

Four processes run all cases of a session, over gloo or, on GPUs, NCCL. Each has its own GPU; with
SHARE_GPUS=2 in the environment, two share one, which is slow. Ranks load the test file themselves. If a case hangs, its
test fails with the stack of each rank, and the next case gets new processes. On CPUs, successive cases of as many ranks
share a process group; after a failure, the next case gets a new one.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import gc
import importlib.util
import inspect
import math
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

import pytest

RANKS = 4
TIMEOUT = 150.0  # Seconds for a case; a few times the slowest case on a busy machine.
SHARE_GPUS = int(os.environ.get("SHARE_GPUS", "1"))
GRACE = 10.0  # Seconds for the other ranks after one has failed.
SHARED = 20  # Cases of a process group at most: subgroups of their meshes stay until it is destroyed.
SELDOM = 50_000, 20, 20
"""Thresholds of Python's garbage collection. By default it takes 5 % of the time of tests that trace programs."""

Shape = int | tuple[int, ...]
"""Number of ranks, or the shape of their mesh: (replicas, shards)."""
# Set on a rank: the device for tensors of the current case, the shape of its mesh, and the store of the process group.
device = "cpu"
shape: tuple[int, ...] = ()
_store = ""


def on_ranks(*worlds: Shape) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a test to run its body on every rank, once for each of `worlds`.

    Without `worlds`, another parametrization gives `world`, such as in `support.pairs`.
    """

    def make(case: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(case)
        def test(world: Shape, **arguments: Any) -> None:
            __tracebackhide__ = True
            run(world, case, **arguments)

        world = inspect.Parameter("world", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([world, *inspect.signature(case).parameters.values()])  # type: ignore
        return pytest.mark.parametrize("world", worlds, ids=str)(test) if worlds else test

    return make


def rarely(*worlds: Shape) -> list[Any]:
    """Return slow parameters for `on_ranks`."""
    return [pytest.param(world, marks=pytest.mark.slow) for world in worlds]


def run(world: Shape, case: Callable[..., None] | str, *, on: str = "cpu", **arguments: Any) -> None:
    """Run a case on up to `RANKS` ranks; fail with the tracebacks of failed ranks.

    Args:
      world: number of ranks, or the shape of their mesh.
      case: a function of a test module, or "folder/file.py::name" if the module is not imported.
      on: "cpu" or "cuda"; on "cuda", tests of more ranks than `gpu_ranks` are skipped.
      arguments: picklable values.
    """
    global _pool
    __tracebackhide__ = True
    shape = world if isinstance(world, tuple) else (world,)
    if on == "cuda" and math.prod(shape) > gpu_ranks():
        pytest.skip(f"needs {math.prod(shape)} GPUs, or SHARE_GPUS=2")
    if not isinstance(case, str):
        case = f"{case.__code__.co_filename}::{case.__name__}"
    path, _, name = case.partition("::")
    _pool = _pool or _Pool()
    try:
        file = str(Path(__file__).parents[1] / path)
        _pool.run(_Case(file, name, arguments, shape, on))
    except _Broken as broken:
        _pool.stop()
        _pool = None
        raise AssertionError(str(broken)) from None


def gpu_ranks() -> int:
    """Return the maximum number of ranks on GPUs."""
    import torch

    return min(RANKS, SHARE_GPUS * torch.cuda.device_count())


def mesh() -> Any:
    """Return the mesh of all ranks, for use on a rank. FSDP2's default mesh is on GPUs if there are any."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


class _Case(NamedTuple):
    file: str
    name: str
    arguments: dict[str, Any]
    shape: tuple[int, ...]
    on: str
    store: str = ""


class _Broken(Exception):
    """Ranks cannot run further cases."""


class _Pool:
    def __init__(self) -> None:
        # Ranks are forks of one process that has imported torch, with its compiler. CUDA does not survive a fork.
        multiprocessing.set_forkserver_preload(["qshard.torch_bridge", "torch._inductor.compile_fx"])
        context = multiprocessing.get_context("spawn" if any(Path("/dev").glob("nvidia[0-9]*")) else "forkserver")
        self.folder = tempfile.TemporaryDirectory(prefix="ranks")
        self.cases: list[str] = []  # All that these processes ran: one may have spoiled the memory of a later one.
        self.world, self.left, self.store = 0, 0, ""  # Of the process group that exists.
        self.ranks = []
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs, self.folder.name), daemon=True)
            process.start()
            theirs.close()
            self.ranks.append((process, ours))

    def run(self, case: _Case) -> None:
        __tracebackhide__ = True
        world = math.prod(case.shape)
        self.cases.append(f"{Path(case.file).name}::{case.name} {case.shape} {case.arguments}")
        if world != self.world or not self.left:
            self.world, self.left, self.store = world, SHARED, f"file://{self.folder.name}/store{len(self.cases)}"
        self.left = self.left - 1 if case.on == "cpu" else 0
        case = case._replace(store=self.store)
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
                    process = self.ranks[rank][0]
                    process.join(GRACE)
                    failure = f"{self._stack(rank)}\nexit code {process.exitcode}, died"
                if failure is not None:
                    failures.append(f"rank {rank} of {world}: {failure}")
                    deadline = min(deadline, time.monotonic() + GRACE)
        if waiting:
            where = "\n".join(f"rank {rank} stood at:\n{self._stack(rank)}" for rank in waiting.values())
            failures += [f"ranks {sorted(waiting.values())} did not finish", where]
        if waiting or any(failure.endswith("died") for failure in failures):
            raise _Broken("\n".join([*failures, "the last cases of these processes:", *self.cases[-20:]]))
        if failures:
            self.left = 0
            raise AssertionError("\n".join(failures))

    def _stack(self, rank: int) -> str:
        process = self.ranks[rank][0]
        if process.pid is not None and process.is_alive():
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
    """Return FSDP2's local rows on this rank."""
    import torch.distributed as dist

    each = -(-rows // dist.get_world_size())
    start = min(rows, each * dist.get_rank())
    return slice(start, min(rows, start + each))


@atexit.register
def _stop() -> None:
    if _pool is not None:
        _pool.stop()


def _serve(rank: int, connection: Connection, folder: str) -> None:
    """Run cases on a rank until its connection closes."""
    stack = Path(folder, f"stack{rank}").open("w")  # noqa: SIM115 - faulthandler writes to it until the end.
    faulthandler.register(signal.SIGUSR1, file=stack)
    faulthandler.enable(file=stack)
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    if SHARE_GPUS > 1:  # NCCL allows one rank per GPU and host, so ranks pose as several hosts and use sockets.
        os.environ.update(NCCL_HOSTID=str(rank), NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    import torch

    from qshard import _ffi

    gc.set_threshold(*SELDOM)
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
                sys.modules[spec.name] = modules[case.file]  # Where Dynamo looks for functions that it traces.
                spec.loader.exec_module(modules[case.file])
                gc.collect()  # As in conftest.py: tests that count tensors collect all garbage.
                gc.freeze()
            _run_case(case, inspect.unwrap(getattr(modules[case.file], case.name)), rank)
            connection.send(None)
        except BaseException as error:
            frames = traceback.TracebackException.from_exception(error)
            frames.stack[:] = [frame for frame in frames.stack if frame.filename != __file__] or frames.stack
            connection.send("".join(frames.format()))


def _run_case(case: _Case, function: Callable[..., None], rank: int) -> None:
    import torch
    import torch.distributed as dist

    global device, shape
    device, shape = case.on, case.shape
    if device == "cuda":
        gc.collect()  # Garbage of earlier cases would be freed while this one measures memory.
        torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.manual_seed(0)
    if case.store != _store:
        _leave()
        _join(case, rank)
    stays = False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # FSDP2 of torch 2.13 calls collectives that torch 2.13 has deprecated.
            warnings.filterwarnings("ignore", r".*(all_gather_into_tensor|reduce_scatter_tensor).*", FutureWarning)
            # torch.compile imports torch.utils.mkldnn.
            warnings.filterwarnings("ignore", ".torch.jit.script_method. is deprecated", DeprecationWarning)
            # Raised by groups that are not bound to a device.
            warnings.filterwarnings("ignore", r".*barrier\(\): using the device under current context", UserWarning)
            function(**case.arguments)
            dist.barrier()
        stays = device == "cpu"
    finally:
        if not stays:
            _leave()  # After a failure, the other ranks fail in a collective or in the barrier.


def _join(case: _Case, rank: int) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    global _store
    # Subgroups are split off a group that is bound to a device; torch 2.11 crashes there if the process has had other
    # groups. Two ranks have no subgroups.
    is_bound = device == "cuda" and math.prod(case.shape) <= 2
    dist.init_process_group(
        {"cpu": "gloo", "cuda": "nccl"}[device],
        init_method=case.store,
        rank=rank,
        world_size=math.prod(case.shape),
        timeout=timedelta(seconds=TIMEOUT),
        device_id=torch.device(device, rank % torch.cuda.device_count()) if is_bound else None,
    )
    _store = case.store


def _leave() -> None:
    import torch.distributed as dist

    global _store
    _store = ""
    if dist.is_initialized():
        dist.destroy_process_group()
    # DTensor caches specs of results by meshes that compare equal; a later case would get the groups of this one.
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
