"""Layers of experts in JAX on one GPU, forward and backward, compared with `jax.lax.ragged_dot` of bfloat16.

Tokens are sorted by expert and distributed uniformly at random, and the group sizes are on the device. Operands are
bfloat16. "none" is `qshard.jax.ragged_dot` without a recipe. Weights are bfloat16 and quantized in each call, except
for "codes", both planes kept since the last update, and "gathered", the rowwise plane as FSDP and primary weights give
it, which backward transposes. Calls are issued back to back, as in training. Contenders take turns, and the median over
rounds counts. `times_bf16` is the time of "none", divided by the row's time.

    python benchmarks/bench_grouped_jax.py [--shapes mixtral,deepseek,qwen] [--rounds 5] [--without-xla]
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import rows
from qshard.formats import Usage
from qshard.jax import CodedWeight, quantize, ragged_dot
from qshard.recipes import NAMED, Recipe

CALLS = 5  # calls per contender and round
SLOW_MS = 30.0  # contenders that take longer are called once per round
CODES = Recipe(weight="FP8_E4M3", activation="FP8_E4M3", gradient="FP8_E4M3")
RECIPES: dict[str, Recipe] = {"fp8": NAMED["CurrentScaling"], "fp8 E4M3": CODES, "block": NAMED["BlockScaling"]}
BASE, XLA = "none", "XLA"

Call = Callable[[], Any]


class Shape(NamedTuple):
    """A layer of experts: `[tokens, width]` to `[tokens, hidden]`."""

    experts: int
    tokens: int
    width: int
    hidden: int


SHAPES = {
    "mixtral": Shape(8, 16384, 4096, 14336),
    "deepseek": Shape(64, 32768, 7168, 2048),
    "qwen": Shape(128, 65536, 2048, 768),
}


def sizes_of(tokens: int, experts: int) -> np.ndarray[Any, Any]:
    chosen = np.random.default_rng(0).integers(0, experts, tokens)
    return np.bincount(chosen, minlength=experts).astype(np.int32)


def contenders(shape: Shape, *, xla: bool = True) -> dict[str, Call]:
    experts, tokens, width, hidden = shape
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (tokens, width), jnp.bfloat16)
    w = jax.random.normal(keys[1], (experts, hidden, width), jnp.bfloat16) * jnp.bfloat16(width**-0.5)
    dy = jax.random.normal(keys[2], (tokens, hidden), jnp.bfloat16)
    sizes = jnp.asarray(sizes_of(tokens, experts))

    def both_ways(product: Callable[..., jax.Array], *more: Any, weight: jax.Array = w) -> Call:
        """Return a jitted call for y and the gradients of x and of the weight. `more` are further operands."""

        @jax.jit
        def run(x: jax.Array, w: jax.Array, dy: jax.Array, sizes: jax.Array, *more: Any) -> Any:
            y, pull = jax.vjp(lambda x, w: product(x, w, sizes, *more), x, w)
            return (y, *pull(dy))

        return functools.partial(run, x, weight, dy, sizes, *more)

    def quantized(recipe: Recipe | None, x: Any, w: Any, sizes: Any, codes: Any = None) -> jax.Array:
        given = w if codes is None else CodedWeight(codes, w, None)
        return ragged_dot(x, given, sizes, recipe, weight_layout="NK")

    made = {BASE: both_ways(functools.partial(quantized, None))}
    if xla:
        made[XLA] = both_ways(jax.lax.ragged_dot, weight=w.swapaxes(1, 2))
    for name, recipe in RECIPES.items():
        product = functools.partial(quantized, recipe)
        made[name] = both_ways(product)
        for kind, usage in (("codes", Usage.BOTH), ("gathered", Usage.ROWWISE)):
            codes = jax.jit(jax.vmap(functools.partial(quantize, fmt=recipe.weight, usage=usage)))(w)
            made[f"{name} {kind}"] = both_ways(product, codes)
    return made


def time_calls(call: Call, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        made = call()
    jax.block_until_ready(made)
    return (time.perf_counter() - start) / count * 1e3


def milliseconds(
    calls: dict[str, Call], rounds: int, measure: Callable[[Call, int], float] = time_calls
) -> dict[str, float]:
    """Time one call of each contender, in milliseconds; `measure` gives the time of a call that is repeated."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    counts = {}
    for name, call in calls.items():
        measure(call, 1)  # compiles
        counts[name] = 1 if measure(call, 1) > SLOW_MS else CALLS
    for _ in range(rounds):
        for name, call in calls.items():
            jax.block_until_ready(call())
            times[name].append(measure(call, counts[name]))
    return {name: statistics.median(found) for name, found in times.items()}


def rows_of(ms: dict[str, float], shape: str) -> list[dict[str, object]]:
    return [
        {"kind": name, "shape": shape, "ms": f"{took:.2f}", "times_bf16": f"{ms[BASE] / took:.2f}"}
        for name, took in ms.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--without-xla", action="store_true", help="leave out jax.lax.ragged_dot")
    options = parser.parse_args()
    if jax.default_backend() != "gpu":
        parser.exit(message="bench_grouped_jax: no GPU, nothing to measure\n")
    found = []
    for name in options.shapes.split(","):
        calls = contenders(SHAPES[name], xla=not options.without_xla)
        found += rows_of(milliseconds(calls, options.rounds), name)
        del calls
        rows.write("grouped_jax", jax.devices()[0].device_kind, found)


if __name__ == "__main__":
    main()
