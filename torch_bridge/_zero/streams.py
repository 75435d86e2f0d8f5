"""Collectives beside the computation: on a CUDA stream of their own, or, elsewhere, in the threads of the backend."""

from __future__ import annotations

from collections.abc import Iterator, Set

import torch
import torch.distributed as dist

Steps = Iterator[dist.Work | None]
"""Begins a collective, yields, and goes on when its result is there; with as many collectives as it likes."""


class Pending:
    """What was begun and may not be done. Nothing that it reads or writes is freed before `wait`.

    Args:
      steps, work: what is left to do here, after what runs in another thread.
      event, computing: of a GPU: the end of what was begun, and the streams that computation was seen on.
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
        """Makes streams that compute wait, never the host of a GPU. Elsewhere the remaining steps are taken here.

        All of them: memory goes back to the stream that has asked for it, which may not be the current one, as where
        autograd accumulates gradients on a stream of its own choice.
        """
        if self._event is not None:
            for stream in {torch.cuda.current_stream(self._event.device), *self._computing}:
                stream.wait_event(self._event)
        while self._work is not None:
            self._work.wait()
            self._work = next(self._steps, None)


class Channel:
    """Runs steps in the order in which they are begun, each after all that the current stream was given before.

    Args:
      computing: the streams that were current when something was begun, shared by channels.
    """

    def __init__(self, device: torch.device, computing: set[torch.cuda.Stream]):
        self._device, self._computing = device, computing
        self._stream: torch.cuda.Stream | None = None
        self.asynchronous = device.type != "cuda"  # On a stream of ours collectives are in its order.

    def begin(self, steps: Steps) -> Pending:
        if self.asynchronous:
            return Pending(steps, next(steps, None))
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device, priority=-1)  # Kernels of NCCL go first, as in FSDP2.
        current = torch.cuda.current_stream(self._device)
        self._computing.add(current)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in steps:
                pass
        return Pending(steps, None, self._stream.record_event(), self._computing)
