"""Each op on one GPU, beside a copy of the same run, torch.compile and jitted jnp.

Bytes are the fewest the operation must move: each input read once, each output written once. `percent_of_copy` compares
GB/s with a device copy of the same tensor in the same run. Every contender runs once a round, over inputs that rotate
through more memory than L2 holds; the median over rounds counts.

    python benchmarks/bench_gpu_ops.py [--size 8192] [--rounds 40]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import torch

from qshard import _ffi
from rows import write

E4M3 = {"element": "float8_e4m3fn"}
COPIES = 3  # of each input, each larger than L2


def time_torch(contenders: dict[str, Callable[[int], object]], rounds: int) -> dict[str, float]:
    """Median microseconds of one call of each contender, called with a number to choose its buffers by."""
    for call in contenders.values():
        for i in range(COPIES):
            call(i)
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for r in range(rounds):
        for name, call in contenders.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(100_000)  # The host queues the call before the device is free to run it.
            start.record()
            call(r % COPIES)
            stop.record()
            stop.synchronize()
            times[name].append(start.elapsed_time(stop) * 1e3)
    return {name: statistics.median(t) for name, t in times.items()}


def torch_rows(size: int, rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """(microseconds, bytes an element) of every torch contender."""
    handlers = _ffi.handlers("cuda")
    x = [torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(COPIES)]
    x32 = [t.float() for t in x]
    out16 = torch.empty_like(x[0])
    code = torch.empty(size, size, device="cuda", dtype=torch.uint8)
    code_t = torch.empty_like(code)
    codes = [torch.randint(0, 120, (size, size), device="cuda", dtype=torch.uint8) for _ in range(COPIES)]
    amax = torch.zeros((), device="cuda")
    scale, scale_inv = torch.full((), 64.0, device="cuda"), torch.full((), 1 / 64, device="cuda")
    scale_rule = {**E4M3, "eps": 0.0, "pow2": False}

    def run(op: str, inputs: tuple, outputs: tuple, attributes: dict) -> None:
        _ffi.call(handlers[op], inputs, outputs, attributes)

    def current(i: int) -> None:
        run("amax_tensor", (x[i],), (amax,), {})
        run("scale_from_amax", (amax,), (scale, scale_inv), scale_rule)
        run("cast_tensor", (x[i], scale), (code,), E4M3)

    def two_reads(i: int) -> None:
        run("amax_tensor", (x[i],), (amax,), {})
        run("cast_tensor", (x[(i + 1) % COPIES], scale), (code,), E4M3)

    @torch.compile
    def compiled_cast(t: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return (t.float() * s).clamp(-448, 448).to(torch.float8_e4m3fn)

    @torch.compile
    def compiled_cast_transpose(t: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q = (t.float() * s).clamp(-448, 448).to(torch.float8_e4m3fn)
        return q, q.t().contiguous()

    @torch.compile
    def compiled_current(t: torch.Tensor) -> torch.Tensor:
        s = 448.0 / t.abs().amax().float()
        return (t.float() * s).clamp(-448, 448).to(torch.float8_e4m3fn)

    @torch.compile
    def compiled_dequantize(q: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return (q.view(torch.float8_e4m3fn).float() * s).bfloat16()

    contenders = {
        "copy": (4, lambda i: out16.copy_(x[i])),
        "amax_tensor qshard": (2, lambda i: run("amax_tensor", (x[i],), (amax,), {})),
        "cast_tensor qshard": (3, lambda i: run("cast_tensor", (x[i], scale), (code,), E4M3)),
        "cast_tensor torch.compile": (3, lambda i: compiled_cast(x[i], scale)),
        "cast_tensor float32 qshard": (5, lambda i: run("cast_tensor", (x32[i], scale), (code,), E4M3)),
        "cast_transpose qshard": (
            4,
            lambda i: run("cast_transpose", (x[i], scale), (code, code_t), {"batch": 0, **E4M3}),
        ),
        "cast_transpose torch.compile": (4, lambda i: compiled_cast_transpose(x[i], scale)),
        "transpose qshard": (2, lambda i: run("transpose", (codes[i],), (code_t,), {"batch": 0})),
        "transpose torch": (2, lambda i: code_t.copy_(codes[i].t())),
        "dequantize qshard": (3, lambda i: run("dequantize", (codes[i], scale_inv), (out16,), E4M3)),
        "dequantize torch.compile": (3, lambda i: compiled_dequantize(codes[i], scale_inv)),
        "current scaling qshard": (5, current),
        "current scaling torch.compile": (5, lambda i: compiled_current(x[i])),
        "two full reads qshard": (5, two_reads),
    }
    times = time_torch({name: call for name, (_, call) in contenders.items()}, rounds)
    return times, {name: per_element for name, (per_element, _) in contenders.items()}


def jax_rows(size: int, rounds: int) -> tuple[dict[str, float], dict[str, float]]:
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

    contenders = {
        "jax copy": (4, jax.jit(lambda t: t + jnp.bfloat16(1))),
        "cast_tensor jitted jnp": (3, lambda t: cast(t, scale)),
        "cast_transpose jitted jnp": (4, lambda t: cast_transpose(t, scale)),
        "current scaling jitted jnp": (5, current),
        "current scaling qshard.jax": (5, jax.jit(lambda t: qshard.jax.quantize(t, FP8_E4M3))),
        "current scaling + transpose qshard.jax": (
            6,
            jax.jit(lambda t: qshard.jax.quantize(t, FP8_E4M3, usage=Usage.BOTH)),
        ),
    }
    calls = 10  # One call is shorter than its dispatch: time a queue of them.
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for r in range(rounds // 4 + 2):
        for name, (_, call) in contenders.items():
            start = time.perf_counter()
            for i in range(calls):
                out = call(x[i % COPIES])
            jax.block_until_ready(out)
            if r >= 2:
                times[name].append((time.perf_counter() - start) / calls * 1e6)
    return {n: statistics.median(t) for n, t in times.items()}, {n: b for n, (b, _) in contenders.items()}


def host_rows() -> dict[str, float]:
    """Microseconds of host time a call takes, small enough that the device keeps up with the queue."""
    from qshard.torch_bridge._ops import call_into

    x, scale = torch.randn(64, 64, device="cuda"), torch.tensor(2.0, device="cuda")
    code = torch.empty(64, 64, device="cuda", dtype=torch.uint8)
    out = torch.empty_like(x)
    contenders: dict[str, Callable[[], object]] = {
        "host: cast_tensor into given outputs": lambda: call_into("cast_tensor", (x, scale), (code,), E4M3),
        "host: torch.ops.qshard.cast_tensor": lambda: torch.ops.qshard.cast_tensor(x, scale, **E4M3),
        "host: torch.add into given output": lambda: torch.add(x, x, out=out),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    calls = 100
    for _ in range(100):
        for name, call in contenders.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            times[name].append((time.perf_counter() - start) / calls * 1e6)
    return {name: statistics.median(t) for name, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(message="bench_gpu_ops: no CUDA device, nothing to measure\n")
    rows: list[dict[str, object]] = []
    for copy, (times, per_element) in {
        "copy": torch_rows(options.size, options.rounds),
        "jax copy": jax_rows(options.size, options.rounds),
    }.items():
        rate = {name: per_element[name] * options.size**2 / us / 1e3 for name, us in times.items()}
        rows += [
            {
                "operation": name,
                "shape": f"{options.size}x{options.size}",
                "bytes_per_element": per_element[name],
                "us": round(us, 1),
                "GB_per_s": round(rate[name]),
                "percent_of_copy": round(100 * rate[name] / rate[copy], 1),
            }
            for name, us in times.items()
        ]
    rows += [
        {
            "operation": name,
            "shape": "64x64",
            "bytes_per_element": "",
            "us": round(us, 2),
            "GB_per_s": "",
            "percent_of_copy": "",
        }
        for name, us in host_rows().items()
    ]
    write("gpu_ops", torch.cuda.get_device_name(), rows)


if __name__ == "__main__":
    main()
