"""Shapes of the models that benchmarks of steps train, in both frameworks, and a tiny one for CPUs."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Shape:
    """A Llama-like model, and the tokens of a device in a step: `batch` sequences of `context`.

    In the place of an MLP, a block has `experts` of width `ffn`, if not 0, and a token takes `top_k` of them.
    """

    layers: int
    width: int
    ffn: int
    vocabulary: int
    heads: int
    kv_heads: int
    batch: int
    context: int
    experts: int = 0
    top_k: int = 0

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Weights of the linear layers of a block, without experts, `(N, K)`."""
        kv_width = self.width // self.heads * self.kv_heads
        attention = {
            "q": (self.width, self.width),
            **dict.fromkeys("kv", (kv_width, self.width)),
            "o": (self.width, self.width),
        }
        if self.experts:
            return attention
        return {**attention, **dict.fromkeys(("gate", "up"), (self.ffn, self.width)), "down": (self.width, self.ffn)}

    @property
    def tokens(self) -> int:
        """Tokens of a device in a step."""
        return self.batch * self.context

    @property
    def weights(self) -> int:
        """Number of weights, without norms."""
        block = sum(rows * columns for rows, columns in self.linears.values())
        block += self.experts * (3 * self.ffn + 1) * self.width  # With the router.
        return self.layers * block + 2 * self.vocabulary * self.width


SHAPES = {
    "2b": Shape(8, 4096, 14336, 32000, heads=32, kv_heads=32, batch=2, context=4096),
    "8b": Shape(32, 4096, 14336, 128256, heads=32, kv_heads=8, batch=2, context=4096),  # Llama 3
    "wide": Shape(2, 8192, 28672, 32000, heads=64, kv_heads=64, batch=1, context=8192),  # blocks of Llama 3 70 B
    "tiny": Shape(2, 256, 512, 64, heads=4, kv_heads=2, batch=1, context=64),
}


MIXTURES = {
    "moe-qwen": Shape(6, 2048, 768, 32000, heads=32, kv_heads=4, batch=4, context=4096, experts=128, top_k=8),
    "moe-deepseek": Shape(2, 7168, 2048, 32000, heads=56, kv_heads=56, batch=1, context=4096, experts=64, top_k=8),
    "moe-tiny": Shape(2, 256, 128, 64, heads=4, kv_heads=2, batch=1, context=64, experts=4, top_k=2),
}


def add_arguments(parser: argparse.ArgumentParser, model: str = "2b", mixtures: bool = False) -> None:
    parser.add_argument("--model", choices=[*SHAPES, *(MIXTURES if mixtures else ())], default=model)
    parser.add_argument("--layers", type=int, help="instead of the model's own")
    parser.add_argument("--batch", type=int, help="sequences of a device, instead of the model's own")


def shape_of(arguments: argparse.Namespace) -> Shape:
    """Return the shape that a command line names."""
    given = {name: getattr(arguments, name) for name in ("layers", "batch") if getattr(arguments, name) is not None}
    return replace({**SHAPES, **MIXTURES}[arguments.model], **given)
