"""The experts of a mixture-of-experts layer shared by several GPUs, from the router to the sum, forward and backward.

Each rank has its own tokens and 1/R of the experts. A kind is a recipe of `grouped_mlp(ep_group=)`; with "codes",
weights are codes as gathered by FSDP2. "bf16" sends values and multiplies with `torch._grouped_mm`.
`wire_mib` are the bytes that a rank gives to all-to-all in a call. Calls are issued back to back, and contenders take
turns; the median over rounds of the slowest rank counts.

    torchrun --nproc-per-node 2 benchmarks/bench_expert_parallel.py [--shapes deepseek] [--rounds 5]
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import bench_moe
import rows
from bench_grouped import CALLS
from bench_moe import BASE, RECIPES, Shape
from qshard.formats import Usage
from qshard.recipes import Recipe
from qshard.torch_bridge import QuantizedStack, grouped_mlp, quantize, topk_routing

DEVICE = "cuda"
MIB = 2**20
SHAPES = bench_moe.SHAPES
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
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            call()
            start.record()
            for _ in range(CALLS):
                call()
            stop.record()
            stop.synchronize()
            elapsed = torch.tensor(start.elapsed_time(stop) / CALLS, device=DEVICE)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="mixtral,deepseek")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(message="bench_expert_parallel: no CUDA device, nothing to measure\n")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    found = []
    for name in options.shapes.split(","):
        calls = contenders(SHAPES[name])
        sent = {kind: bytes_sent(call) for kind, call in calls.items()}
        found += rows_of(milliseconds(calls, options.rounds), sent, name)
        del calls
        torch.cuda.empty_cache()
    if dist.get_rank() == 0:
        rows.write("expert_parallel", torch.cuda.get_device_name(), found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
