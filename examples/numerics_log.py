"""Log of `--log-numerics`: one JSON line per step, layer and tensor, for `qshard.numerics.read_log`."""

from argparse import Namespace
from pathlib import Path

from qshard.numerics import StepStats, write_log


def begin(arguments: Namespace) -> None:
    """Empty the log, unless the run resumes from a checkpoint."""
    if arguments.log_numerics and not arguments.resume:
        arguments.log_numerics.write_text("")


def append(path: Path, run: str, step: int, loss: float, seen: StepStats) -> None:
    """Append the statistics of one step."""
    with path.open("a") as file:
        write_log(file, step, seen, run=run, loss=loss)
