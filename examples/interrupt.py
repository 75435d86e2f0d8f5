"""Ctrl-C handling: the program ends within three seconds with one line and a clean terminal, even while XLA compiles.

Python raises KeyboardInterrupt between two instructions of the main thread, which XLA blocks while it compiles. So a
second thread also receives the signal. It gives the main thread a moment to end the program and its children, and then
ends the program itself.
"""

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn

GRACE = 1.5  # seconds
IMPORTING = "<frozen importlib._bootstrap>"  # file of the frames of an import
clean_up: list[Callable[[], None]] = []  # functions to call before the program ends, such as to show the cursor
outcome = "nothing was written"

_ending = threading.Lock()  # taken by the thread that ends the program, and never released


def install() -> None:
    """Take over SIGINT. Call it in the main thread before slow steps, such as importing frameworks."""
    sys.excepthook = _excepthook
    sys.unraisablehook = _unraisablehook
    signal.signal(signal.SIGINT, _interrupt)
    listener, speaker = os.pipe()
    os.set_blocking(speaker, False)
    signal.set_wakeup_fd(speaker, warn_on_full_buffer=False)  # written at once, even if the main thread is blocked
    threading.Thread(target=_watch, args=(listener,), daemon=True).start()


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, but end the program during an import: initialization of jaxlib aborts at exceptions."""
    while frame is not None:
        if frame.f_code.co_filename == IMPORTING:
            _clean_up_and_end()
        frame = frame.f_back
    raise KeyboardInterrupt


def _watch(listener: int) -> None:
    while os.read(listener, 1) != bytes([signal.SIGINT]):
        pass
    time.sleep(GRACE)
    _clean_up_and_end()


def _clean_up_and_end() -> NoReturn:
    for step in clean_up:
        step()
    _end()


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        # Python's own exit would wait for XLA's compilation. Clear the frames, because queues between processes have
        # semaphores to release. Frames of JAX have parts of a program under compilation, and to free those in any
        # order crashes.
        for frame, _ in traceback.walk_tb(trace):
            if not {"jax", "jaxlib"} & {*Path(frame.f_code.co_filename).parts}:
                with contextlib.suppress(RuntimeError):  # It is still running.
                    frame.clear()
        _end()
    sys.__excepthook__(kind, error, trace)


def _unraisablehook(unraisable: "sys.UnraisableHookArgs") -> None:
    # A garbage collector callback, such as JAX's, swallows KeyboardInterrupt. The second thread ends the program then.
    if not issubclass(unraisable.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)


def _end() -> NoReturn:
    _ending.acquire()
    print(f"{Path(sys.argv[0]).name}: stopped; {outcome}", file=sys.stderr, flush=True)
    os._exit(128 + signal.SIGINT)
