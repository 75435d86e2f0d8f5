"""The log of `--log-numerics`: a line of JSON for each step, layer and tensor, for `qshard.numerics.read_log`."""

from argparse import Namespace
from pathlib import Path

from qshard.numerics import StepStats, write_log


def begin(arguments: Namespace) -> None:
    """Empty the log, unless the run goes on from a checkpoint."""
    if arguments.log_numerics and not arguments.resume:
        arguments.log_numerics.write_text("")


def append(path: Path, run: str, step: int, loss: float, seen: StepStats) -> None:
    """Write one step."""
    with path.open("a") as file:
        write_log(file, step, seen, run=run, loss=loss)
