"""Ctrl-C ends a program within three seconds, with one line and a terminal in order, also while XLA compiles.

Python raises KeyboardInterrupt between two instructions of the main thread, and XLA keeps that thread for as long as it
compiles. So a second thread hears of the signal too. It gives the main thread a moment to end the program as it should,
children included, and then ends it itself.
"""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NoReturn

GRACE = 1.5  # seconds
clean_up: list[Callable[[], None]] = []  # what must be done before the program may end, such as to show the cursor
outcome = "nothing was written"

_ending = threading.Lock()  # taken by the thread that ends the program, and never given back


def install() -> None:
    """Take over SIGINT. Call it in the main thread, before what takes long, such as the imports of frameworks."""
    sys.excepthook = _excepthook
    sys.unraisablehook = _unraisablehook
    listener, speaker = os.pipe()
    os.set_blocking(speaker, False)
    signal.set_wakeup_fd(speaker, warn_on_full_buffer=False)  # written to at once, whatever the main thread does
    threading.Thread(target=_watch, args=(listener,), daemon=True).start()


def _watch(listener: int) -> None:
    while os.read(listener, 1) != bytes([signal.SIGINT]):
        pass
    time.sleep(GRACE)
    for step in clean_up:
        step()
    _end()


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        # Not by way of Python's own end, which waits for what XLA compiles. What the frames hold is let go of: queues
        # between processes have semaphores to give back.
        traceback.clear_frames(trace)
        _end()
    sys.__excepthook__(kind, error, trace)


def _unraisablehook(unraisable: "sys.UnraisableHookArgs") -> None:
    # A KeyboardInterrupt goes no further than a callback of the garbage collector; JAX has one. The thread ends all.
    if not issubclass(unraisable.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)


def _end() -> NoReturn:
    _ending.acquire()
    print(f"{Path(sys.argv[0]).name}: stopped; {outcome}", file=sys.stderr, flush=True)
    os._exit(128 + signal.SIGINT)
