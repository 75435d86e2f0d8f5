"""Timing of all GPU benchmarks: CUDA graphs of many calls, replayed.

A contender is called with the index of a copy of its inputs. `COPIES` consecutive calls take one copy each, so that no
call finds data of the previous call in L2. One CUDA graph contains enough back-to-back calls to fill about a
millisecond, without the host. Each round replays the graph of every contender in turn: once untimed, and then between
two events. So a measured call follows a call of its own kind, never of another contender, and writes back as many dirty
lines of L2 as it leaves to the next call. Results stay allocated until a later call with the same copy, so that
consecutive calls also write to different memory. The result is the median over rounds, divided by the calls in a graph.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

import torch

COPIES = 3  # of inputs that are each larger than half of L2
SAMPLE_MS = 1.0

Call = Callable[[int], object]
Contenders = dict[str, tuple[float, Call]]  # name: (bytes per element, call)


def microseconds(contenders: Contenders, rounds: int) -> dict[str, float]:
    """Time one call of each contender, in microseconds."""
    graphs = {name: _graph_of(call) for name, (_, call) in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, (graph, calls) in graphs.items():
            graph.replay()  # no wait: the host queues the timed replay while this one runs
            times[name].append(_milliseconds(graph.replay) / calls * 1e3)
    return {name: statistics.median(t) for name, t in times.items()}


def rows_of(
    contenders: Mapping[str, tuple[float, object]], us: Mapping[str, float], elements: int, shape: str, copy: str
) -> list[dict[str, object]]:
    """Build rows for `rows.write`: GB/s of the minimum bytes, in percent of the contender called `copy`."""
    rate = {name: count * elements / us[name] / 1e3 for name, (count, _) in contenders.items()}
    return [
        {
            "operation": name,
            "shape": shape,
            "bytes_per_element": round(count, 4),
            "us": round(us[name], 1),
            "GB_per_s": round(rate[name]),
            "percent_of_copy": round(100 * rate[name] / rate[copy], 1),
        }
        for name, (count, _) in contenders.items()
    ]


def _graph_of(call: Call) -> tuple[torch.cuda.CUDAGraph, int]:
    """Capture calls in a graph. Return the graph and its number of calls."""

    def once_each() -> None:
        for i in range(COPIES):
            call(i)

    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # the first call compiles and allocates, which a capture must not
        once_each()
        torch.cuda.synchronize()
        repeats = max(1, round(SAMPLE_MS / _milliseconds(once_each)))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    results: list[object] = [None] * COPIES
    with torch.cuda.graph(graph):
        for i in range(repeats * COPIES):
            results[i % COPIES] = call(i % COPIES)
    return graph, repeats * COPIES


def _milliseconds(run: Callable[[], object]) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)
