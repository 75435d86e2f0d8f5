"""Training step of an MLP on the CPU, without and with statistics of every tensor of every layer.

PyTorch uses `numerics_of(model)` around forward and backward, and its `stats()`. JAX uses a probe per layer, jitted.
Both kinds of steps take turns, and the median over rounds counts.

    python benchmarks/bench_watch.py [--tokens 1024] [--width 1024] [--layers 4] [--rounds 5] [--recipes MXFP8,NVFP4]
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

import qshard
import qshard.jax
import qshard.torch_bridge
import rows

Step = Callable[[], Any]


def torch_steps(recipe: str, tokens: int, width: int, layers: int) -> dict[str, Step]:
    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])
    model = qshard.torch_bridge.convert(plain, recipe)
    x = torch.randn(tokens, width)

    def step() -> None:
        model(x).square().mean().backward()
        model.zero_grad()

    def watched() -> Any:
        with qshard.torch_bridge.numerics_of(model) as seen:
            step()
        return seen.stats()

    return {"step": step, "watched": watched}


def jax_steps(recipe: str, tokens: int, width: int, layers: int) -> dict[str, Step]:
    rng = np.random.default_rng(0)
    weights = [jnp.asarray(rng.standard_normal((width, width)), jnp.float32) / width**0.5 for _ in range(layers)]
    x = jnp.asarray(rng.standard_normal((tokens, width)), jnp.float32)
    probes = [qshard.jax.init_numerics() for _ in weights]

    def loss_of(weights: list[jax.Array], probes: list[Any], x: jax.Array) -> jax.Array:
        for i, w in enumerate(weights):
            given = {"probe": probes[i]} if probes else {}
            x = qshard.jax.linear(x, w, recipe, seed=i, **given)
        return jnp.mean(x**2)

    run = jax.jit(jax.value_and_grad(loss_of, argnums=(0, 1)))

    def watched() -> Any:
        return qshard.jax.numerics_of(jax.block_until_ready(run(weights, probes, x))[1][1], recipe)

    return {"step": lambda: jax.block_until_ready(run(weights, [], x)), "watched": watched}


def milliseconds(steps: dict[str, Step], rounds: int) -> dict[str, float]:
    """Return the median time of each step, after a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if number:
                times[name].append(1000 * (time.perf_counter() - start))
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    for name, default in (("tokens", 1024), ("width", 1024), ("layers", 4), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--recipes", default="CurrentScaling,MXFP8,NVFP4")
    given = parser.parse_args()
    torch.set_num_threads(qshard.num_threads())
    table: list[dict[str, object]] = []
    for framework, steps_of in (("torch", torch_steps), ("jax", jax_steps)):
        for recipe in given.recipes.split(","):
            make = functools.partial(steps_of, recipe, given.tokens, given.width, given.layers)
            ms = milliseconds(make(), given.rounds)
            operands = 3 * given.layers
            elements = given.layers * (2 * given.tokens * given.width + given.width**2)
            table.append(
                {
                    "framework": framework,
                    "recipe": recipe,
                    "operands": operands,
                    "step_ms": round(ms["step"], 1),
                    "watched_ms": round(ms["watched"], 1),
                    "ns_an_element": round(1e6 * (ms["watched"] - ms["step"]) / elements, 2),
                }
            )
    rows.write("watch", rows.cpu_name(), table)


if __name__ == "__main__":
    main()
