"""Whole quantizations in blocks on one GPU: every format and plane, beside a copy of the same run and torch.compile.

Each contender is a CUDA graph of what `quantize`, `dequantize` or a transposition launches, so that the time of the
host does not count; inputs are larger than L2. Bytes are the fewest that must move; for NVFP4, whose scales follow from
the amax of the whole tensor, that is a second read of x. `percent_of_copy` compares GB/s with a device copy of x in the
same run. Every contender runs once a round; the median over rounds counts. Rivals have the formulas of
`quantize_rivals.py`, for the rowwise plane alone, as they take seconds to compile.

    python benchmarks/bench_gpu_formats.py [--size 8192] [--rounds 40] [--no-rivals]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch

import rows
from qshard import pipeline
from qshard.formats import NVFP4, Usage
from qshard.torch_bridge._ops import ops
from quantize_rivals import USAGES, cases, torch_quantize

Contenders = dict[str, tuple[float, Callable[[], object]]]


def ours(x: torch.Tensor) -> Contenders:
    """What qshard launches, with the bytes an element that it must move."""
    found: Contenders = {}
    for name, fmt, usage, count in cases():
        amax = 2 if fmt.global_scale else 0
        found[f"{name} qshard"] = (
            count + amax,
            lambda fmt=fmt, usage=usage: pipeline.quantize(ops, x, fmt, USAGES[usage]),
        )
        if usage == "both":
            continue
        ((each, parts),) = pipeline.quantize(ops, x, fmt, USAGES[usage]).items()
        found[f"de{name} qshard"] = (
            count,
            lambda parts=parts, fmt=fmt, each=each: pipeline.dequantize(ops, parts, fmt, each, torch.bfloat16),
        )
        if fmt.square and each is Usage.ROWWISE:
            plane = count - 2
            found[f"transpose {fmt} qshard"] = (
                2 * plane,
                lambda parts=parts, fmt=fmt: pipeline.transposed(ops, parts, fmt),
            )
    scale = torch.ones((), device="cuda")
    pair = torch.tensor([1, 0], dtype=torch.int32, device="cuda")
    random = NVFP4.with_options(rounding="stochastic")
    draws = pipeline.Draws(pair, torch.zeros_like(pair))
    found["hadamard qshard"] = (4, lambda: pipeline.rotated(ops, x))
    found["quantize NVFP4 rowwise, stochastic, qshard"] = (
        2 + 2 + 2 + 0.5 + 1 / 16,  # three reads: amaxes of the whole and of blocks, codes
        lambda: pipeline.quantize(ops, x, random, Usage.ROWWISE, draws=draws),
    )
    e4m3 = {"element": "float8_e4m3fn"}
    found["cast_amax qshard"] = (3, lambda: ops.cast_amax(x, scale, lead=0, **e4m3))
    found["cast_transpose_amax qshard"] = (4, lambda: ops.cast_transpose_amax(x, scale, batch=0, lead=0, **e4m3))
    return found


def rivals(x: torch.Tensor) -> Contenders:
    """The same formulas, as torch.compile makes them."""
    every = torch_quantize(x)
    wanted = {f"{name} torch": count for name, _, usage, count in cases() if usage == "rowwise"}
    return {name + ".compile": (count, torch.compile(every[name][1])) for name, count in wanted.items()}


def graph_of(call: Callable[[], object]) -> tuple[torch.cuda.CUDAGraph, Any]:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()
    return graph, kept


def measure(contenders: Contenders, rounds: int) -> dict[str, float]:
    """Median microseconds of each."""
    graphs = {name: graph_of(call) for name, (_, call) in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for r in range(rounds + 2):
        for name, (graph, _) in graphs.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(50_000)  # The host queues the replay before the device is free to run it.
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            if r >= 2:
                times[name].append(start.elapsed_time(stop) * 1e3)
    return {name: statistics.median(t) for name, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--no-rivals", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(message="bench_gpu_formats: no CUDA device, nothing to measure\n")
    x = torch.randn(options.size, options.size, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(x)
    contenders: Contenders = {"copy": (4, lambda: out.copy_(x))} | ours(x)
    if not options.no_rivals:
        contenders |= rivals(x)
    times = measure(contenders, options.rounds)
    rate = {name: count * options.size**2 / times[name] / 1e3 for name, (count, _) in contenders.items()}
    rows.write(
        "gpu_formats",
        torch.cuda.get_device_name(),
        [
            {
                "operation": name,
                "shape": f"{options.size}x{options.size}",
                "bytes_per_element": round(contenders[name][0], 4),
                "us": round(times[name], 1),
                "GB_per_s": round(rate[name]),
                "percent_of_copy": round(100 * rate[name] / rate["copy"], 1),
            }
            for name in contenders
        ],
    )


if __name__ == "__main__":
    main()
