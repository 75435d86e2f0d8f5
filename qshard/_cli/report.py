"""`qshard report`: what formats do to a checkpoint, and which format each layer should have."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import click

from qshard._cli import options
from qshard._cli.errors import Misuse, shown
from qshard.formats import FORMATS, Format
from qshard.recipes import NAMED


def weight_formats() -> list[Format]:
    """Those that recipes have for weights, with what infinities become left as the format has it."""
    found = [recipe.weight for recipe in NAMED.values()]
    return list(dict.fromkeys(fmt.with_options(nonfinite=FORMATS[fmt.name].nonfinite) for fmt in found))


@click.command(cls=options.Command)
@click.argument("checkpoint", type=options.PATH)
@click.option(
    "--formats",
    multiple=True,
    metavar="NAMES",
    help="Names with commas between, or all; by default those that recipes have for weights.",
)
@click.option("--layers", multiple=True, metavar="GLOB", help="Only tensors with such names, of any number of axes.")
@options.usage
@click.option("--rotate", is_flag=True, help="Also NVFP4 after the random Hadamard transform, of the columnwise plane.")
@click.option(
    "--stochastic", type=click.IntRange(1), metavar="N", help="Also NVFP4 rounded stochastically, the mean of N draws."
)
@options.seed
@click.option(
    "--budget",
    callback=options.budget_of,
    metavar="BYTES",
    help="Recommend formats of so many bytes an element, such as 0.8, or in all, such as 4GB.",
)
@click.option(
    "--activations",
    type=options.PATH,
    metavar="NPZ",
    help="What layers are given, by their names: harm is then that of their outputs.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON in place of tables.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV in place of tables.")
@click.option("--html", type=options.PATH, help="Write a page with the trade-off as a curve, too.")
def report(
    checkpoint: Path,
    formats: tuple[str, ...],
    layers: tuple[str, ...],
    usage: str,
    rotate: bool,
    stochastic: int | None,
    seed: int,
    budget: options.Budget | None,
    activations: Path | None,
    as_json: bool,
    as_csv: bool,
    html: Path | None,
) -> None:
    """What formats do to each layer of CHECKPOINT.

    That is a file of safetensors, an index of shards, or a folder with either.
    """
    if as_json and as_csv:
        raise Misuse("--json and --csv are both given; ask for one")
    if html is not None and not html.name.endswith(".html"):
        raise Misuse(f"--html {shown(html)} does not end in .html; name a page, which may be there already")
    chosen = options.formats_of(formats, "--formats") if formats else weight_formats()
    chosen = with_variants(chosen, rotate, stochastic is not None)

    from qshard._cli.findings import find
    from qshard._cli.layers import Question
    from qshard._cli.output import replacing
    from qshard._cli.sources import open_checkpoint

    opened = open_checkpoint(checkpoint)
    question = Question(formats=tuple(chosen), usage=options.USAGES[usage], draws=stochastic or 1, seed=seed)
    with replacing(html) if html else contextlib.nullcontext() as file:  # Whether it can be is known at once.
        findings = find(opened, question, layers, budget, activations)
        if file is not None:
            from qshard._cli.page import page

            file.write(page(findings).encode())
    if as_json or as_csv:
        from qshard._cli import records

        click.echo(records.as_json(findings) if as_json else records.as_csv(findings), nl=as_json)
        return
    from qshard._cli.text import print_text

    print_text(findings)


def with_variants(formats: list[Format], rotate: bool, stochastic: bool) -> list[Format]:
    """Each format, followed by what was asked for of it: rotated, rounded stochastically.

    Raises:
      Misuse: no format has that.
    """
    found = list(formats)
    asked: list[tuple[bool, str, dict[str, Any]]] = [
        (rotate, "--rotate", {"hadamard": True}),
        (stochastic, "--stochastic", {"rounding": "stochastic"}),
    ]
    for wanted, option, changes in asked:
        if wanted:
            made = [fmt for fmt in (_changed(each, changes) for each in found) if fmt is not None]
            if not made:
                raise Misuse(f"{option} is for no format of these ({', '.join(map(str, formats))}); add NVFP4")
            found += made
    return list(dict.fromkeys(found))


def _changed(fmt: Format, changes: dict[str, Any]) -> Format | None:
    try:
        return fmt.with_options(**changes)
    except ValueError:
        return None
