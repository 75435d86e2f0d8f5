"""Training step of a Llama-like model in PyTorch, for `bench_fsdp2.py` and `bench_step_torch.py`.

8 layers of width 4096, FFN 14336, vocabulary 32000: 2.0 B weights; 2 x 4096 tokens per GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from qshard.torch_bridge import LinearCrossEntropy

WIDTH, FFN, VOCABULARY, HEADS, BATCH, CONTEXT = 4096, 14336, 32000, 32, 2, 4096
DEVICE = "cuda"
FLAT_STEPS, PART = 50, 10  # the first and the last PART steps are compared


def plain_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.ffn_norm = nn.RMSNorm(WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, FFN, bias=False) for _ in range(2))
        self.down = nn.Linear(FFN, WIDTH, bias=False)
        self.swiglu = plain_swiglu

    def forward(self, x: Tensor) -> Tensor:
        h = self.attention_norm(x)
        q, k, v = (layer(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        h = self.ffn_norm(x)
        return x + self.down(self.swiglu(self.gate(h), self.up(h)))


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = LinearCrossEntropy(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return logits, or the loss against labels."""
        x = self.embedding(tokens).to(torch.bfloat16)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x), labels)


def fresh(layers: int) -> Model:
    """Build the model in float32, with the same weights on every rank and in every run."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = Model(layers)
    for weight in model.parameters():
        if weight.ndim == 2:
            nn.init.normal_(weight, std=0.02)
    return model


def is_quantized(_: nn.Module, name: str) -> bool:
    """Return whether a linear layer is in a block, unlike the head."""
    return "blocks" in name


def shard(model: Model) -> None:
    """Shard fully over all ranks by FSDP2, block by block, gathered and reduced in bfloat16."""
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)


def step_of(
    model: nn.Module,
    optimizer: Any,
    after: Callable[[], Any] = lambda: None,
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    *,
    fused_loss: bool = False,
) -> Callable[[], Tensor]:
    """Return a step on this rank's tokens, which are the same in every step.

    Args:
      model: the model.
      optimizer: its optimizer.
      after: called at the end of a step.
      around: returns the context manager for the forward pass.
      fused_loss: whether the head computes the loss without returning logits.
    """
    generator = torch.Generator(device=DEVICE).manual_seed(dist.get_rank())
    tokens = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1), device=DEVICE, generator=generator)

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
    torch.cuda.synchronize()
    for _ in range(steps):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.reset_peak_memory_stats()
        dist.barrier()
        begin.record()
        loss = step()
        end.record()
        torch.cuda.synchronize()
        found.ms.append(begin.elapsed_time(end))
        found.peak.append(torch.cuda.max_memory_allocated())
        found.live.append(torch.cuda.memory_allocated())
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(steps):
        loss = step()
    end.record()
    torch.cuda.synchronize()
    found.running_ms = begin.elapsed_time(end) / steps
    found.loss = loss.item()
    return found


def add_arguments(parser: argparse.ArgumentParser, out: str) -> None:
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--flat", action="store_true", help=f"{FLAT_STEPS} steps: the first and the last {PART}")
    parser.add_argument("--out", default=out, help="the file of results, without .csv")
