"""CPU kernels, compared with a copy in the same run, torch eager and jitted jnp.

Bytes are the minimum an operation must move: each input read once, each output written once. `percent_of_copy` compares
GB/s with a float32 copy of the same number of elements in the same run. The process is pinned to one core, or to
`--threads`. In each round every contender runs for a few milliseconds, and the median over rounds counts. On one core
time is CPU time, so that other processes do not count. On several cores it is wall-clock time.

Rows named after a format are whole quantizations of bfloat16 for one plane or both: amax, scales and codes (for NVFP4
packed, with a given global amax). `quantize_rivals.py` has the formulas of the other contenders, which run in cache
only: in DRAM they take seconds per call.

qshard and the copy write to existing arrays. torch eager and jnp allocate their results, and at DRAM sizes they spend
much of their time on page faults, so only ratios in cache are meaningful. Each SIMD target has its own file of rows.
QSHARD_SIMD selects a lesser target for qshard, and has no effect on the other contenders.

    python benchmarks/bench_cpu_kernels.py [--rounds 15] [--threads 1]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable

import rows
from quantize_rivals import jnp_quantize, qshard_quantize, torch_quantize

IN_CACHE, DRAM = 1024, 8192  # rows and columns: 1 M and 64 M elements
SLICE = 5e-3  # seconds per contender and round

Contenders = dict[str, tuple[float, Callable[[], object]]]  # name: (bytes per element, call)


def qshard_and_torch(size: int) -> Contenders:
    import numpy as np
    import torch

    from qshard import _ffi

    e4m3, fp8 = {"element": "float8_e4m3fn"}, torch.float8_e4m3fn
    x = torch.randn(size, size)
    x16 = x.bfloat16()
    out, out16 = torch.empty_like(x), torch.empty_like(x16)
    data, data_t = torch.empty(2, size, size, dtype=torch.uint8)
    codes = torch.randint(0, 120, (size, size), dtype=torch.uint8)
    x_array, out_array = x.numpy(), out.numpy()  # NumPy copies with memmove, which beats torch's copy_.
    amax, scale = torch.empty(()), torch.tensor(64.0)
    by_row, by_block = torch.full((size,), 64.0), torch.full((size, size // 128), 64.0)

    def run(op: str, inputs: tuple, outputs: tuple, **attributes: object) -> Callable[[], None]:
        return lambda: _ffi.call(op, inputs, outputs, attributes)

    def cast(x: torch.Tensor) -> torch.Tensor:
        return (x * scale).clamp(-448, 448).to(fp8)

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q = cast(x)
        return q, q.view(torch.uint8).t().contiguous()

    blocks = (size, size // 128, 128)
    return {
        **qshard_quantize(x16),
        **(torch_quantize(x16) if size == IN_CACHE else {}),
        "copy": (8, lambda: np.copyto(out_array, x_array)),
        "amax_tensor float32 qshard": (4, run("amax_tensor", (x,), (amax,))),
        "amax_tensor float32 torch": (4, lambda: x.abs().amax()),
        "amax_tensor bfloat16 qshard": (2, run("amax_tensor", (x16,), (amax,))),
        "cast_tensor float32 qshard": (5, run("cast_tensor", (x, scale), (data,), **e4m3)),
        "cast_tensor float32 torch": (5, lambda: cast(x)),
        "cast_tensor float32, scale a row, qshard": (5, run("cast_tensor", (x, by_row), (data,), **e4m3)),
        "cast_tensor float32, scale a block of 128, qshard": (
            5,
            run("cast_tensor", (x.view(blocks), by_block), (data.view(blocks),), **e4m3),
        ),
        "cast_tensor bfloat16 qshard": (3, run("cast_tensor", (x16, scale), (data,), **e4m3)),
        "cast_tensor bfloat16 torch": (3, lambda: cast(x16)),
        "cast_transpose float32 qshard": (6, run("cast_transpose", (x, scale), (data, data_t), batch=0, **e4m3)),
        "cast_transpose float32 torch": (6, lambda: both(x)),
        "cast_transpose bfloat16 qshard": (4, run("cast_transpose", (x16, scale), (data, data_t), batch=0, **e4m3)),
        "cast_transpose bfloat16 torch": (4, lambda: both(x16)),
        "transpose qshard": (2, run("transpose", (codes,), (data_t,), batch=0)),
        "transpose torch": (2, lambda: data_t.copy_(codes.t())),
        "dequantize float32 qshard": (5, run("dequantize", (codes, scale), (out,), **e4m3)),
        "dequantize float32 torch": (5, lambda: codes.view(fp8).float() * scale),
        "dequantize bfloat16 qshard": (3, run("dequantize", (codes, scale), (out16,), **e4m3)),
        "dequantize bfloat16 torch": (3, lambda: (codes.view(fp8).float() * scale).bfloat16()),
    }


def jitted_jnp(size: int) -> Contenders:
    import jax
    import jax.numpy as jnp

    fp8 = jnp.float8_e4m3fn
    x = jax.random.normal(jax.random.key(0), (size, size))
    x16 = x.astype(jnp.bfloat16)
    codes = jnp.clip(x, -448, 448).astype(fp8)
    scale = jnp.float32(64)

    def wait(f: Callable, *args: jax.Array) -> Callable[[], object]:
        jitted = jax.jit(f)
        return lambda: jax.block_until_ready(jitted(*args))

    def cast(x: jax.Array, s: jax.Array) -> jax.Array:
        return jnp.clip(x.astype(jnp.float32) * s, -448, 448).astype(fp8)

    def both(x: jax.Array, s: jax.Array) -> tuple[jax.Array, jax.Array]:
        q = cast(x, s)
        return q, jax.lax.optimization_barrier(q).T

    return {
        **(jnp_quantize(x16, wait) if size == IN_CACHE else {}),
        "amax_tensor float32 jnp": (4, wait(lambda x: jnp.max(jnp.abs(x)), x)),
        "cast_tensor float32 jnp": (5, wait(cast, x, scale)),
        "cast_tensor bfloat16 jnp": (3, wait(cast, x16, scale)),
        "cast_transpose float32 jnp": (6, wait(both, x, scale)),
        "cast_transpose bfloat16 jnp": (4, wait(both, x16, scale)),
        "dequantize float32 jnp": (5, wait(lambda q, s: q.astype(jnp.float32) * s, codes, scale)),
        "dequantize bfloat16 jnp": (
            3,
            wait(lambda q, s: (q.astype(jnp.float32) * s).astype(jnp.bfloat16), codes, scale),
        ),
    }


def median_seconds(contenders: Contenders, rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    repeats = {}
    for name, (_, call) in contenders.items():
        call()
        start = clock()
        call()
        repeats[name] = max(1, int(SLICE / (clock() - start)))
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, (_, call) in contenders.items():
            start = clock()
            for _ in range(repeats[name]):
                call()
            times[name].append((clock() - start) / repeats[name])
    return {name: statistics.median(t) for name, t in times.items()}


def measure(size: int, rounds: int, threads: int, simd: str) -> list[dict[str, object]]:
    contenders = {**qshard_and_torch(size), **jitted_jnp(size)}
    seconds = median_seconds(contenders, rounds, time.process_time if threads == 1 else time.perf_counter)
    rate = {name: contenders[name][0] * size**2 / s / 1e9 for name, s in seconds.items()}
    return [
        {
            "operation": name,
            "shape": f"{size}x{size}",
            "threads": threads,
            "simd": simd if name.endswith("qshard") else "",
            "bytes_per_element": contenders[name][0],
            "us": round(seconds[name] * 1e6, 1),
            "GB_per_s": round(rate[name], 1),
            "percent_of_copy": round(100 * rate[name] / rate["copy"], 1),
        }
        for name in sorted(contenders, key=lambda name: (name != "copy", name))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    # Set the affinity before any framework counts cores.
    cores = sorted(os.sched_getaffinity(0))[-options.threads :]
    os.sched_setaffinity(0, cores)
    os.environ["JAX_PLATFORMS"] = "cpu"
    warnings.simplefilter("ignore")

    import torch

    from qshard import _ffi

    torch.set_num_threads(len(cores))
    _ffi.set_num_threads(len(cores))
    table = [
        row
        for size, rounds in ((IN_CACHE, options.rounds), (DRAM, max(1, options.rounds // 3)))
        for row in measure(size, rounds, len(cores), _ffi.simd())
    ]
    threads = f"_{len(cores)}_threads" if len(cores) > 1 else ""
    rows.write(f"cpu_kernels_{_ffi.simd()}{threads}", rows.cpu_name(), table)


if __name__ == "__main__":
    main()
