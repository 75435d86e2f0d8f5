"""Profile of a training step on one GPU: time by purpose of kernels, and time without a computing kernel.

Kernels are classified by name. So a fused kernel of a compiler counts once, for the first of PARTS that its name
matches, and torchao's eager casts count as `other elementwise`, because they are kernels of torch.

Kernels of several streams overlap, so parts may add up to more than the step. Time without a computing kernel is

    exposed   only collectives run
    idle      nothing runs: the host is late, or a stream waits
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

# The first match counts.
PARTS = (
    ("collectives", r"nccl"),
    # Compiled kernels that only move attention's operands also have it in their names. cuDNN's backward has helpers.
    ("attention", r"^(?!triton).*(flash|fmha|sdpa|attention)|cudnn::fusion"),
    # qshard's kernels match by full names, because these include the types of their arguments.
    ("optimizer", r"qshard::.*Adam"),
    ("norms and activations", r"qshard::.*(RmsNorm|SwiGlu|\bMapKernel|\bSumPartsKernel)"),
    ("GEMM", r"qshard::.*\bContractKernel"),
    ("other elementwise", r"qshard::.*\bCombineRows"),
    ("quantize", r"qshard::|transformer_engine::"),
    ("GEMM", r"nvjet|gemm|cutlass|cublas|sm90_xmma|splitK|^triton_tem"),
    # Mostly FSDP2's copies of shards into and out of gather buffers, and of gradients, with bfloat16 to float32 casts.
    ("copies", r"chunk_cat|split_with_sizes|CatArrayBatchedCopy|multi_tensor_apply.*Copy|direct_copy|^Mem(cpy|set)"),
    ("norms and activations", r"rms_norm|layer_norm|GammaBeta|silu|swiglu"),
    # Norms of weights, for torchao's scales, and its activation casts as fused by a compiler.
    ("quantize", r"LpNorm|lpnorm|^triton.*(amax|abs_max|clamp)"),
    ("optimizer", r"[aA]dam|multi_tensor_apply"),
    ("loss", r"softmax|SoftMax|nll_loss|cross_entropy"),
    # The backward of embedding sorts tokens.
    ("embedding", r"embedding|vectorized_gather|sum_and_scatter|compute_grad_weight|partials?_(per_)?segment|cub::"),
)
OTHER = "other elementwise"
NAMES = (
    "GEMM",
    "attention",
    "quantize",
    "norms and activations",
    OTHER,
    "copies",
    "optimizer",
    "loss",
    "embedding",
    "collectives",
    "exposed",
    "idle",
)

Kernel = tuple[str, float, float]
"""(name, start, end), with times in microseconds."""


def part_of(kernel: str) -> str:
    """Return the entry of NAMES that a kernel counts for."""
    return next((name for name, pattern in PARTS if re.search(pattern, kernel)), OTHER)


def profile(step: Callable[[], Any], steps: int = 3) -> tuple[dict[str, float], dict[str, float]]:
    """Return `summary` of some steps. `step` must have run before."""
    return summary(kernels_of(step, steps), steps)


def kernels_of(step: Callable[[], Any], steps: int = 1) -> list[Kernel]:
    """Record the kernels of some steps, including copies and fills. `step` must have run before."""
    import torch
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    torch.cuda.synchronize()
    with host_as_without_profiler(), record(activities=[ProfilerActivity.CUDA], acc_events=True) as found:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    return [
        (event.name, event.time_range.start, event.time_range.end)
        for event in found.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    ]


@contextlib.contextmanager
def host_as_without_profiler() -> Iterator[None]:
    """Keep qshard's calls on the fast path that training uses.

    While a profiler records, calls leave their fast path so that it sees every op (`qshard.torch_bridge._ops.eager`).
    Here the profiler measures whether the host is late, so it must not slow it down.
    """
    from qshard.torch_bridge import _torch_internals

    with mock.patch.object(_torch_internals, "_profiler_is_on", return_value=False):  # fails if the name changes
        yield


def summary(kernels: Iterable[Kernel], steps: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return milliseconds per step of "step" (first kernel to end of last) and each of NAMES, and of each kernel.

    >>> ms, _ = summary([("nvjet", 0, 3000), ("ncclAllGather", 1000, 5000), ("nvjet", 6000, 7000)], 1)
    >>> {name: value for name, value in ms.items() if value}
    {'step': 7.0, 'GEMM': 4.0, 'collectives': 4.0, 'exposed': 2.0, 'idle': 1.0}
    """
    spans: dict[str, list[tuple[float, float]]] = {name: [] for name in NAMES}
    of_kernel: dict[str, float] = {}
    for name, start, end in kernels:
        spans[part_of(name)].append((start, end))
        of_kernel[name] = of_kernel.get(name, 0.0) + (end - start) / 1e3 / steps
    every = [span for those in spans.values() for span in those]
    if not every:
        raise ValueError("summary: no kernel was recorded; the profiler has seen no GPU")
    computing = _covered(span for name, those in spans.items() if name != "collectives" for span in those)
    running, whole = _covered(every), max(end for _, end in every) - min(start for start, _ in every)
    us = {"step": whole, **{name: sum(end - start for start, end in those) for name, those in spans.items()}}
    us |= {"exposed": running - computing, "idle": whole - running}
    longest = dict(sorted(of_kernel.items(), key=lambda item: -item[1]))
    return {name: value / 1e3 / steps for name, value in us.items()}, longest


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return how long at least one span lasts."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
