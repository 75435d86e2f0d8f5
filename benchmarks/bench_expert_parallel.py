"""The experts of a mixture-of-experts layer shared by several GPUs, from the router to the sum, forward and backward.

Each rank has its own tokens and 1/R of the experts. A kind is a recipe of `grouped_mlp(ep_group=)`; with "codes",
weights are codes as gathered by FSDP2. "bf16" sends values and multiplies with `torch._grouped_mm`.
`wire_mib` are the bytes that a rank gives to all-to-all in a call. Calls are issued back to back, and contenders take
turns; the median over rounds of the slowest rank counts. With `BENCH_DEVICE=cpu` ranks are on the CPU.

    python benchmarks/bench_expert_parallel.py [--ranks 2] [--shapes deepseek] [--rounds 5]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import bench_moe
import step_torch
from bench_device import DEVICE
from bench_grouped import CALLS
from bench_moe import BASE, RECIPES, Shape
from cases import measure_cases
from qshard.formats import Usage
from qshard.recipes import Recipe
from qshard.torch_bridge import QuantizedStack, grouped_mlp, quantize, topk_routing

MIB = 2**20
SHAPES = {**bench_moe.SHAPES, "tiny": Shape(4, 2, 96, 128, 128)}
"""Tokens are those of one rank, experts those of all ranks."""

Call = Callable[[], Any]


def contenders(shape: Shape) -> dict[str, Call]:
    """Build the calls, each both ways. All ranks have the same router."""
    experts, top_k, tokens, width, hidden = shape
    local = experts // dist.get_world_size()
    common = torch.Generator(DEVICE).manual_seed(0)
    of_rank = torch.Generator(DEVICE).manual_seed(1 + dist.get_rank())

    def normal(generator: torch.Generator, *sizes: int) -> Tensor:
        return torch.randn(*sizes, device=DEVICE, dtype=torch.bfloat16, generator=generator)

    router = (normal(common, experts, width) * width**-0.5).requires_grad_()
    x, dy = normal(of_rank, tokens, width).requires_grad_(), normal(of_rank, tokens, width)
    w13 = normal(of_rank, local, 2 * hidden, width).mul_(width**-0.5).requires_grad_()
    w2 = normal(of_rank, local, width, hidden).mul_(hidden**-0.5).requires_grad_()

    def both_ways(recipe: Recipe | None, first: Any, second: Any) -> Call:
        def call() -> Any:
            routing = topk_routing(x @ router.t(), top_k)
            y = grouped_mlp(x, *routing, first, second, recipe, ep_group=dist.group.WORLD)
            return torch.autograd.grad(y, (x, router, first, second), dy)

        return call

    made = {BASE: both_ways(None, w13, w2)}
    for name, recipe in RECIPES.items():
        made[name] = both_ways(recipe, w13, w2)
        codes = [
            QuantizedStack.of([quantize(each, recipe.weight, usage=Usage.BOTH) for each in w.detach()]).requires_grad_()
            for w in (w13, w2)
        ]
        made[f"{name} codes"] = both_ways(recipe, *codes)
    return made


def bytes_sent(call: Call) -> int:
    """Return the bytes that this rank gives to `all_to_all_single` in a call, its own part included."""
    sent, exchange = 0, dist.all_to_all_single

    def counting(output: Tensor, source: Tensor, *splits: Any, **options: Any) -> Any:
        nonlocal sent
        sent += source.nbytes
        return exchange(output, source, *splits, **options)

    with mock.patch.object(dist, "all_to_all_single", counting):
        call()
    return sent


def milliseconds(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """Time one call of each contender, in milliseconds, on the slowest rank."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            call()
            start = step_torch.mark()
            for _ in range(CALLS):
                call()
            elapsed = torch.tensor(step_torch.milliseconds(start, step_torch.mark()) / CALLS, device=DEVICE)
            dist.all_reduce(elapsed, dist.ReduceOp.MAX)
            times[name].append(elapsed.item())
    return {name: statistics.median(found) for name, found in times.items()}


def rows_of(ms: dict[str, float], sent: dict[str, int], shape: str) -> list[dict[str, object]]:
    return [
        {
            "kind": f"{name}, {shape}, {dist.get_world_size()} GPUs",
            "ms": f"{time:.2f}",
            "times_bf16": f"{time / ms[BASE]:.2f}",
            "wire_mib": f"{sent[name] / MIB:.1f}",
        }
        for name, time in ms.items()
    ]


def measure(name: str, arguments: argparse.Namespace) -> dict[str, list[dict[str, object]]]:
    calls = contenders(SHAPES[name])
    sent = {kind: bytes_sent(call) for kind, call in calls.items()}
    found = rows_of(milliseconds(calls, arguments.rounds), sent, name)
    calls.clear()
    torch.cuda.empty_cache()
    return {arguments.out: found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="mixtral,deepseek", help=f"some of {','.join(SHAPES)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--out", default="expert_parallel", help="the file of results, without .csv")
    arguments = parser.parse_args()
    if not step_torch.has_device() or arguments.ranks < 2:
        parser.exit(message="bench_expert_parallel: fewer than two GPUs, nothing to measure\n")
    sys.exit(measure_cases(measure, arguments.shapes.split(","), arguments, DEVICE))


if __name__ == "__main__":
    main()
