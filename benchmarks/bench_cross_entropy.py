"""Cross entropy on one GPU, forward and backward, compared with PyTorch, torch.compile and optax in the same run.

"cross entropy" rows compute the mean loss of bfloat16 logits and its gradient. "linear cross entropy" rows compute the
loss of a head without bias, and the gradients of x and w, also for the vocabulary of Llama 3. Peers named "float32"
widen logits first, as is usual. `gpu_timing.py` explains how PyTorch calls are timed. JAX offers no graph to replay, so
its rows are wall-clock times of a queue of calls.

`percent_of_copy` refers to the minimum bytes: logits read twice, their gradient written once. `peak_GiB` is the
memory of a call in addition to its operands, including gradients: measured by PyTorch's allocator, or planned by XLA.

    python benchmarks/bench_cross_entropy.py [--rows 8192] [--classes 32000] [--width 4096] [--rounds 10]
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import torch
import torch.nn.functional as F

import rows
from bench_device import COMPILER, DEVICE
from bench_gpu_ops import jax_microseconds
from gpu_timing import COPIES, Contenders, microseconds
from qshard.torch_bridge import cross_entropy, linear_cross_entropy

BF16 = torch.bfloat16
JAX_CALLS = 20  # calls in a queue; each takes at least a millisecond
MOVED = 6  # bytes per logit: two reads and a write
BASE = "linear cross entropy float32 torch"
"""Row that peaks of heads are compared with."""
LARGE = 128256  # classes of Llama 3

Loss = Callable[..., Any]


def losses() -> dict[str, Loss]:
    """Losses of (logits, labels)."""

    def float32(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.float(), labels)

    return {
        "cross entropy qshard": cross_entropy,
        "cross entropy torch": F.cross_entropy,
        "cross entropy float32 torch": float32,
        "cross entropy float32 torch.compile": torch.compile(float32, dynamic=False, backend=COMPILER),
    }


def heads() -> dict[str, Loss]:
    """Losses of (x, w, labels)."""

    def float32(x: torch.Tensor, w: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(x, w).float(), labels)

    def codes(x: torch.Tensor, w: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(x, w, labels, recipe="CurrentScaling")

    return {
        "linear cross entropy qshard": linear_cross_entropy,
        "linear cross entropy FP8 qshard": codes,
        BASE: float32,
        "linear cross entropy float32 torch.compile": torch.compile(float32, dynamic=False, backend=COMPILER),
    }


def draw_logits(count: int, classes: int) -> list[Any]:
    """Draw copies of (logits, labels)."""
    logits = [torch.randn(count, classes, device=DEVICE, dtype=BF16).requires_grad_() for _ in range(COPIES)]
    return [(each, torch.randint(classes, (count,), device=DEVICE)) for each in logits]


def draw_heads(count: int, classes: int, width: int) -> list[Any]:
    """Draw copies of (x, w, labels)."""
    x = [torch.randn(count, width, device=DEVICE, dtype=BF16).requires_grad_() for _ in range(COPIES)]
    w = [(torch.randn(classes, width, device=DEVICE) * width**-0.5).to(BF16).requires_grad_() for _ in range(COPIES)]
    labels = [torch.randint(classes, (count,), device=DEVICE) for _ in range(COPIES)]
    return list(zip(x, w, labels, strict=True))


def both_ways(loss: Loss, copies: list[Any]) -> Callable[[int], Any]:
    """Return a call that computes the loss and the gradients of its float operands."""

    def call(i: int) -> Any:
        *leaves, labels = copies[i]
        made = loss(*leaves, labels)
        return made.detach(), *torch.autograd.grad(made, leaves)

    return call


def torch_rows(options: argparse.Namespace) -> list[dict[str, object]]:
    of_losses = draw_logits(options.rows, options.classes)
    of_heads = draw_heads(options.rows, options.classes, options.width)
    contenders: Contenders = {}
    for found, copies in ((losses(), of_losses), (heads(), of_heads)):
        contenders |= {name: (MOVED, both_ways(loss, copies)) for name, loss in found.items()}
    peaks = {name: peak(call) for name, (_, call) in contenders.items()}
    out = [torch.empty_like(logits) for logits, _ in of_losses]
    contenders["copy"] = (4, lambda i: out[i].copy_(of_losses[i][0].detach()))
    peaks["copy"] = 0.0
    return rows_of(microseconds(contenders, options.rounds), peaks, options, "copy")


def large_rows(options: argparse.Namespace) -> list[dict[str, object]]:
    """Measure heads of `LARGE` classes, without the one that stores all logits in float32."""
    large = argparse.Namespace(**vars(options) | {"classes": LARGE})
    copies = draw_heads(large.rows, LARGE, large.width)
    contenders: Contenders = {
        name.replace("entropy", f"entropy of {LARGE} classes"): (MOVED, both_ways(loss, copies))
        for name, loss in heads().items()
        if name != BASE
    }
    peaks = {name: peak(call) for name, (_, call) in contenders.items()}
    return rows_of(microseconds(contenders, options.rounds), peaks, large, "copy")


def peak(call: Callable[[int], Any]) -> float:
    """Measure the GiB that a second call needs. The first call compiles."""
    call(0)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call(0)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def jax_contenders(count: int, classes: int, width: int) -> dict[str, tuple[Any, list[Any]]]:
    """Return jitted functions of a tuple of arrays, each with copies of its arguments."""
    import jax
    import jax.numpy as jnp
    import optax

    import qshard.jax as qj

    def optax_loss(logits: Any, labels: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()

    def step(loss: Loss, leaves: int) -> Any:
        run = jax.value_and_grad(loss, argnums=tuple(range(leaves)))
        return jax.jit(lambda arrays: run(*arrays))

    of_losses, of_heads = [], []
    for i in range(COPIES):
        keys = jax.random.split(jax.random.key(i), 4)
        labels = jax.random.randint(keys[0], (count,), 0, classes)
        of_losses.append((jax.random.normal(keys[1], (count, classes), jnp.bfloat16), labels))
        w = jax.random.normal(keys[3], (classes, width), jnp.bfloat16) * width**-0.5
        of_heads.append((jax.random.normal(keys[2], (count, width), jnp.bfloat16), w, labels))
    return {
        "jax copy": (jax.jit(lambda arrays: arrays[0] + jnp.bfloat16(1)), of_losses),
        "cross entropy qshard.jax": (step(qj.cross_entropy, 1), of_losses),
        "cross entropy float32 optax": (step(optax_loss, 1), of_losses),
        "linear cross entropy qshard.jax": (step(qj.linear_cross_entropy, 2), of_heads),
        "linear cross entropy float32 optax": (
            step(lambda x, w, labels: optax_loss(jnp.dot(x, w.T), labels), 2),
            of_heads,
        ),
    }


def jax_rows(options: argparse.Namespace) -> list[dict[str, object]]:
    us, peaks = {}, {}
    for name, (call, copies) in jax_contenders(options.rows, options.classes, options.width).items():
        plan = call.lower(copies[0]).compile().memory_analysis()
        peaks[name] = (plan.temp_size_in_bytes + plan.output_size_in_bytes) / 2**30
        us |= jax_microseconds({name: (MOVED, call)}, copies, options.rounds, JAX_CALLS)
    return rows_of(us, peaks, options, "jax copy")


def rows_of(
    us: Mapping[str, float], peaks: Mapping[str, float], options: argparse.Namespace, copy: str
) -> list[dict[str, object]]:
    """Build rows for `rows.write`. A head's memory is compared with PyTorch's, if that was measured."""
    found = []
    for name, each in us.items():
        is_head = name.startswith("linear")
        sizes = [options.rows, *([options.width] if is_head else []), options.classes]
        moved = 4 if name == copy else MOVED
        base = peaks.get(BASE)
        found.append(
            {
                "operation": name,
                "shape": "x".join(map(str, sizes)),
                "us": round(each, 1),
                "peak_GiB": round(peaks[name], 3),
                "peak_beside_torch_GiB": round(peaks[name] - base, 3) if is_head and base is not None else "",
                "percent_of_copy": "" if is_head else round(100 * us[copy] * moved / 4 / each, 1),
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--classes", type=int, default=32000)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(message="bench_cross_entropy: no CUDA device, nothing to measure\n")
    table = torch_rows(options)
    torch.cuda.empty_cache()
    table += large_rows(options)
    torch.cuda.empty_cache()
    rows.write("cross_entropy", torch.cuda.get_device_name(), table + jax_rows(options))


if __name__ == "__main__":
    main()
