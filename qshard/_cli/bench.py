"""`qshard bench`: ops on this machine, beside a copy of the same run."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import click
import numpy as np

from qshard._cli import options
from qshard.formats import E4M3, FLOATS, Format, Usage

SLICE = 5e-3
"""Seconds for which each runs in a round."""
COPY = "copy float32"
SEED = 0

Contenders = dict[str, tuple[float, Callable[[], object]]]
"""Name -> the fewest bytes that it must read and write, and a call."""


@dataclass(frozen=True)
class Timing:
    """One contender: the median over rounds."""

    name: str
    us: float
    gb_per_s: float
    percent_of_copy: float


@click.command(cls=options.Command)
@click.option(
    "--size",
    type=click.IntRange(1, 2**15),
    default=2048,
    show_default=True,
    help="Rows and columns, rounded up to 128.",
)
@click.option("--rounds", type=click.IntRange(1), default=9, show_default=True, help="The median of which counts.")
@click.option("--threads", type=click.IntRange(1), help="Of the kernels; those that the machine has by default.")
@click.option(
    "--formats",
    multiple=True,
    metavar="NAMES",
    help="Whole quantizations in these; by default in those that recipes have for weights.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def bench(size: int, rounds: int, threads: int | None, formats: tuple[str, ...], as_json: bool) -> None:
    """Time the CPU kernels beside a copy of as many float32.

    Bytes are the fewest that an op must move. Ops write into arrays that are there; whole quantizations make theirs,
    which takes page faults. The copy has one thread. GPUs are not timed.
    """
    import qshard
    from qshard import _ffi
    from qshard._cli.report import weight_formats
    from qshard._cli.text import console, table

    if threads is not None:
        qshard.set_num_threads(threads)
    size = -(-size // 128) * 128
    chosen = options.formats_of(formats, "--formats") if formats else weight_formats()
    made = timings(contenders(size, chosen), rounds)
    about = {"size": size, "rounds": rounds, "threads": qshard.num_threads(), "simd": _ffi.simd()}
    if as_json:
        click.echo(json.dumps(about | {"timings": [asdict(each) for each in made]}, indent=1))
        return
    out = console()
    out.print(f"{size} x {size}, {about['threads']} threads, {about['simd']}, the median of {rounds} rounds")
    rows = [[each.name, f"{each.us:.1f}", f"{each.gb_per_s:.1f}", f"{each.percent_of_copy:.0f}"] for each in made]
    out.print(table(["", "us", "GB/s", "% of copy"], rows))


def contenders(size: int, formats: list[Format]) -> Contenders:
    """The copy, ops on single tensors, and whole quantizations."""
    from qshard._core import quantize_steps
    from qshard.numerics import _kernels as kernels

    x32 = np.random.default_rng(SEED).standard_normal((size, size), np.float32)
    arrays = {name: x32.astype(kernels.dtype_of(name)) for name in FLOATS[:2]}
    out, scale, count = np.empty_like(x32), np.array(64, np.float32), x32.size
    codes = kernels.ops.cast_tensor(x32, scale, element=E4M3.name)
    found: Contenders = {COPY: (8.0 * count, lambda: np.copyto(out, x32))}
    for name, x in arrays.items():
        each = x.itemsize
        for op, nbytes, inputs, options_of, dtype in (
            ("amax_tensor", each, (x,), {}, None),
            ("cast_tensor", each + 1, (x, scale), {"element": E4M3.name}, None),
            ("cast_transpose", each + 2, (x, scale), {"element": E4M3.name, "batch": 0}, None),
            ("dequantize", each + 1, (codes, scale), {"element": E4M3.name}, name),
        ):
            call = kernels.into(op, inputs, options_of, dtype)
            found[f"{op} {name}"] = float(nbytes * count), call
    found["transpose uint8"] = 2.0 * count, kernels.into("transpose", (codes,), {"batch": 0}, None)
    x16 = arrays["bfloat16"]
    for fmt in formats:
        draws = kernels.draws("qshard bench", SEED) if fmt.stochastic else None

        def quantize(fmt: Format = fmt, draws: Any = draws) -> Any:
            return quantize_steps.quantize(kernels.ops, x16, fmt, Usage.ROWWISE, draws=draws)

        parts = quantize()[Usage.ROWWISE]
        stored = sum(part.nbytes for part in parts if part is not None)
        found[f"quantize bfloat16 to {fmt}"] = float(x16.nbytes + stored), quantize
    return found


def timings(found: Contenders, rounds: int) -> list[Timing]:
    """Each once a round, as often as fills `SLICE`."""
    repeats, times = {}, {}
    for name, (_, call) in found.items():
        call()
        start = time.perf_counter()
        call()
        repeats[name], times[name] = max(1, int(SLICE / (time.perf_counter() - start))), list[float]()
    for _ in range(rounds):
        for name, (_, call) in found.items():
            start = time.perf_counter()
            for _ in range(repeats[name]):
                call()
            times[name].append((time.perf_counter() - start) / repeats[name])
    seconds = {name: statistics.median(each) for name, each in times.items()}
    rate = {name: found[name][0] / seconds[name] / 1e9 for name in found}
    return [Timing(name, seconds[name] * 1e6, rate[name], 100 * (rate[name] / rate[COPY])) for name in found]
