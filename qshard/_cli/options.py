"""Options that several commands share, and parsers of their values."""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from qshard._cli.errors import Misuse
from qshard._core.name_patterns import NamePatterns
from qshard._core.validation import as_format
from qshard.formats import FORMATS, Format, Usage
from qshard.layout import whole_units
from qshard.recipes import NAMED

USAGES = {"rowwise": Usage.ROWWISE, "columnwise": Usage.COLUMNWISE, "both": Usage.BOTH}
ALL = "all"
PATH = click.Path(path_type=Path)

_plane: dict[str, Any] = {
    "type": click.Choice(list(USAGES)),
    "help": "The plane: blocks along the last axis, along the first, or both.",
}
usage: Callable[[Any], Any] = click.option("--usage", default="rowwise", show_default=True, **_plane)
usage_or_plan: Callable[[Any], Any] = click.option("--usage", show_default="that of --plan, or rowwise", **_plane)
seed: Callable[[Any], Any] = click.option(
    "--seed", type=click.IntRange(0, 2**64 - 1), default=0, show_default=True, help="Seed of stochastic rounding."
)


class Command(click.Command):
    """A command that rejects repeated options without `multiple=True`. click itself silently uses the last value."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments after counting each option. Raises `click.UsageError` if one is repeated."""
        if not ctx.resilient_parsing:  # set during shell completion
            _, _, order = self.make_parser(ctx).parse_args(list(args))
            for parameter, times in collections.Counter(order).items():
                if isinstance(parameter, click.Option) and times > 1 and not repeatable(parameter):
                    raise click.UsageError(f"{parameter.opts[0]} is given {times} times; use it once", ctx)
        return super().parse_args(ctx, args)


def repeatable(option: click.Option) -> bool:
    """Return whether an option may be repeated: all its values count, or it ends the command, like --help."""
    return option.multiple or option.count or option.is_eager


BYTES = {"": 0, "B": 1} | {f"{letter}B": 1000**i for i, letter in enumerate("kMGT", 1)}
BYTES |= {f"{letter}iB": 1024**i for i, letter in enumerate("KMGT", 1)}


@dataclass(frozen=True)
class Budget:
    """A limit on the bytes of layers, in total with `in_all`, else per element. `text` is the option's value."""

    text: str
    nbytes: float
    in_all: bool

    def of_an_element(self, elements: int) -> float:
        return self.nbytes / elements if self.in_all else self.nbytes


def budget_of(context: click.Context, parameter: click.Parameter, text: str | None) -> Budget | None:
    """Parse the value of `--budget`.

    >>> budget_of(None, None, "0.8").of_an_element(1000), budget_of(None, None, "2 kB").of_an_element(1000)
    (0.8, 2.0)
    """
    if text is None:
        return None
    found = re.fullmatch(r"\s*([0-9.]+(?:[eE][-+]?[0-9]+)?)\s*([a-zA-Z]*)\s*", text)
    try:
        nbytes = float(found[1]) * (BYTES[found[2]] or 1) if found else math.nan
    except (ValueError, KeyError):
        nbytes = math.nan
    if found is None or not 0 < nbytes < math.inf:
        units = ", ".join(list(BYTES)[1:])
        raise click.BadParameter(
            f"{text!r} is not a number of bytes per element, such as 0.8, or in total, such as 4GB ({units})"
        )
    return Budget(text, nbytes, bool(found[2]))


def formats_of(texts: Iterable[str], option: str) -> list[Format]:
    """Parse a repeatable option with a comma-separated list of formats.

    >>> [str(fmt) for fmt in formats_of(["FP8_E4M3,NVFP4[global_scale=row, nonfinite=nan]", "MXFP4"], "--formats")]
    ['FP8_E4M3', 'NVFP4[global_scale=row, nonfinite=nan]', 'MXFP4']
    """
    names = [name.strip() for text in texts for name in re.split(r",(?![^\[]*\])", text)]
    found: list[Format] = []
    for name in names:
        found += FORMATS.values() if name == ALL else [format_of(name, option)]
    return list(dict.fromkeys(found))


def format_of(name: str, option: str) -> Format:
    """Parse the name of a format, or raise `Misuse`."""
    name = re.sub(r",\s*", ", ", name)
    try:
        return as_format(name, "qshard", option)
    except (ValueError, TypeError) as error:
        raise Misuse(str(error).removeprefix("qshard: ")) from None


def matching(names: Collection[str], patterns: Iterable[str], option: str) -> set[str]:
    """Return the names of tensors that match any of the patterns, or raise `Misuse` if a pattern matches none."""
    found: set[str] = set()
    for pattern in patterns:
        alone = checked_patterns([pattern], names, option)
        found |= {name for name in names if alone.matches(pattern, name)}
    return found


def checked_patterns(patterns: Iterable[str], names: Collection[str], option: str) -> NamePatterns:
    """Compile patterns of names of tensors, or raise `Misuse` if a pattern has no effect."""
    found = NamePatterns(patterns, names)
    try:
        found.check_used(option, [(name,) for name in names], "tensor")
    except ValueError as error:
        raise Misuse(str(error)) from None
    return found


def weight_formats() -> list[Format]:
    """Return the formats that recipes use for weights, with the default `nonfinite` of each format."""
    found = [recipe.weight for recipe in NAMED.values()]
    return list(dict.fromkeys(fmt.with_options(nonfinite=FORMATS[fmt.name].nonfinite) for fmt in found))


def file_formats() -> list[Format]:
    """Return a format per recipe that fits most shapes: its weight format if it fits any shape, else its 1-D blocks.

    Formats with E8M0 scales are followed by their variant that rounds scales down, as the OCP specification does.
    """
    found: list[Format] = []
    for recipe in NAMED.values():
        fits_any = whole_units(recipe.weight, Usage.ROWWISE) == (1, 1)
        fmt = FORMATS[(recipe.weight if fits_any else recipe.activation).name]
        found += filter(None, (fmt, _with_options(fmt, {"scale_rounding": "floor"})))
    return list(dict.fromkeys(found))


def with_variants(formats: list[Format], rotate: bool, stochastic: bool) -> list[Format]:
    """Return the formats, followed by their rotated and stochastically rounded variants if requested.

    Raises `Misuse` if no format has a requested variant.
    """
    found = list(formats)
    asked: list[tuple[bool, str, dict[str, Any]]] = [
        (rotate, "--rotate", {"hadamard": True}),
        (stochastic, "--stochastic", {"rounding": "stochastic"}),
    ]
    for wanted, option, changes in asked:
        if wanted:
            made = [fmt for fmt in (_with_options(each, changes) for each in found) if fmt is not None]
            if not made:
                raise Misuse(f"{option} applies to none of these formats ({', '.join(map(str, formats))}); add NVFP4")
            found += made
    return list(dict.fromkeys(found))


def _with_options(fmt: Format, changes: dict[str, Any]) -> Format | None:
    try:
        return fmt.with_options(**changes)
    except ValueError:
        return None
