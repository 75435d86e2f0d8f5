"""`qshard convert`: a checkpoint as codes and scales, for JAX and PyTorch."""

from __future__ import annotations

from pathlib import Path

import click

from qshard._cli import options
from qshard._cli.errors import Misuse, shown


@click.command(cls=options.Command)
@click.argument("checkpoint", type=options.PATH)
@click.argument("out", type=options.PATH)
@click.option(
    "--format",
    "fmt",
    required=True,
    metavar="NAME",
    help="Such as NVFP4_16x16, or with options: 'NVFP4[global_scale=row]'.",
)
@click.option("--keep", multiple=True, metavar="GLOB", help="Tensors with such names stay as they are.")
@options.usage
@options.seed
@click.option("--force", is_flag=True, help="Replace OUT if it is there.")
def convert(checkpoint: Path, out: Path, fmt: str, keep: tuple[str, ...], usage: str, seed: int, force: bool) -> None:
    """Write CHECKPOINT, a file, an index or a folder of safetensors, to OUT with its weights as codes and scales.

    Tensors of fewer than two axes, scales, those that are not of real numbers and those that the format does not fit
    stay as they are. OUT is read back before it gets its name.
    """
    chosen = options.format_of(fmt, "--format")

    from qshard._cli.quantizing import quantize_to
    from qshard._cli.sources import open_checkpoint
    from qshard._cli.text import print_conversion

    opened = open_checkpoint(checkpoint)
    if out.exists():
        if any(out.samefile(file) for file in opened.files):
            raise Misuse(f"{shown(out)} is a file of the checkpoint itself; write to another name")
        if not force and not out.is_dir():
            raise Misuse(f"{shown(out)} is there already; write to another name, or add --force")
    if not out.name.endswith(".safetensors"):
        raise Misuse(f"{shown(out)} does not end in .safetensors; readers go by that")
    done = quantize_to(out, opened, chosen, options.USAGES[usage], keep, seed)
    print_conversion(out, chosen, done)
