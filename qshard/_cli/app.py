"""The commands together, and how the process ends."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from typing import TextIO

import click

from qshard._cli import USAGE
from qshard._cli.bench import bench
from qshard._cli.convert import convert
from qshard._cli.errors import Failure, printable
from qshard._cli.info import info
from qshard._cli.report import report
from qshard._core import environment

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(environment.__version__, message="qshard %(version)s")
def group() -> None:
    """Formats of few bits: what they do to checkpoints, and checkpoints in them."""


for command in (report, convert, bench, info):
    group.add_command(command)


def run(arguments: Sequence[str] | None) -> int:
    """Runs a command, and says in one line why it did not go on.

    Returns:
      The exit status.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # It was closed; no other file may get its number.
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # Names have characters that not every terminal has.
    return _ended(list(sys.argv[1:] if arguments is None else arguments))


def _ended(arguments: list[str]) -> int:
    try:
        with group.make_context("qshard", arguments) as context:  # `main` has words of its own for Ctrl-C.
            group.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as end:  # Of --help.
        return end.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        return USAGE
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "qshard"
        return _said(f"{error.format_message().rstrip('.')}; {where} --help has what there is", USAGE)
    except click.ClickException as error:
        return _said(error.format_message(), error.exit_code)
    except Failure as error:
        return _said(str(error), error.status)
    except BrokenPipeError:
        _closed(sys.stdout)  # Python would complain at its end.
        return 1
    except MemoryError as error:
        return _said(f"out of memory: {error}; the largest tensor and its codes have to fit", 1)
    except OSError as error:
        what = f"{error.filename}: " if error.filename is not None else ""
        then = "; nothing was kept of what was being written" if error.errno in FULL else ""
        return _said(f"{what}{error.strerror or error}{then}", 1)
    except ImportError as error:
        return _said(str(error), 1)
    return 0


def _said(text: str, status: int) -> int:
    print(f"qshard: {printable(' '.join(text.split()))}", file=sys.stderr, flush=True)
    return status


def _closed(stream: TextIO) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
