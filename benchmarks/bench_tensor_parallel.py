"""Blocks of a large model under tensor and sequence parallelism in PyTorch: forward and backward, no optimizer.

By default width 8192, FFN 28672, heads of 128, a sequence of 8192 (`model_shapes.py`), everything in bfloat16. Between
layers, activations are sharded along the sequence. A kind is a recipe and an option:

    bf16, fp8, ...    PyTorch's styles, which gather values; in bfloat16, or with a recipe of `examples/options.py`
    codes             qshard's styles, which gather codes
    overlap           qshard's styles, with communication of codes and sums during multiplications
    compiled          the same in torch.compile, a block at a time
    async             PyTorch's styles, compiled with torch.compile's async tensor parallelism

With `--fsdp N`, each of N groups of ranks has its own sequence, and FSDP2 shards the blocks over the groups. Time and
peak memory are measured as in `step_torch.py`.

    python benchmarks/bench_tensor_parallel.py [--layers 2] [--steps 10] [--kinds "bf16,fp8 codes,fp8 overlap"]
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import qshard.torch_bridge as qshard
import step_torch
from cases import measure_cases
from model_shapes import Shape, shape_of
from qshard.torch_bridge import tensor_parallel

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import options

KINDS = (
    *("bf16", "fp8", "fp8 codes", "fp8 overlap", "block", "block codes", "block overlap"),
    *("mxfp8 codes", "nvfp4 codes", "bf16 async", "bf16 compiled", "fp8 compiled", "fp8 codes compiled"),
)
WORDS = ("codes", "overlap", "async", "compiled")
WARM_UP = 3


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head = shape.width // shape.heads
        self.q, self.k, self.v, self.o = (nn.Linear(shape.width, shape.width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(shape.width, shape.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.ffn, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.attention, self.ffn = Attention(shape), FeedForward(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.ffn(self.ffn_norm(x))


def wrong_with(kind: str) -> str | None:
    """Return why a kind does not exist, or None."""
    recipe, *words = kind.split() or [""]
    if recipe not in options.RECIPES:
        return f"{recipe!r} is not one of {', '.join(options.RECIPES)}"
    if not set(words) <= set(WORDS):
        return f"{' '.join(words)!r} is not one of {', '.join(WORDS)}"
    styles = words[:-1] if words[-1:] == ["compiled"] else words
    if styles not in (([], ["async"]) if recipe == "bf16" else ([], ["codes"], ["overlap"])):
        return f"{recipe} is not there in {' '.join(words)!r}"
    return None


def parallelize_block(block: Block, words: list[str], mesh: DeviceMesh) -> None:
    overlap = "overlap" in words
    if overlap or "codes" in words:
        into = {"input_layouts": Shard(1), "desired_input_layouts": Shard(1)}
        colwise = tensor_parallel.ColwiseParallel(input_layouts=Shard(1), overlap=overlap)
        rowwise = tensor_parallel.RowwiseParallel(output_layouts=Shard(1), overlap=overlap)
    else:
        into = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
        colwise, rowwise = ColwiseParallel(), RowwiseParallel(output_layouts=Shard(1))
    plan = {
        **{name: SequenceParallel() for name in ("attention_norm", "ffn_norm")},
        **{name: PrepareModuleInput(**into) for name in ("attention", "ffn")},
        **{f"attention.{name}": colwise for name in "qkv"},
        **{f"ffn.{name}": colwise for name in ("gate", "up")},
        **dict.fromkeys(("attention.o", "ffn.down"), rowwise),
    }
    parallelize_module(block, mesh, plan)


def build(kind: str, shape: Shape, fsdp: int = 1) -> Callable[[], Tensor]:
    recipe, *words = kind.split()
    ranks = dist.get_world_size() // fsdp
    mesh = init_device_mesh(step_torch.DEVICE, (fsdp, ranks), mesh_dim_names=("fsdp", "tp"))
    torch.manual_seed(0)
    with torch.device(step_torch.DEVICE):
        model = nn.Sequential(*(Block(shape) for _ in range(shape.layers))).to(torch.bfloat16)
    if options.RECIPES[recipe] is not None:
        qshard.convert(model, options.RECIPES[recipe])
    for block in model:
        parallelize_block(block, words, mesh["tp"])
        if "async" in words or "compiled" in words:
            torch._inductor.config._micro_pipeline_tp = "async" in words
            block.compile()
        if fsdp > 1:
            fully_shard(block, mesh=mesh["fsdp"])
    sizes = (shape.batch, shape.context // ranks, shape.width)
    x, dy = (torch.randn(sizes, device=step_torch.DEVICE, dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()

    def step() -> Tensor:
        y = model(x)
        y.backward(dy)
        for parameter in (x, *model.parameters()):
            parameter.grad = None
        return y.detach()[0, 0, 0]

    return step


def measure(kind: str, arguments: argparse.Namespace) -> dict[str, dict[str, object]]:
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    shape = shape_of(arguments)
    step = build(kind, shape, arguments.fsdp)
    for _ in range(WARM_UP):
        step()
    found = step_torch.time_steps(step, arguments.steps)
    of_case = {"kind": kind, "ranks": dist.get_world_size(), "fsdp": arguments.fsdp, "layers": shape.layers}
    return {arguments.out: {**of_case, **found.row()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    step_torch.add_arguments(parser, "tensor_parallel", "wide")
    parser.set_defaults(steps=10)
    parser.add_argument("--fsdp", type=int, default=1, help="groups of ranks that FSDP2 shards over")
    parser.add_argument("--kinds", default=",".join(KINDS))
    arguments = parser.parse_args()
    kinds = [" ".join(kind.split()) for kind in arguments.kinds.split(",")]
    for kind in kinds:
        if wrong := wrong_with(kind):
            parser.error(f"--kinds: {kind!r}: {wrong}")
    if arguments.ranks % arguments.fsdp:
        parser.error(f"--fsdp: {arguments.ranks} ranks are not a multiple of {arguments.fsdp}")
    if not step_torch.has_device():
        parser.exit(message="bench_tensor_parallel: no CUDA device, nothing to measure\n")
    sys.exit(measure_cases(measure, kinds, arguments, step_torch.DEVICE))


if __name__ == "__main__":
    main()
