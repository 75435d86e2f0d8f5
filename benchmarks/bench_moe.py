"""Whole mixture-of-experts layers on one GPU, from the router to the sum over experts, forward and backward.

Tokens are bfloat16, and the router spreads them over all experts. A kind is a recipe of `grouped_mlp`. With "codes",
weights of experts are codes as gathered by FSDP2 and ZeRO, otherwise bfloat16 and quantized in each call. "bf16" is
`grouped_mlp` without a recipe: the same layer, with `torch._grouped_mm`. "bf16 plain" has PyTorch's own indexing and
SwiGLU instead of qshard's ops. torchao's FP8 product is left out, because it takes no groups of any size. Calls are
issued back to back, as in training. Contenders take turns, and the median over rounds counts. `times_bf16` is the time
of "bf16", divided by the row's time.

    python benchmarks/bench_moe.py [--shapes mixtral,deepseek,qwen] [--rounds 5]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import rows
from bench_device import DEVICE
from bench_grouped import milliseconds
from qshard.formats import Usage
from qshard.recipes import NAMED, Recipe
from qshard.torch_bridge import QuantizedStack, grouped_mlp, quantize, topk_routing

CODES = Recipe(weight="FP8_E4M3", activation="FP8_E4M3", gradient="FP8_E4M3")
RECIPES: dict[str, Recipe] = {"fp8": NAMED["CurrentScaling"], "fp8 E4M3": CODES, "block": NAMED["BlockScaling"]}
BASE, PLAIN = "bf16", "bf16 plain"

Call = Callable[[], Any]


class Shape(NamedTuple):
    """A layer: tokens `[tokens, width]`, `top_k` of `experts` for each, and `hidden` columns between the products."""

    experts: int
    top_k: int
    tokens: int
    width: int
    hidden: int


SHAPES = {
    "mixtral": Shape(8, 2, 8192, 4096, 14336),
    "deepseek": Shape(64, 8, 4096, 7168, 2048),
    "qwen": Shape(128, 8, 8192, 2048, 768),
}


def plain_layer(
    x: Tensor, router: Tensor, w13: Tensor, w2: Tensor, top_k: int, product: Callable[..., Tensor]
) -> Tensor:
    """Compute the layer as transformers and torchtitan do: `product(x, w_transposed, ends)` is a grouped product."""
    experts = router.shape[0]
    weights, indices = F.softmax(x @ router.t(), dim=-1, dtype=torch.float32).topk(top_k, -1)
    weights = weights / weights.sum(-1, keepdim=True)
    order = indices.flatten().argsort(stable=True)
    ends = torch.histc(indices.float(), experts, 0, experts - 1).cumsum(0).to(torch.int32)
    tokens = order // top_k
    gate, up = product(x[tokens], w13.transpose(1, 2), ends).chunk(2, -1)
    y = product(F.silu(gate) * up, w2.transpose(1, 2), ends)
    y = (y.float() * weights.flatten()[order][:, None]).to(x.dtype)
    return torch.zeros_like(x).index_add(0, tokens, y)


def contenders(shape: Shape) -> dict[str, Call]:
    experts, top_k, tokens, width, hidden = shape
    generator = torch.Generator(DEVICE).manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device=DEVICE, dtype=torch.bfloat16, generator=generator)

    x, dy = normal(tokens, width).requires_grad_(), normal(tokens, width)
    router = (normal(experts, width) * width**-0.5).requires_grad_()
    w13 = normal(experts, 2 * hidden, width).mul_(width**-0.5).requires_grad_()
    w2 = normal(experts, width, hidden).mul_(hidden**-0.5).requires_grad_()

    def both_ways(run: Callable[[], Tensor], weights: Sequence[Tensor] = (w13, w2)) -> Call:
        return lambda: torch.autograd.grad(run(), (x, router, *weights), dy)

    def layer(recipe: Recipe | None, *weights: Any) -> Tensor:
        return grouped_mlp(x, *topk_routing(x @ router.t(), top_k), *weights, recipe)

    made = {
        BASE: both_ways(lambda: layer(None, w13, w2)),
        PLAIN: both_ways(
            lambda: plain_layer(x, router, w13, w2, top_k, lambda x, w, ends: torch._grouped_mm(x, w, offs=ends))
        ),
    }
    for name, recipe in RECIPES.items():
        made[name] = both_ways(lambda recipe=recipe: layer(recipe, w13, w2))  # type: ignore[misc]
        codes = [
            QuantizedStack.of([quantize(each, recipe.weight, usage=Usage.BOTH) for each in w.detach()]).requires_grad_()
            for w in (w13, w2)
        ]
        made[f"{name} codes"] = both_ways(
            lambda recipe=recipe, codes=codes: layer(recipe, *codes),  # type: ignore[misc]
            codes,
        )
    return made


def rows_of(ms: dict[str, float], shape: str) -> list[dict[str, object]]:
    return [
        {"kind": f"{name}, {shape}", "ms": f"{took:.2f}", "times_bf16": f"{ms[BASE] / took:.2f}"}
        for name, took in ms.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES), help=f"some of {','.join(SHAPES)}")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(message="bench_moe: no CUDA device, nothing to measure\n")
    found = []
    for name in options.shapes.split(","):
        calls = contenders(SHAPES[name])
        found += rows_of(milliseconds(calls, options.rounds), name)
        del calls
        torch.cuda.empty_cache()
    rows.write("moe", torch.cuda.get_device_name(), found)


if __name__ == "__main__":
    main()
