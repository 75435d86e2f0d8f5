"""A transformer block under tensor and sequence parallelism in JAX, forward and backward, in `shard_map` over all GPUs.

By default width 8192, 64 heads of 128, FFN 28672 with SwiGLU, one sequence of 8192 tokens (`model_shapes.py`),
everything in bfloat16 unless quantized. Between layers x is sharded along the sequence. Weights of q, k and v, and of
gate and up, are sharded along N, the other two along K.

    bf16            `all_gather` of x and dy, `psum_scatter` of y and dx, overlapped by XLA where it can
    fp8             `linear(gather_rows=)` and `linear(scatter_rows=)`: codes are gathered
    fp8 overlapped  fp8 with `overlap=True`
    mlp ...         without attention and its layers

Each kind runs in its own process. Steps are issued back to back and timed together, and the median of rounds counts.

    python benchmarks/bench_tensor_parallel_jax.py [--steps 8] [--kinds bf16,fp8,fp8 overlapped]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from functools import partial
from typing import Any

import processes
from model_shapes import SHAPES, Shape

SCATTERED = ("o", "down")
AXIS = "tp"
OPTIONS = {"xla_gpu_enable_triton_gemm": False}
RECIPES = {"bf16": None, "fp8": "CurrentScaling", "block": "BlockScaling", "mxfp8": "MXFP8"}
KINDS = "bf16,fp8,fp8 overlapped,mlp bf16,mlp fp8,mlp fp8 overlapped"
ROUNDS = 3

Tree = Any


def weights_of(kind: str, shape: Shape) -> dict[str, tuple[int, int]]:
    """Return the layers of a kind, `(N, K)`."""
    mlp = {"gate_up": (2 * shape.ffn, shape.width), "down": (shape.width, shape.ffn)}
    return mlp if kind.startswith("mlp") else {"qkv": (3 * shape.width, shape.width), "o": (shape.width,) * 2, **mlp}


def block(x: Any, weights: Tree, kind: str, head: int, attention: str) -> Any:
    """Run the block on one device, with heads of `head`. x and the result are `[1, context / devices, width]`."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    import qshard.jax as qshard

    recipe = RECIPES[kind.removeprefix("mlp ").split()[0]]
    overlap = "overlapped" in kind.split()

    def norm(x: Any) -> Any:
        values = x.astype(jnp.float32)
        return (values * lax.rsqrt(jnp.mean(values * values, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)

    def gathered(x: Any, name: str, count: int) -> Any:
        """Split a product into the parts of weights that share x."""
        if recipe is None:
            y = jnp.einsum("bsk,nk->bsn", lax.all_gather(x, AXIS, axis=1, tiled=True), weights[name])
        else:
            y = qshard.linear(x, weights[name], recipe, gather_rows=AXIS, overlap=overlap)
        return jnp.split(y, count, axis=-1)

    def scattered(x: Any, name: str) -> Any:
        if recipe is None:
            y = jnp.einsum("bsk,nk->bsn", x, weights[name])
            return lax.psum_scatter(y, AXIS, scatter_dimension=1, tiled=True)
        return qshard.linear(x, weights[name], recipe, scatter_rows=AXIS, overlap=overlap)

    if "qkv" in weights:
        q, k, v = (y.reshape(*y.shape[:-1], -1, head) for y in gathered(norm(x), "qkv", 3))
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=attention)
        x = x + scattered(mixed.reshape(*mixed.shape[:-2], -1), "o")
    gate, up = gathered(norm(x), "gate_up", 2)
    return x + scattered(jax.nn.silu(gate) * up, "down")


def lower(devices: Any, kind: str, shape: Shape, attention: str) -> Any:
    """Lower the gradients of x and of the weights, for devices that need not exist. Also return the argument shapes."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = Mesh(devices, (AXIS,), axis_types=(AxisType.Auto,))
    sizes = weights_of(kind, shape)
    cuts = (P(None, AXIS), {name: P(None, AXIS) if name in SCATTERED else P(AXIS) for name in sizes})

    def gradients(x: Any, weights: Tree) -> Tree:
        y, vjp = jax.vjp(partial(block, kind=kind, head=shape.width // shape.heads, attention=attention), x, weights)
        return vjp(y)  # y also serves as its own gradient, to save computing one

    step = jax.shard_map(gradients, mesh=mesh, in_specs=cuts, out_specs=cuts)
    shapes = ((1, shape.context, shape.width), sizes)
    given = jax.tree.map(
        lambda size, cut: jax.ShapeDtypeStruct(size, jnp.bfloat16, sharding=NamedSharding(mesh, cut)),
        shapes,
        cuts,
        is_leaf=lambda node: isinstance(node, tuple) and isinstance(node[0], int),
    )
    with jax.set_mesh(mesh):
        return jax.jit(step).lower(*given), given


def measure(kind: str, shape: Shape, steps: int) -> dict[str, object]:
    import jax
    import numpy as np

    devices = jax.devices()
    began = time.perf_counter()
    program, given = lower(np.array(devices), kind, shape, "xla" if jax.default_backend() == "cpu" else "cudnn")
    compiled = program.compile(compiler_options=OPTIONS)
    took = time.perf_counter() - began

    def values(i: int, like: Any) -> Any:
        scale = 1.0 if i == 0 else like.shape[-1] ** -0.5
        make = jax.jit(lambda key: scale * jax.random.normal(key, like.shape, like.dtype), out_shardings=like.sharding)
        return make(jax.random.key(i))

    leaves, structure = jax.tree.flatten(given)
    arguments = jax.tree.unflatten(structure, [values(i, like) for i, like in enumerate(leaves)])
    for _ in range(2):
        jax.block_until_ready(compiled(*arguments))
    times = []
    for _ in range(ROUNDS):  # each is the average of several steps
        began = time.perf_counter()
        for _ in range(steps):
            made = compiled(*arguments)
        jax.block_until_ready(made)
        times.append((time.perf_counter() - began) / steps)
    return {
        "kind": kind,
        "devices": len(devices),
        "ms": f"{1e3 * statistics.median(times):.2f}",
        "peak_GiB": processes.peak_gib(devices[0]),
        "compile_s": f"{took:.1f}",
        "machine": devices[0].device_kind,
    }


def add_ratio(row: dict[str, Any], others: list[dict[str, Any]]) -> None:
    plain = "mlp bf16" if row["kind"].startswith("mlp") else "bf16"
    base = next((each["ms"] for each in (*others, row) if each["kind"] == plain), None)
    row["times_bf16"] = f"{float(base) / float(row['ms']):.2f}" if base else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="wide")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--kinds", default=KINDS)
    parser.add_argument("--out", default="tensor_parallel_jax", help="the file of results, without .csv")
    parser.add_argument("--one", help="measure one kind, and print its row as JSON")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one, SHAPES[arguments.model], arguments.steps)))
        return
    if not processes.has_device():
        parser.exit(message="bench_tensor_parallel_jax: no CUDA device, nothing to measure\n")
    given = [f"--model={arguments.model}", f"--steps={arguments.steps}"]
    sys.exit(processes.measure_kinds(__file__, arguments.kinds.split(","), given, arguments.out, add_ratio))


if __name__ == "__main__":
    main()
