"""Training step of a Llama-like model in PyTorch, for `bench_fsdp2.py` and `bench_step_torch.py`.

`model_shapes.py` has the shapes. By default: 8 layers of width 4096, FFN 14336, vocabulary 32000: 2.0 B weights; 2 x
4096 tokens per GPU. With `BENCH_DEVICE=cpu` in the environment, ranks are on the CPU, to try a benchmark with
`--model tiny`: times are the host's, and peaks are 0.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import model_shapes
from bench_device import DEVICE
from mixture_torch import Mixture
from model_shapes import Shape
from qshard.torch_bridge import LinearCrossEntropy

FLAT_STEPS, PART = 50, 10  # the first and the last PART steps are compared


def plain_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = (shape.heads, shape.kv_heads, shape.kv_heads)  # of q, k and v
        self.attention_norm, self.ffn_norm = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        for name, (rows, columns) in shape.linears.items():
            setattr(self, name, nn.Linear(columns, rows, bias=False))
        self.mixture: nn.Module | None = Mixture(shape) if shape.experts else None
        self.swiglu = plain_swiglu

    def forward(self, x: Tensor) -> Tensor:
        h = self.attention_norm(x)
        layers = zip((self.q, self.k, self.v), self.heads, strict=True)
        q, k, v = (layer(h).unflatten(-1, (heads, -1)).transpose(1, 2) for layer, heads in layers)
        grouped = self.heads[0] != self.heads[1]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        x = x + self.o(mixed.transpose(1, 2).flatten(-2))
        h = self.ffn_norm(x)
        if self.mixture is not None:
            return x + self.mixture(h)
        return x + self.down(self.swiglu(self.gate(h), self.up(h)))


class Model(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = LinearCrossEntropy(shape.width, shape.vocabulary)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return logits, or the loss against labels."""
        x = self.embedding(tokens).to(torch.bfloat16)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x), labels)


def fresh(shape: Shape) -> Model:
    """Build the model in float32, with the same weights on every rank and in every run."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = Model(shape)
    for weight in model.parameters():
        if weight.ndim > 1:
            nn.init.normal_(weight, std=0.02)
    return model


def is_quantized(_: nn.Module, name: str) -> bool:
    """Return whether a layer is in a block, unlike the head, and not the router of a mixture of experts."""
    return "blocks" in name and "router" not in name


def shard(model: Model) -> None:
    """Shard fully over all ranks by FSDP2, block by block, gathered and reduced in bfloat16."""
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)


def step_of(
    model: nn.Module,
    optimizer: Any,
    shape: Shape,
    after: Callable[[], Any] = lambda: None,
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    *,
    fused_loss: bool = False,
) -> Callable[[], Tensor]:
    """Return a step on this rank's tokens, which are the same in every step.

    Args:
      model: the model.
      optimizer: its optimizer.
      shape: its shape.
      after: called at the end of a step.
      around: returns the context manager for the forward pass.
      fused_loss: whether the head computes the loss without returning logits.
    """
    generator = torch.Generator(device=DEVICE).manual_seed(dist.get_rank())
    tokens = torch.randint(shape.vocabulary, (shape.batch, shape.context + 1), device=DEVICE, generator=generator)

    def step() -> Tensor:
        with around():
            made = model(tokens[:, :-1], tokens[:, 1:] if fused_loss else None)
        loss = made if fused_loss else F.cross_entropy(made.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after()
        return loss

    return step


@dataclass
class Timed:
    """Measurements of steps.

    Single steps start on an idle GPU. Back-to-back steps, as in training, differ from them by the host's first calls
    and by the clock rate that the GPU's power limit allows.

    Attributes:
      ms: milliseconds of each single step.
      peak: peak bytes in use in each single step.
      live: bytes in use after each single step.
      loss: loss of the last step.
      running_ms: milliseconds per step of back-to-back steps.
    """

    ms: list[float]
    peak: list[int]
    live: list[int]
    loss: float
    running_ms: float = 0.0

    def row(self) -> dict[str, object]:
        return {
            "ms": f"{statistics.median(self.ms):.1f}",
            "running_ms": f"{self.running_ms:.1f}",
            "peak_GiB": f"{max(self.peak) / 2**30:.2f}",
        }

    def flat_row(self) -> dict[str, object]:
        """Return values of the first and the last `PART` steps, which should agree."""
        parts = {"first": slice(PART), "last": slice(-PART, None)}
        return {
            **{f"{name}_ms": f"{statistics.median(self.ms[part]):.1f}" for name, part in parts.items()},
            **{f"{name}_peak_GiB": f"{max(self.peak[part]) / 2**30:.2f}" for name, part in parts.items()},
            "grown_bytes": self.live[-1] - self.live[PART],
        }


def time_steps(step: Callable[[], Tensor], steps: int) -> Timed:
    """Measure single steps, started together on all ranks, then back-to-back steps. The step must have run before."""
    found = Timed([], [], [], 0.0)
    synchronize()
    for _ in range(steps):
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
        dist.barrier()
        begin = mark()
        loss = step()
        found.ms.append(milliseconds(begin, mark()))
        found.peak.append(torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0)
        found.live.append(torch.cuda.memory_allocated() if DEVICE == "cuda" else 0)
    begin = mark()
    for _ in range(steps):
        loss = step()
    found.running_ms = milliseconds(begin, mark()) / steps
    found.loss = loss.item()
    return found


def has_device() -> bool:
    return DEVICE == "cpu" or torch.cuda.is_available()


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def mark() -> Any:
    """Record an event in the current stream. On a CPU, read the clock."""
    if DEVICE == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(begin: Any, end: Any) -> float:
    """Wait for the second of two marks, and return the time between them."""
    if DEVICE == "cpu":
        return 1e3 * (end - begin)
    synchronize()
    elapsed: float = begin.elapsed_time(end)
    return elapsed


def add_arguments(parser: argparse.ArgumentParser, out: str, model: str = "2b", mixtures: bool = False) -> None:
    model_shapes.add_arguments(parser, model, mixtures)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--flat", action="store_true", help=f"{FLAT_STEPS} steps: the first and the last {PART}")
    parser.add_argument("--out", default=out, help="the file of results, without .csv")
