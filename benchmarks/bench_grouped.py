"""Layers of experts on one GPU, forward and backward, compared with PyTorch's grouped product of bfloat16.

A kind names the shape, the recipe ("one scale" is `CurrentScaling`, "blocks" is `BlockScaling`), and where the group
sizes are. Tokens are sorted by expert and distributed uniformly at random. Operands are bfloat16, and weights are
`[E, N, K]` in bfloat16, quantized in each call. With "codes" weights are a `QuantizedStack` with a rowwise plane, as
FSDP2 and ZeRO gather it, so the backward pass transposes it. Calls are issued back to back, as in training.
Contenders take turns, and the median over rounds counts.

    python benchmarks/bench_grouped.py [--shapes Mixtral,DeepSeek-V3,Qwen3] [--rounds 5]
    python benchmarks/bench_grouped.py --shapes 16x8192x2048x1024     # experts x tokens x K x N
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import rows
from bench_device import DEVICE
from qshard.formats import Usage
from qshard.recipes import NAMED
from qshard.torch_bridge import QuantizedStack, grouped_linear, quantize

CALLS = 5  # calls per contender and round
RECIPES = {"one scale": "CurrentScaling", "blocks": "BlockScaling"}
BASE = "bf16 torch, device"


class Shape(NamedTuple):
    """Sizes of a layer: weights `[experts, hidden, width]` and tokens `[tokens, width]`."""

    experts: int
    tokens: int
    width: int
    hidden: int


SHAPES = {
    "Mixtral": Shape(8, 16384, 4096, 14336),
    "DeepSeek-V3": Shape(64, 32768, 7168, 2048),
    "Qwen3": Shape(128, 65536, 2048, 768),
}
"""Sizes like those of the first product of experts in known models."""

Call = Callable[[], Any]


def sizes_of(tokens: int, experts: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(experts, (tokens,), generator=generator)
    return torch.bincount(chosen, minlength=experts)


def grouped_mm(x: Tensor, w: Tensor, sizes: Tensor) -> Tensor:
    return torch._grouped_mm(x, w.transpose(1, 2), offs=sizes.cumsum(0).to(torch.int32))


def stack_of(w: Tensor, recipe: str) -> Tensor:
    each = [quantize(one, NAMED[recipe].weight, usage=Usage.ROWWISE) for one in w]
    return QuantizedStack.of(each).requires_grad_()


def contenders(shape: Shape) -> dict[str, Call]:
    experts, tokens, width, hidden = shape
    sizes = sizes_of(tokens, experts)
    x = torch.randn(tokens, width, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(experts, hidden, width, device=DEVICE, dtype=torch.bfloat16).mul_(width**-0.5).requires_grad_()
    dy = torch.randn(tokens, hidden, device=DEVICE, dtype=torch.bfloat16)

    def both_ways(run: Callable[[], Tensor], weights: Sequence[Tensor] = (w,)) -> Call:
        return lambda: torch.autograd.grad(run(), (x, *weights), dy)

    on_device = sizes.to(DEVICE)
    made = {BASE: both_ways(lambda: grouped_mm(x, w, on_device))}
    for name, recipe in RECIPES.items():
        codes = stack_of(w.detach(), recipe)
        for where, given in (("device", on_device), ("host", sizes)):
            made[f"{name}, codes, {where}"] = both_ways(
                lambda recipe=recipe, given=given, codes=codes: grouped_linear(  # type: ignore[misc]
                    x, codes, given, recipe, weight_layout="NK"
                ),
                (codes,),
            )
            made[f"{name}, {where}"] = both_ways(
                lambda recipe=recipe, given=given: grouped_linear(  # type: ignore[misc]
                    x, w, given, recipe, weight_layout="NK"
                )
            )
    return made


def milliseconds(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """Time one call of each contender, in milliseconds."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            call()
            start.record()
            for _ in range(CALLS):
                call()
            stop.record()
            stop.synchronize()
            times[name].append(start.elapsed_time(stop) / CALLS)
    return {name: statistics.median(found) for name, found in times.items()}


def rows_of(ms: dict[str, float], shape: str) -> list[dict[str, object]]:
    return [
        {"kind": f"{shape}: {name}", "ms": f"{took:.2f}", "times_bf16": f"{ms[BASE] / took:.2f}"}
        for name, took in ms.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(message="bench_grouped: no CUDA device, nothing to measure\n")
    found = []
    for name in options.shapes.split(","):
        calls = contenders(SHAPES.get(name) or Shape(*map(int, name.split("x"))))
        found += rows_of(milliseconds(calls, options.rounds), name)
        del calls
        torch.cuda.empty_cache()
    rows.write("grouped", torch.cuda.get_device_name(), found)


if __name__ == "__main__":
    main()
