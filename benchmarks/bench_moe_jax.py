"""Whole mixture-of-experts layers in JAX on one GPU, from the router to the sum over experts, forward and backward.

The JAX twin of `bench_moe.py`: the same shapes and recipes of `grouped_mlp`. With "codes", weights of experts are codes
of both planes, kept since the last update. "bf16" is `grouped_mlp` without a recipe, and "XLA" is the layer in plain
JAX, with `jax.lax.ragged_dot`. Calls are issued back to back, as in training. Contenders take turns, and the median
over rounds counts. `times_bf16` is the time of "bf16", divided by the row's time.

    python benchmarks/bench_moe_jax.py [--shapes mixtral,deepseek] [--rounds 5] [--without-xla]
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import rows
from bench_grouped_jax import CODES, Call, milliseconds
from qshard.formats import Usage
from qshard.jax import CodedWeight, grouped_mlp, quantize, topk_routing
from qshard.recipes import NAMED, Recipe

RECIPES: dict[str, Recipe] = {"fp8": NAMED["CurrentScaling"], "fp8 E4M3": CODES, "block": NAMED["BlockScaling"]}
BASE, XLA = "bf16", "XLA"
# Experts, experts of a token, tokens, width, and columns between the products: as in bench_moe.py.
SHAPES = {
    "mixtral": (8, 2, 8192, 4096, 14336),
    "deepseek": (64, 8, 4096, 7168, 2048),
    "qwen": (128, 8, 8192, 2048, 768),
}


def plain_layer(x: Any, router: Any, w13: Any, w2: Any, *, top_k: int) -> jax.Array:
    """Compute the layer with JAX's own functions."""
    experts = router.shape[0]
    weights, indices = jax.lax.top_k(jax.nn.softmax((x @ router.T).astype(jnp.float32)), top_k)
    weights = weights / weights.sum(-1, keepdims=True)
    order = jnp.argsort(indices.reshape(-1))
    sizes = jnp.bincount(indices.reshape(-1), length=experts)
    gate, up = jnp.split(jax.lax.ragged_dot(x[order // top_k], w13.swapaxes(1, 2), sizes), 2, axis=-1)
    y = jax.lax.ragged_dot(jax.nn.silu(gate) * up, w2.swapaxes(1, 2), sizes)
    y = (y * weights.reshape(-1)[order][:, None]).astype(x.dtype)
    return jnp.zeros_like(x).at[order // top_k].add(y)


def contenders(shape: tuple[int, int, int, int, int], *, xla: bool = True) -> dict[str, Call]:
    experts, top_k, tokens, width, hidden = shape
    keys = iter(jax.random.split(jax.random.key(0), 5))

    def normal(*sizes: int) -> jax.Array:
        return jax.random.normal(next(keys), sizes, jnp.bfloat16)

    x, dy, router = normal(tokens, width), normal(tokens, width), normal(experts, width) * jnp.bfloat16(width**-0.5)
    w13 = normal(experts, 2 * hidden, width) * jnp.bfloat16(width**-0.5)
    w2 = normal(experts, width, hidden) * jnp.bfloat16(hidden**-0.5)

    def both_ways(layer: Callable[..., jax.Array], *codes: Any) -> Call:
        """Return a jitted call for y and the gradients of x, the router and both weights."""

        @jax.jit
        def run(x: Any, router: Any, w13: Any, w2: Any, dy: Any, *codes: Any) -> Any:
            def of(x: Any, router: Any, *weights: Any) -> jax.Array:
                given = (
                    [CodedWeight(code, w, None) for code, w in zip(codes, weights, strict=True)] if codes else weights
                )
                return layer(x, router, *given)

            y, pull = jax.vjp(of, x, router, w13, w2)
            return (y, *pull(dy))

        return functools.partial(run, x, router, w13, w2, dy, *codes)

    def quantized(recipe: Recipe | None, x: Any, router: Any, *weights: Any) -> jax.Array:
        return grouped_mlp(x, *topk_routing(x @ router.T, top_k), *weights, recipe)

    made = {BASE: both_ways(functools.partial(quantized, None))}
    if xla:
        made[XLA] = both_ways(functools.partial(plain_layer, top_k=top_k))
    for name, recipe in RECIPES.items():
        layer = functools.partial(quantized, recipe)
        made[name] = both_ways(layer)
        cast = jax.jit(jax.vmap(functools.partial(quantize, fmt=recipe.weight, usage=Usage.BOTH)))
        made[f"{name} codes"] = both_ways(layer, cast(w13), cast(w2))
    return made


def rows_of(ms: dict[str, float], shape: str) -> list[dict[str, object]]:
    return [
        {"kind": f"{name}, {shape}", "ms": f"{took:.2f}", "times_bf16": f"{ms[BASE] / took:.2f}"}
        for name, took in ms.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="mixtral,deepseek", help=f"some of {','.join(SHAPES)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--without-xla", action="store_true", help="leave out jax.lax.ragged_dot")
    options = parser.parse_args()
    if jax.default_backend() != "gpu":
        parser.exit(message="bench_moe_jax: no GPU, nothing to measure\n")
    found = []
    for name in options.shapes.split(","):
        calls = contenders(SHAPES[name], xla=not options.without_xla)
        found += rows_of(milliseconds(calls, options.rounds), name)
        del calls
        rows.write("moe_jax", jax.devices()[0].device_kind, found)


if __name__ == "__main__":
    main()
