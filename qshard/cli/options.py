"""Options that several commands have."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from qshard.cli.errors import Misuse
from qshard.formats import FORMATS, Format, Usage
from qshard.names import as_format

USAGES = {"rowwise": Usage.ROWWISE, "columnwise": Usage.COLUMNWISE, "both": Usage.BOTH}
ALL = "all"
PATH = click.Path(path_type=Path)

usage: Callable[[Any], Any] = click.option(
    "--usage",
    type=click.Choice(list(USAGES)),
    default="rowwise",
    show_default=True,
    help="The plane: blocks along the last axis, along the first, or both.",
)
seed: Callable[[Any], Any] = click.option(
    "--seed", type=click.IntRange(0, 2**64 - 1), default=0, show_default=True, help="Of stochastic rounding."
)


def formats_of(texts: Iterable[str], option: str) -> list[Format]:
    """The formats of an option that may be given several times, each time with several names.

    >>> [str(fmt) for fmt in formats_of(["FP8_E4M3,NVFP4[global_scale=row, nonfinite=nan]", "MXFP4"], "--formats")]
    ['FP8_E4M3', 'NVFP4[global_scale=row, nonfinite=nan]', 'MXFP4']
    """
    names = [name.strip() for text in texts for name in re.split(r",(?![^\[]*\])", text)]
    found: list[Format] = []
    for name in names:
        found += FORMATS.values() if name == ALL else [format_of(name, option)]
    return list(dict.fromkeys(found))


def format_of(name: str, option: str) -> Format:
    """A format by its name.

    Raises:
      Misuse: there is none of that name.
    """
    name = re.sub(r",\s*", ", ", name)
    try:
        return as_format(name, "qshard", option)
    except (ValueError, TypeError) as error:
        raise Misuse(str(error).removeprefix("qshard: ")) from None
