"""Start one process a rank on this machine, and end all of them together whatever happens."""

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
    """Run `worker(rank, ranks, rendezvous, *arguments, events)` in `ranks` processes; yield what they put in `events`.

    An error in one rank ends the others and is raised here. Ctrl-C, or closing this iterator, ends them too: they die
    at once and silently, since a rank that waits for another one in a collective could not unwind. So close it.
    """
    if sys.platform == "linux":  # gloo looks for the address of this host's name, which a bare container may not have
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    events = multiprocessing.get_context("spawn").Queue()
    with tempfile.TemporaryDirectory() as directory:
        # A Ctrl-C while the ranks start would print a traceback for each, so they start with it blocked.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        started = (worker, ranks, f"file://{directory}/rendezvous", *arguments, events)
        processes = mp.spawn(_die_silently, started, nprocs=ranks, join=False, daemon=True)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        try:
            running = True
            while running:
                running = not processes.join(timeout=0)  # raises what a rank raised
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
    """`worker`, in a process that ends as soon as it is done or interrupted."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    worker(rank, *arguments)
    # Not by way of Python's end: a thread that gloo has not joined by then ends a process with SIGABRT, now and then.
    events: Any = arguments[-1]
    events.close()
    events.join_thread()
    os._exit(0)
