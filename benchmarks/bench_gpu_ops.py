"""Ops on one GPU, compared with a copy in the same run, torch.compile and jitted jnp.

Bytes are the minimum an operation must move: each input read once, each output written once. `percent_of_copy` compares
GB/s with a device copy of the same tensor in the same run. `gpu_timing.py` explains how contenders are timed. JAX
offers no graph to replay: its rows, including "jax copy", are wall-clock times of a queue of 100 calls.

    python benchmarks/bench_gpu_ops.py [--size 8192] [--rounds 20]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import torch

import rows
from gpu_timing import COPIES, Contenders, microseconds, rows_of
from qshard import _ffi

E4M3 = {"element": "float8_e4m3fn"}
BLOCKS = {
    "block_rows": 1,
    "block_cols": 128,
    **E4M3,
    "eps": 0.0,
    "pow2": False,
    "rounding": "up",
    "scale_dtype": "float32",
}
EXPERTS = 64
RANKS = 4
WIDTH, NORM_ROWS, NORM = 4096, 16, {"eps": 1e-5, "lead": 0}
JAX_CALLS = 100  # calls in a queue, so that dispatch and the final wait matter little


def torch_contenders(size: int) -> Contenders:
    x = [torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(COPIES)]
    x32 = [t.float() for t in x]
    out16 = [torch.empty_like(t) for t in x]
    codes = [torch.randint(0, 120, (size, size), device="cuda", dtype=torch.uint8) for _ in range(COPIES)]
    data, data_t = ([torch.empty_like(t) for t in codes] for _ in range(2))
    amax = torch.zeros((), device="cuda")
    scale, scale_inv = torch.full((), 64.0, device="cuda"), torch.full((), 1 / 64, device="cuda")
    # Rows of experts: a permutation of the rows of x, without padding.
    padded = torch.randperm(size, device="cuda").int()
    stops = torch.arange(1, EXPERTS + 1, device="cuda").mul(size // EXPERTS).int()
    scales, amaxes = torch.full((EXPERTS,), 64.0, device="cuda"), torch.zeros(EXPERTS, device="cuda")
    blocks, blocks_t = (torch.empty(shape, device="cuda") for shape in ((size, size // 128),) * 2)

    # Sums of ranks: four gradients in bfloat16, as ZeRO receives them.
    parts = [t.view(RANKS, -1) for t in x]
    totals = [torch.empty(size * size // RANKS, device="cuda") for _ in x]
    # A norm has rows as wide as a model. SwiGLU takes whole matrices.
    weight = torch.ones(WIDTH, device="cuda", dtype=torch.bfloat16)
    rstd = torch.ones(size**2 // WIDTH, device="cuda")
    dweight = torch.empty(WIDTH, device="cuda")
    sums = torch.empty(len(rstd) // NORM_ROWS, WIDTH, device="cuda")
    y, dy, dx, d_up = ([torch.randn_like(t) for t in x] for _ in range(4))
    amax_up = torch.zeros((), device="cuda")

    def run(op: str, inputs: tuple, outputs: tuple, attributes: dict) -> None:
        _ffi.call(op, inputs, outputs, attributes)

    @torch.compile
    def compiled_cast(t: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return (t.float() * s).clamp(-448, 448).to(torch.float8_e4m3fn)

    @torch.compile
    def compiled_cast_transpose(t: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q = (t.float() * s).clamp(-448, 448).to(torch.float8_e4m3fn)
        return q, q.t().contiguous()

    @torch.compile
    def compiled_dequantize(q: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return (q.view(torch.float8_e4m3fn).float() * s).bfloat16()

    def wide(t: torch.Tensor) -> torch.Tensor:
        return t.view(-1, WIDTH)

    @torch.compile
    def compiled_norm(t: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(t, (WIDTH,), w, 1e-5)

    @torch.compile
    def compiled_norm_grad(t: torch.Tensor, w: torch.Tensor, r: torch.Tensor, g: torch.Tensor) -> tuple:
        v, gw = t.float() * r[:, None], g.float() * w
        return (r[:, None] * (gw - v * (gw * v).mean(-1, keepdim=True))).bfloat16(), (g.float() * v).sum(0)

    @torch.compile
    def compiled_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(gate) * up

    @torch.compile
    def compiled_swiglu_grad(gate: torch.Tensor, up: torch.Tensor, g: torch.Tensor) -> tuple:
        a, s, gf = gate.float(), torch.sigmoid(gate.float()), g.float()
        return (gf * up * s * (1 + a * (1 - s))).bfloat16(), (gf * a * s).bfloat16()

    @torch.compile
    def compiled_sum(t: torch.Tensor) -> torch.Tensor:
        return t.float().sum(0)

    return {
        "copy": (4, lambda i: out16[i].copy_(x[i])),
        "amax_tensor qshard": (2, lambda i: run("amax_tensor", (x[i],), (amax,), {})),
        "cast_tensor qshard": (3, lambda i: run("cast_tensor", (x[i], scale), (data[i],), E4M3)),
        "cast_tensor torch.compile": (3, lambda i: compiled_cast(x[i], scale)),
        "cast_tensor float32 qshard": (5, lambda i: run("cast_tensor", (x32[i], scale), (data[i],), E4M3)),
        "cast_transpose qshard": (
            4,
            lambda i: run("cast_transpose", (x[i], scale), (data[i], data_t[i]), {"batch": 0, **E4M3}),
        ),
        "cast_transpose torch.compile": (4, lambda i: compiled_cast_transpose(x[i], scale)),
        "transpose qshard": (2, lambda i: run("transpose", (codes[i],), (data_t[i],), {"batch": 0})),
        "transpose torch": (2, lambda i: data_t[i].copy_(codes[i].t())),
        "dequantize qshard": (3, lambda i: run("dequantize", (codes[i], scale_inv), (out16[i],), E4M3)),
        "dequantize torch.compile": (3, lambda i: compiled_dequantize(codes[i], scale_inv)),
        "amax_grouped qshard": (2, lambda i: run("amax_grouped", (x[i], padded, stops), (amaxes,), {})),
        "cast_grouped qshard": (3, lambda i: run("cast_grouped", (x[i], padded, stops, scales), (data[i],), E4M3)),
        "cast_transpose_grouped qshard": (
            4,
            lambda i: run("cast_transpose_grouped", (x[i], padded, stops, scales), (data[i], data_t[i]), E4M3),
        ),
        "quantize_block_rows qshard": (
            3 + 4 / 128,
            lambda i: run("quantize_block_rows", (x[i], padded), (data[i], blocks), BLOCKS),
        ),
        "quantize_block_both_t_rows qshard": (
            4 + 8 / 128,
            lambda i: run(
                "quantize_block_both_t_rows",
                (x[i], padded),
                (data[i], blocks, data_t[i], blocks_t),
                {**BLOCKS, "block_rows": 128},
            ),
        ),
        "rms_norm qshard": (4, lambda i: run("rms_norm", (wide(x[i]), weight), (wide(y[i]), rstd, amax), NORM)),
        "rms_norm torch.compile": (4, lambda i: compiled_norm(wide(x[i]), weight)),
        "rms_norm_grad qshard": (
            6,
            lambda i: run(
                "rms_norm_grad",
                (wide(x[i]), weight, rstd, wide(dy[i])),
                (wide(dx[i]), dweight, sums),
                {"lead": 0, "rows": NORM_ROWS},
            ),
        ),
        "rms_norm_grad torch.compile": (6, lambda i: compiled_norm_grad(wide(x[i]), weight, rstd, wide(dy[i]))),
        "swiglu qshard": (6, lambda i: run("swiglu", (x[i], y[i]), (dx[i], amax), {"lead": 0})),
        "swiglu torch.compile": (6, lambda i: compiled_swiglu(x[i], y[i])),
        "swiglu_grad qshard": (
            10,
            lambda i: run("swiglu_grad", (x[i], y[i], dy[i]), (dx[i], d_up[i], amax, amax_up), {"lead": 0}),
        ),
        "swiglu_grad torch.compile": (10, lambda i: compiled_swiglu_grad(x[i], y[i], dy[i])),
        "add_ranks qshard": (
            2 + 4 / RANKS,
            lambda i: run("add_ranks", (parts[i], totals[i]), (totals[i],), {"fresh": True}),
        ),
        "add_ranks torch.compile": (2 + 4 / RANKS, lambda i: compiled_sum(parts[i])),
    }


def jax_contenders(size: int) -> tuple[dict[str, tuple[float, Callable]], list]:
    """Return the contenders, as functions of one copy, and the copies."""
    import jax
    import jax.numpy as jnp

    import qshard.jax
    from qshard.formats import FP8_E4M3, Usage

    x = [jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) for i in range(COPIES)]
    scale = jnp.float32(64)

    @jax.jit
    def cast(t, s):
        return jnp.clip(t.astype(jnp.float32) * s, -448, 448).astype(jnp.float8_e4m3fn)

    @jax.jit
    def current(t):
        return cast(t, 448 / jnp.max(jnp.abs(t)).astype(jnp.float32))

    @jax.jit
    def cast_transpose(t, s):
        q = cast(t, s)
        return q, jax.lax.optimization_barrier(q.T)

    return {
        "jax copy": (4, jax.jit(lambda t: t + jnp.bfloat16(1))),
        "cast_tensor jitted jnp": (3, lambda t: cast(t, scale)),
        "cast_transpose jitted jnp": (4, lambda t: cast_transpose(t, scale)),
        "current scaling jitted jnp": (5, current),
        "current scaling qshard.jax": (5, jax.jit(lambda t: qshard.jax.quantize(t, FP8_E4M3))),
        "current scaling both qshard.jax": (6, jax.jit(lambda t: qshard.jax.quantize(t, FP8_E4M3, usage=Usage.BOTH))),
    }, x


def jax_microseconds(
    contenders: dict[str, tuple[float, Callable]], x: list, rounds: int, calls: int = JAX_CALLS
) -> dict[str, float]:
    """Time JAX contenders, in queues of `calls` calls."""
    import jax

    times: dict[str, list[float]] = {name: [] for name in contenders}
    for r in range(rounds + 1):
        for name, (_, call) in contenders.items():
            start = time.perf_counter()
            for i in range(calls):
                out = call(x[i % COPIES])
            jax.block_until_ready(out)
            if r:  # the first round compiles
                times[name].append((time.perf_counter() - start) / calls * 1e6)
    return {name: statistics.median(t) for name, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(message="bench_gpu_ops: no CUDA device, nothing to measure\n")
    size, shape = options.size, f"{options.size}x{options.size}"
    of_torch = torch_contenders(size)
    table = rows_of(of_torch, microseconds(of_torch, options.rounds), size**2, shape, "copy")
    of_jax, x = jax_contenders(size)
    table += rows_of(of_jax, jax_microseconds(of_jax, x, options.rounds), size**2, shape, "jax copy")
    rows.write("gpu_ops", torch.cuda.get_device_name(), table)


if __name__ == "__main__":
    main()
