"""The experts of a mixture-of-experts layer shared by all GPUs of a host in JAX, forward and backward, in `shard_map`.

The JAX twin of `bench_expert_parallel.py`: the same shapes, from the router to the sum. Each device has its own tokens
and 1/R of the experts. A kind is a recipe of `grouped_mlp(ep_axis=)`; with "codes", weights are codes of both planes,
kept since the last update. "bf16" is `grouped_mlp` without a recipe. `wire_mib` are the bytes of the rows that a device
sends in a call, its own part included, without padding. Calls are issued back to back, and contenders take turns; the median over
rounds counts.

    python benchmarks/bench_expert_parallel_jax.py [--shapes mixtral,deepseek] [--rounds 5] [--capacity 1.25]
"""

from __future__ import annotations

import argparse
import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import bench_moe_jax
import rows
from bench_grouped_jax import Call, milliseconds
from bench_moe_jax import BASE, RECIPES
from qshard.formats import Usage
from qshard.jax import CodedWeight, grouped_mlp, quantize, topk_routing
from qshard.recipes import Recipe

AXIS, MIB = "ep", 2**20
SHAPES = {**bench_moe_jax.SHAPES, "tiny": (4, 2, 96, 128, 128)}


def mesh_of(devices: Any) -> jax.sharding.Mesh:
    return jax.make_mesh((len(devices),), (AXIS,), axis_types=(AxisType.Auto,), devices=devices)


def contenders(shape: tuple[int, int, int, int, int], mesh: jax.sharding.Mesh, capacity: float) -> dict[str, Call]:
    """Build the calls. `shape` has the tokens of one device, and the experts of all devices."""
    experts, top_k, tokens, width, hidden = shape
    keys = iter(jax.random.split(jax.random.key(0), 5))
    sharded = NamedSharding(mesh, P(AXIS))

    def normal(scale: float, *sizes: int, out: Any = sharded) -> jax.Array:
        make = jax.jit(lambda key: jax.random.normal(key, sizes, jnp.bfloat16) * jnp.bfloat16(scale), out_shardings=out)
        made: jax.Array = make(next(keys))
        return made

    router = normal(width**-0.5, experts, width, out=NamedSharding(mesh, P()))
    x, dy = (normal(1, tokens * mesh.size, width) for _ in range(2))
    w13 = normal(width**-0.5, experts, 2 * hidden, width)
    w2 = normal(hidden**-0.5, experts, width, hidden)

    def both_ways(recipe: Recipe | None, *codes: Any) -> Call:
        def local(x: Any, router: Any, w13: Any, w2: Any, dy: Any, *codes: Any) -> Any:
            def of(x: Any, router: Any, *weights: Any) -> jax.Array:
                pairs = zip(codes, weights, strict=True) if codes else ()
                given = [CodedWeight(code, w, None) for code, w in pairs] or weights
                routing = topk_routing(x @ router.T, top_k)
                return grouped_mlp(x, *routing, *given, recipe, ep_axis=AXIS, capacity_factor=capacity)

            y, pull = jax.vjp(of, x, router, w13, w2)
            return (y, *pull(dy))

        parts, own = (P(AXIS), P(), *[P(AXIS)] * (3 + len(codes))), (P(AXIS), P(AXIS), P(), P(AXIS), P(AXIS))
        run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=parts, out_specs=own))
        return functools.partial(run, x, router, w13, w2, dy, *codes)

    made = {BASE: both_ways(None)}
    for name, recipe in RECIPES.items():
        made[name] = both_ways(recipe)
        of_each = jax.vmap(functools.partial(quantize, fmt=recipe.weight, usage=Usage.BOTH))
        cast = jax.jit(jax.shard_map(of_each, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS)))
        made[f"{name} codes"] = both_ways(recipe, cast(w13), cast(w2))
    return made


def bytes_sent(call: Call, sent_rows: int) -> int:
    """Return the bytes of the rows that a device sends in a call, from the program.

    A device sends `sent_rows` rows to experts. As many come back, on average over devices.
    """
    assert isinstance(call, functools.partial)
    return sent_rows * sum(_bytes_of_rows(call.func.trace(*call.args).jaxpr))


def _bytes_of_rows(jaxpr: Any) -> list[int]:
    """Return the bytes of a row of each exchange in a program and in the programs that it calls."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "while":  # Sends further parts of an exchange.
            continue
        if equation.primitive.name == "all_to_all":
            (result,) = equation.outvars
            found.append(result.aval.shape[-1] * result.aval.dtype.itemsize)
        for inner in jax.tree.leaves([*equation.params.values()], is_leaf=lambda value: hasattr(value, "eqns")):
            if hasattr(inner, "eqns"):
                found += _bytes_of_rows(inner)
    return found


def rows_of(ms: dict[str, float], sent: dict[str, int], shape: str, devices: int) -> list[dict[str, object]]:
    return [
        {
            "kind": f"{name}, {shape}, {devices} GPUs",
            "ms": f"{took:.2f}",
            "times_bf16": f"{took / ms[BASE]:.2f}",
            "wire_mib": f"{sent[name] / MIB:.1f}",
        }
        for name, took in ms.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="mixtral,deepseek", help=f"some of {','.join(SHAPES)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--capacity", type=float, default=1.25, help="rows of a device's buffer, for each row it sends")
    parser.add_argument("--out", default="expert_parallel_jax", help="the file of results, without .csv")
    options = parser.parse_args()
    devices = jax.devices()
    if (jax.default_backend() != "gpu" and os.environ.get("JAX_PLATFORMS") != "cpu") or len(devices) < 2:
        parser.exit(message="bench_expert_parallel_jax: fewer than two GPUs, nothing to measure\n")
    found = []
    for name in options.shapes.split(","):
        shape = SHAPES[name]
        calls = contenders(shape, mesh_of(devices), options.capacity)
        if not jnp.isfinite(calls[BASE]()[0]).all():
            parser.exit(
                1, f"bench_expert_parallel_jax: a device has too few rows for {name}; pass a larger --capacity\n"
            )
        sent = {kind: bytes_sent(call, shape[2] * shape[1]) for kind, call in calls.items()}
        found += rows_of(milliseconds(calls, options.rounds), sent, name, len(devices))
        del calls
        rows.write(options.out, devices[0].device_kind, found)


if __name__ == "__main__":
    main()
