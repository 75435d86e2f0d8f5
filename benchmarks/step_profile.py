"""Where the time of a training step goes on one GPU: what its kernels are for, and when none of them computes.

Kernels are told apart by name, so a kernel that a compiler has fused counts once, for the first of PARTS that its name
has, and torchao's casts are `other elementwise` where no compiler fuses them: eager, they are kernels of torch.

Those of several streams run at the same time, so parts may add up to more than the step. What is left of it, where no
kernel computes:

    exposed   only collectives run
    idle      nothing runs: the host is late, or a stream waits
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

# The first that matches counts.
PARTS = (
    ("collectives", r"nccl"),
    # Kernels of a compiler name an attention that they only move operands of. cuDNN's backward has helpers.
    ("attention", r"^(?!triton).*(flash|fmha|sdpa|attention)|cudnn::fusion"),
    # Of qshard, in full: names of its kernels hold those of their arguments.
    ("optimizer", r"qshard::.*Adam"),
    ("norms and activations", r"qshard::.*(RmsNorm|SwiGlu|\bMapKernel|\bSumPartsKernel)"),
    ("quantize", r"qshard::|transformer_engine::"),
    ("GEMM", r"nvjet|gemm|cutlass|cublas|sm90_xmma|splitK|^triton_tem"),
    # FSDP2's, nearly all: of shards to what is gathered and out of it, and of gradients, from bfloat16 to float32 too.
    ("copies", r"chunk_cat|split_with_sizes|CatArrayBatchedCopy|multi_tensor_apply.*Copy|direct_copy|^Mem(cpy|set)"),
    ("norms and activations", r"rms_norm|layer_norm|GammaBeta|silu|swiglu"),
    # The norms of weights, for torchao's scales, and what it makes of activations where a compiler fuses it.
    ("quantize", r"LpNorm|lpnorm|^triton.*(amax|abs_max|clamp)"),
    ("optimizer", r"[aA]dam|multi_tensor_apply"),
    ("loss", r"softmax|SoftMax|nll_loss|cross_entropy"),
    # Its backward sorts tokens.
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
"""What it is called, when it begins and when it ends, in microseconds."""


def part_of(kernel: str) -> str:
    """Which of NAMES a kernel counts for."""
    return next((name for name, pattern in PARTS if re.search(pattern, kernel)), OTHER)


def profile(step: Callable[[], Any], steps: int = 3) -> tuple[dict[str, float], dict[str, float]]:
    """What `summary` says of some steps. `step` has run before."""
    return summary(kernels_of(step, steps), steps)


def kernels_of(step: Callable[[], Any], steps: int = 1) -> list[Kernel]:
    """What some steps launch, copies and fills too. `step` has run before."""
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
    """qshard's calls go the way that they go in training.

    A profiler is to see every op, so while one records they leave their fast way (`qshard.torch_bridge._ops.eager`).
    Here it is to see when the host is late, so it must not make it late.
    """
    from qshard.torch_bridge import _torch_internals

    with mock.patch.object(_torch_internals, "_profiler_is_on", return_value=False):  # Fails if there is no such name.
        yield


def summary(kernels: Iterable[Kernel], steps: int) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds a step: "step", from the first kernel to the end of the last, and each of NAMES; of each kernel.

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
    """How long at least one of them lasts."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
