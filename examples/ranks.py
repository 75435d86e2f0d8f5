"""Launcher of one process per rank on this machine, which always ends all of them together."""

import multiprocessing
import os
import queue
import signal
import sys
import tempfile
from collections.abc import Callable, Generator
from typing import Any

import torch.multiprocessing as mp


def launch(worker: Callable[..., None], ranks: int, *arguments: object) -> Generator[tuple[Any, ...]]:
    """Run `worker(rank, ranks, rendezvous, *arguments, events)` in `ranks` processes, and yield their `events`.

    An error in one rank ends the others and is raised here. Ctrl-C, or closing this iterator, also ends them. They are
    killed without output, because a rank that waits in a collective cannot unwind. So always close the iterator.
    """
    if sys.platform == "linux":  # gloo resolves this host's name, which may fail in a bare container
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    events = multiprocessing.get_context("spawn").Queue()
    with tempfile.TemporaryDirectory() as directory:
        # A Ctrl-C while ranks start would print one traceback each, so they start with SIGINT blocked.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        started = (worker, ranks, f"file://{directory}/rendezvous", *arguments, events)
        processes = mp.spawn(_die_silently, started, nprocs=ranks, join=False, daemon=True)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        try:
            running = True
            while running:
                running = not processes.join(timeout=0)  # raises a rank's exception
                try:
                    while True:
                        yield events.get(timeout=0.2)
                except queue.Empty:
                    pass
        finally:
            for process in processes.processes:
                process.kill()
                process.join()


def _die_silently(rank: int, worker: Callable[..., None], *arguments: object) -> None:
    """Run `worker` in a process that ends as soon as it is done or interrupted."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    worker(rank, *arguments)
    # Skip Python's exit: a gloo thread that is not joined by then occasionally ends a process with SIGABRT.
    events: Any = arguments[-1]
    events.close()
    events.join_thread()
    os._exit(0)
