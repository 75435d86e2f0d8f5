"""Layers of experts on one GPU, forward and backward, compared with PyTorch's grouped product of bfloat16.

Tokens are sorted by expert and distributed uniformly at random. With "host" the group sizes are known on the host, and
each expert's product is a separate call. With "device" they are not, and one call computes all products. Operands are
bfloat16. Weights are also bfloat16 and quantized in each call, except for "codes", where weights are codes as gathered
by FSDP2 and ZeRO. Calls are issued back to back, as in training. Contenders take turns, and the median over rounds
counts.

    python benchmarks/bench_grouped.py [--tokens 16384] [--width 4096] [--hidden 14336] [--experts 8,64] [--rounds 5]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import rows
from qshard.formats import Usage
from qshard.recipes import Recipe, RecipeLike
from qshard.torch_bridge import grouped_linear, quantize

DEVICE = "cuda"
CALLS = 5  # calls per contender and round
CODES = Recipe(weight="FP8_E4M3", activation="FP8_E4M3", gradient="FP8_E4M3")
RECIPES: dict[str, RecipeLike] = {
    "fp8": "CurrentScaling",
    "fp8 E4M3": CODES,
    "block": "BlockScaling",
    "mxfp8": "MXFP8",
}
BASE = "bf16 torch, device"

Call = Callable[[], Any]


def sizes_of(tokens: int, experts: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(experts, (tokens,), generator=generator)
    return torch.bincount(chosen, minlength=experts)


def grouped_mm(x: Tensor, w: Tensor, sizes: Tensor) -> Tensor:
    return torch._grouped_mm(x, w.transpose(1, 2), offs=sizes.cumsum(0).to(torch.int32))


def contenders(tokens: int, width: int, hidden: int, experts: int) -> dict[str, Call]:
    sizes = sizes_of(tokens, experts)
    x = torch.randn(tokens, width, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(experts, hidden, width, device=DEVICE, dtype=torch.bfloat16).mul_(width**-0.5).requires_grad_()
    dy = torch.randn(tokens, hidden, device=DEVICE, dtype=torch.bfloat16)

    def both_ways(run: Callable[[], Tensor], weights: Sequence[Tensor] = (w,)) -> Call:
        return lambda: torch.autograd.grad(run(), (x, *weights), dy)

    on_device = sizes.to(DEVICE)
    made = {BASE: both_ways(lambda: grouped_mm(x, w, on_device))}
    for name, recipe in RECIPES.items():
        for where, given in (("device", on_device), ("host", sizes)):
            made[f"{name}, {where}"] = both_ways(
                lambda recipe=recipe, given=given: grouped_linear(  # type: ignore[misc]
                    x, w, given, recipe, weight_layout="NK"
                )
            )
    codes = [quantize(each, CODES.weight, usage=Usage.BOTH).requires_grad_() for each in w.detach()]
    for where, given in (("device", on_device), ("host", sizes)):
        made[f"fp8 E4M3 codes, {where}"] = both_ways(
            lambda given=given: grouped_linear(x, codes, given, CODES),  # type: ignore[misc]
            codes,
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


def rows_of(ms: dict[str, float], experts: int) -> list[dict[str, object]]:
    return [
        {"kind": f"{name}, {experts} experts", "ms": f"{took:.2f}", "times_bf16": f"{ms[BASE] / took:.2f}"}
        for name, took in ms.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=14336)
    parser.add_argument("--experts", default="8,64")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(message="bench_grouped: no CUDA device, nothing to measure\n")
    found = []
    for experts in map(int, options.experts.split(",")):
        calls = contenders(options.tokens, options.width, options.hidden, experts)
        found += rows_of(milliseconds(calls, options.rounds), experts)
        del calls
        torch.cuda.empty_cache()
    rows.write("grouped", torch.cuda.get_device_name(), found)


if __name__ == "__main__":
    main()
