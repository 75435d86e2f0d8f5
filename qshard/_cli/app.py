"""Commands of `qshard`, their options, and the exit status. Each command imports its dependencies when it runs."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click
import numpy  # noqa: F401 - before ml_dtypes, which makes an ImportError of Ctrl-C while it imports NumPy

from qshard._cli import USAGE, options
from qshard._cli.errors import Failure, Misuse
from qshard._core import environment
from qshard._files.checkpoint import CheckpointError, CheckpointPathError
from qshard._files.engine_formats import ENGINE_FORMATS
from qshard._files.names import printable, quote

OWN = "qshard"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(environment.__version__, message="qshard %(version)s")
def group() -> None:
    """Quantize checkpoints to formats of few bits, and measure the error of the formats."""


@group.command(cls=options.Command)
@click.argument("checkpoint", type=options.PATH)
@click.option(
    "--formats",
    multiple=True,
    metavar="NAMES",
    help="Names separated by commas, or all; by default formats that fit most shapes, with OCP's scales too.",
)
@click.option("--layers", multiple=True, metavar="GLOB", help="Only tensors with these names, of any number of axes.")
@options.usage
@click.option("--rotate", is_flag=True, help="Also measure NVFP4 after the random Hadamard transform, columnwise.")
@click.option(
    "--stochastic",
    type=click.IntRange(1),
    metavar="N",
    help="Also measure NVFP4 with stochastic rounding, as the mean of N draws.",
)
@options.seed
@click.option(
    "--budget",
    callback=options.budget_of,
    metavar="BYTES",
    help="Recommend formats for a size in bytes per element, such as 0.8, or in total, such as 4GB.",
)
@click.option(
    "--activations",
    type=options.PATH,
    metavar="NPZ",
    help="Inputs of layers, by layer name: harm is then the noise of their outputs.",
)
@click.option(
    "--plan", type=options.PATH, metavar="JSON", help="Write the recommended formats, for qshard convert --plan."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV instead of tables.")
@click.option("--html", type=options.PATH, help="Also write an HTML page with a plot of the trade-off.")
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
    plan: Path | None,
    as_json: bool,
    as_csv: bool,
    html: Path | None,
) -> None:
    """Measure the error of formats on each layer of CHECKPOINT.

    CHECKPOINT is a safetensors file, an index of shards, or a folder with either.
    """
    if as_json and as_csv:
        raise Misuse("--json and --csv exclude each other; use one")
    if html is not None and not html.name.endswith(".html"):
        raise Misuse(f"--html {quote(html)} does not end in .html; name a file such as report.html")
    if plan is not None and not plan.name.endswith(".json"):
        raise Misuse(f"--plan {quote(plan)} does not end in .json; name a file such as plan.json")
    if plan is not None and budget is None:
        raise Misuse("--plan needs a size; add --budget, such as --budget 0.8 for bytes per element")
    chosen = options.formats_of(formats, "--formats") if formats else options.file_formats()
    chosen = options.with_variants(chosen, rotate, stochastic is not None)

    from qshard._cli import report as reports
    from qshard._cli.conversion import replacing
    from qshard._cli.layers import Question
    from qshard._cli.plan import check_replaceable
    from qshard._cli.quantized_entry import with_quantized
    from qshard._cli.render import console, page, print_report
    from qshard._files.checkpoint import open_checkpoint
    from qshard.numerics._display import load

    if plan is not None:
        check_replaceable(plan)
    if html is not None:
        load("matplotlib", "qshard report --html", "'qshard[cli]'")
    opened = with_quantized(open_checkpoint(checkpoint))
    question = Question(formats=tuple(chosen), usage=options.USAGES[usage], draws=stochastic or 1, seed=seed)
    with contextlib.ExitStack() as stack:  # fails early if a file cannot be written
        html_file, plan_file = (stack.enter_context(replacing(path)) if path else None for path in (html, plan))
        findings = reports.find(opened, question, layers, budget, activations)
        if html_file is not None:
            html_file.write(page(findings, plan).encode())
        if plan_file is not None:
            plan_file.write(reports.as_plan(findings).encode())
    if as_json or as_csv:
        click.echo(reports.as_json(findings) if as_json else reports.as_csv(findings), nl=as_json)
        return
    print_report(console(), findings, plan, has_page=html is not None)


@group.command(cls=options.Command)
@click.argument("checkpoint", type=options.PATH)
@click.argument("out", type=options.PATH)
@click.option(
    "--format",
    "formats",
    multiple=True,
    metavar="[GLOB=]NAME",
    help="Such as NVFP4_16x16, or with options: 'NVFP4[global_scale=row]'. Repeat it for tensors of other formats: "
    "'embed*=FP8_E4M3'. Without it, weights that are quantized already keep their codes.",
)
@click.option(
    "--to",
    type=click.Choice([OWN, *ENGINE_FORMATS]),
    default=OWN,
    show_default=True,
    help="Write a file of qshard, or a folder that serving engines read.",
)
@click.option("--plan", type=options.PATH, metavar="JSON", help="Formats of tensors, as qshard report --plan writes.")
@click.option("--keep", multiple=True, metavar="GLOB", help="Do not convert tensors with these names.")
@options.usage_or_plan
@options.seed
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
def convert(
    checkpoint: Path,
    out: Path,
    formats: tuple[str, ...],
    to: str,
    plan: Path | None,
    keep: tuple[str, ...],
    usage: str | None,
    seed: int,
    force: bool,
) -> None:
    """Write CHECKPOINT to OUT with its weights quantized to codes and scales.

    CHECKPOINT is a safetensors file, an index of shards, or a folder with either. Tensors with fewer than two axes,
    scales, tensors without real numbers, and tensors of a shape that the format does not support are not changed. OUT
    is read back and verified before it gets its name.
    """
    if formats and plan is not None:
        raise Misuse("--format and --plan exclude each other; use one")

    from qshard._cli.conversion import plan_conversion, write_file
    from qshard._cli.engine_output import write_engine
    from qshard._cli.plan import plan_of, read_plan
    from qshard._cli.quantized_entry import with_quantized
    from qshard._cli.render import print_conversion
    from qshard._files.checkpoint import open_checkpoint

    if plan is None:
        chosen, planes = plan_of(formats), options.USAGES[usage or "rowwise"]
    else:
        chosen, planes = read_plan(plan)
        if usage is not None and options.USAGES[usage] is not planes:
            raise Misuse(f"--usage {usage} is not that of {quote(plan)}; leave it out, or make another plan")
    if to != OWN and planes is not options.USAGES["rowwise"]:
        raise Misuse(f"--to {to} has the rowwise plane alone; leave --usage out, or make a plan without it")
    opened = with_quantized(open_checkpoint(checkpoint))
    if to == OWN:
        _check_out(out, opened.files, force)
    done = plan_conversion(opened, chosen, planes, keep, for_engine=to != OWN)
    if to == OWN:
        write_file(out, opened, done, seed)
    else:
        write_engine(out, opened, to, done, seed)
    print_conversion(out, done)


def _check_out(out: Path, files: Sequence[Path], force: bool) -> None:
    """Raise Misuse unless the file `out` may be written."""
    if out.exists():
        if any(out.samefile(file) for file in files):
            raise Misuse(f"{quote(out)} is a file of the checkpoint itself; write to another name")
        if not force and not out.is_dir():
            raise Misuse(f"{quote(out)} already exists; write to another name, or add --force")
    if not out.name.endswith(".safetensors"):
        raise Misuse(f"{quote(out)} does not end in .safetensors; choose a name that does")


@group.command(cls=options.Command)
@click.option(
    "--size",
    type=click.IntRange(1, 2**15),
    default=2048,
    show_default=True,
    help="Rows and columns, rounded up to 128.",
)
@click.option("--rounds", type=click.IntRange(1), default=9, show_default=True, help="Rounds; the median is reported.")
@click.option("--threads", type=click.IntRange(1), help="Threads of the kernels; by default all cores of the machine.")
@click.option(
    "--formats",
    multiple=True,
    metavar="NAMES",
    help="Formats to quantize whole tensors to; by default the formats that recipes use for weights.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def bench(size: int, rounds: int, threads: int | None, formats: tuple[str, ...], as_json: bool) -> None:
    """Time the CPU kernels, compared with a copy of the same number of float32 elements.

    GB/s count the fewest bytes that an op must move. Ops write to existing arrays. Whole quantizations allocate their
    results, which includes page faults. The copy uses one thread. GPUs are not timed.
    """
    import qshard
    from qshard import _ffi
    from qshard._cli.machine import contenders, timings
    from qshard._cli.render import console, table

    if threads is not None:
        qshard.set_num_threads(threads)
    size = -(-size // 128) * 128
    chosen = options.formats_of(formats, "--formats") if formats else options.weight_formats()
    found = timings(contenders(size, chosen), rounds)
    about = {"size": size, "rounds": rounds, "threads": qshard.num_threads(), "simd": _ffi.simd()}
    if as_json:
        click.echo(json.dumps(about | {"timings": [asdict(each) for each in found]}, indent=1))
        return
    out = console()
    out.print(f"{size} x {size}, {about['threads']} threads, {about['simd']}, the median of {rounds} rounds")
    rows = [[each.name, f"{each.us:.1f}", f"{each.gb_per_s:.1f}", f"{each.percent_of_copy:.0f}"] for each in found]
    out.print(table(["", "us", "GB/s", "% of copy"], rows))


@group.command(cls=options.Command)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def info(as_json: bool) -> None:
    """Print the facts for a bug report: build, kernels, CUDA, versions, machine."""
    from qshard._cli.machine import machine_facts

    facts = machine_facts()
    if as_json:
        click.echo(json.dumps(facts, indent=1))
        return
    click.echo(environment.build_info())
    for name in ("libraries", "processor", "threads", "gpus", "grouped products"):
        value = facts[name]
        click.echo(f"{name}: {', '.join(value) if isinstance(value, list) else value}")


def run(arguments: Sequence[str] | None) -> int:
    """Run a command, and return the exit status. If it fails, print the reason in one line."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed: keep other files from getting its descriptor
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # names may have characters that the terminal lacks
    return _invoke(list(sys.argv[1:] if arguments is None else arguments))


def _invoke(arguments: list[str]) -> int:
    try:
        with group.make_context("qshard", arguments) as context:  # `main` handles Ctrl-C
            group.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as end:  # raised by --help
        return end.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        return USAGE
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "qshard"
        return _print_error(f"{error.format_message().rstrip('.')}; {where} --help lists all options", USAGE)
    except click.ClickException as error:
        return _print_error(error.format_message(), error.exit_code)
    except Failure as error:
        return _print_error(str(error), error.status)
    except CheckpointError as error:
        return _print_error(str(error), USAGE if isinstance(error, CheckpointPathError) else 1)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python reports the error again at exit
        return 1
    except MemoryError as error:
        return _print_error(f"out of memory: {error}; the largest tensor and its codes must fit in memory", 1)
    except OSError as error:
        what = f"{error.filename}: " if error.filename is not None else ""
        then = "; no partial file was kept" if error.errno in FULL else ""
        return _print_error(f"{what}{error.strerror or error}{then}", 1)
    except ImportError as error:
        return _print_error(str(error), 1)
    return 0


def _print_error(text: str, status: int) -> int:
    print(f"qshard: {printable(' '.join(text.split()))}", file=sys.stderr, flush=True)
    return status
