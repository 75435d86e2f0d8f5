"""Collectives that overlap computation: on a CUDA stream of their own, or in the threads of the CPU backend."""

from __future__ import annotations

from collections.abc import Iterator, Set

import torch
import torch.distributed as dist

Steps = Iterator[dist.Work | None]
"""An iterator that starts a collective, yields it, and continues when it has finished; any number of times."""


class Pending:
    """A collective that may still run. Nothing that it reads or writes is freed before `wait`.

    On CUDA `event` is the end of all steps, and `computing` are the streams that computations were seen on. A CPU
    backend has a running collective, `work`, and `wait` runs the remaining steps.
    """

    def __init__(
        self,
        steps: Steps,
        work: dist.Work | None = None,
        event: torch.cuda.Event | None = None,
        computing: Set[torch.cuda.Stream] = frozenset(),
    ):
        self._steps, self._work, self._event, self._computing = steps, work, event, computing

    def wait(self) -> None:
        """Make the compute streams wait on CUDA, not the host. On CPUs, wait and run the remaining steps.

        All compute streams wait: memory returns to the stream that allocated it, which may not be the current one.
        Autograd, for example, accumulates gradients on a stream of its own choice.
        """
        if self._event is not None:
            for stream in {torch.cuda.current_stream(self._event.device), *self._computing}:
                stream.wait_event(self._event)
        while self._work is not None:
            self._work.wait()
            self._work = next(self._steps, None)


class Channel:
    """Runs steps in the order of `begin`, each after all earlier work of the current stream.

    `computing` collects the streams that were current at a `begin`; channels share the set.
    """

    def __init__(self, device: torch.device, computing: set[torch.cuda.Stream]):
        self._device, self._computing = device, computing
        self._stream: torch.cuda.Stream | None = None
        self.asynchronous = device.type != "cuda"  # On CUDA the stream orders collectives.

    def begin(self, steps: Steps) -> Pending:
        """Start steps. On CUDA they all run on the stream of the channel; on CPUs the first collective starts."""
        if self.asynchronous:
            return Pending(steps, next(steps, None))
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device, priority=-1)  # NCCL kernels get priority, as in FSDP2.
        current = torch.cuda.current_stream(self._device)
        self._computing.add(current)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in steps:
                pass
        return Pending(steps, None, self._stream.record_event(), self._computing)
