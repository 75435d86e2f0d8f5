"""The command `qshard`: formats on checkpoints, from a shell. docs/command.md has what it does.

It needs the extra `qshard[cli]`; this module does not, so that what is missing can be said.
"""

from __future__ import annotations

import importlib.util
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType

__all__ = ["main"]

NEEDS = ("click", "rich", "safetensors")
USAGE = 2
"""The exit status of what was asked in a wrong way; 1 is that of what failed."""
INTERRUPTED = 128 + signal.SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
      arguments: those of the process by default.

    Returns:
      The exit status.

    >>> main(["convert", "absent.safetensors", "out.safetensors", "--format", "NVFP4"])
    2
    """
    absent = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if absent:
        print(f"qshard: {' and '.join(absent)} not installed; pip install 'qshard[cli]'", file=sys.stderr)
        return USAGE
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # As nohup has it.
                signal.signal(number, _exit_on_signal)
    try:
        from qshard._cli.app import run

        return run(arguments)
    except KeyboardInterrupt:
        print("qshard: interrupted", file=sys.stderr)
        return INTERRUPTED


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)  # What is half done is cleaned up.
