"""The command line tool `qshard`: quantization reports and conversion of checkpoints. docs/command.md documents it.

The commands need the extra `qshard[cli]`. This module does not, so that it can report a missing package.
"""

from __future__ import annotations

import importlib.util
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType

__all__ = ["main"]

NEEDS = ("click", "rich")
USAGE = 2  # exit status for wrong usage; failures exit with 1
INTERRUPTED = 128 + signal.SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line tool with `arguments`, by default from the process, and return the exit status.

    >>> main(["convert", "absent.safetensors", "out.safetensors", "--format", "NVFP4"])
    2
    """
    absent = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if absent:
        print(f"qshard: {' and '.join(absent)} not installed; pip install 'qshard[cli]'", file=sys.stderr)
        return USAGE
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # ignored, for example under nohup
                signal.signal(number, _exit_on_signal)
    try:
        from qshard._cli.app import run

        return run(arguments)
    except KeyboardInterrupt:
        print("qshard: interrupted", file=sys.stderr)
        return INTERRUPTED


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)  # unwinds, so that partial files are removed
