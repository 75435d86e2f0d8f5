"""Training step of a 2.0 B model under FSDP2 and ZeRO, for every recipe and kind of weight: time, memory, wire bytes.

The model is `step_torch.py` with AdamW, run eagerly. Linear layers of the blocks are quantized, embedding and head are
not. Other weights are gathered in bfloat16, and gradients are reduced in bfloat16. Sharded kinds:

    shard, primary    FSDP2 with float32 shards, and with primary weights
    zero              ZeroOptimizer(shard_weights=True) of a bfloat16 model: codes of float32 masters, and bfloat16
                      gradients on the wire, as autograd computes them
    zero-float32      zero with ZeroOptimizer's default of float32 gradients on the wire
    nn.Linear         bf16 baseline: the same fully_shard, with torch's fused AdamW

Kinds with whole weights on each rank, of a bfloat16 model:

    zero1             ZeroOptimizer with float32 masters and states, gradients as in `zero`
    ddp               bf16 baseline: DistributedDataParallel and fused AdamW, bfloat16 states and no masters
    zero-redundancy   bf16 baseline: ddp with torch's ZeroRedundancyOptimizer

The memory of a rank is counted from its tensors, in bytes per element of the quantized weights, times the number of
ranks: a float32 shard counts 4. For kinds without FSDP2 all weights are counted. Peak memory is PyTorch's, for a step
after the first.

    python benchmarks/bench_fsdp2.py [--layers 8] [--steps 6] [--recipes fp8,mxfp8] [--kinds shard,primary,zero]
    python benchmarks/bench_fsdp2.py --recipes bf16,fp8 --kinds zero1,ddp,zero-redundancy --out zero1
    python benchmarks/bench_fsdp2.py --flat --recipes fp8 --kinds zero,zero1    # 50 steps: constant time and memory?
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import qshard.torch_bridge as qshard
import step_torch
from cases import measure_cases
from model_shapes import Shape, shape_of
from qshard.torch_bridge import ShardedWeight

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import options

KINDS = ("shard", "primary", "zero")
OF_BF16 = {"nn.Linear", "ddp", "zero-redundancy"}  # kinds without codes
ALL_KINDS = (*KINDS, "zero-float32", "zero1", "ddp", "zero-redundancy", "nn.Linear")


def build(recipe: Any, kind: str, shape: Shape) -> tuple[nn.Module, Any]:
    model = step_torch.fresh(shape)
    if recipe is not None:
        qshard.convert(model, recipe, filter=step_torch.is_quantized, primary=kind == "primary")
    if kind in ("ddp", "zero-redundancy"):
        model = DistributedDataParallel(model.to(torch.bfloat16), gradient_as_bucket_view=True)
        if kind == "ddp":
            return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4, fused=True)
    if kind.startswith("zero"):
        model.to(torch.bfloat16)
        given: dict[str, Any] = {"decoupled_weight_decay": True, "weight_decay": 0.01, "parity": "master"}
        if kind != "zero1":
            given.update(shard_weights=True, units=[*model.blocks])
        if kind != "zero-float32":
            given["reduce_dtype"] = torch.bfloat16
        return model, qshard.ZeroOptimizer(model, lr=1e-4, **given)
    step_torch.shard(model)
    if recipe is None:
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return model, qshard.AdamW(model.parameters(), lr=1e-4)


class Wire(TorchDispatchMode):
    """Counts the bytes of this rank's collectives, by purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = {"gathered": 0, "reduced": 0, "amaxes": 0}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(op)
        if "_allgather_base_" in name:
            self.bytes["gathered"] += args[0].nbytes
        elif "_reduce_scatter_base_" in name or "alltoall_base_" in name:
            self.bytes["reduced"] += args[1].nbytes
        elif "c10d.allreduce_" in name and args[0][0].dtype.is_floating_point:
            self.bytes["reduced"] += args[0][0].nbytes
        elif "c10d.broadcast_" in name:  # used by ZeroRedundancyOptimizer
            self.bytes["gathered"] += args[0][0].nbytes
        elif "c10d.allreduce_" in name:
            self.bytes["amaxes"] += args[0][0].nbytes
        return op(*args, **(kwargs or {}))


def kept_bytes(model: nn.Module, optimizer: Any) -> dict[str, float]:
    """Count the bytes that this rank keeps between steps, per element of the blocks' weights, times the ranks."""
    own = {"codes": 0, "high precision": 0, "states": 0}
    if isinstance(optimizer, qshard.ZeroOptimizer):
        elements = sum(w.size for flat in optimizer._flats for w in flat.weights)  # all weights: they share buffers
        own["codes"] = sum(flat.stored_bytes for flat in optimizer._flats)
        own["high precision"] = sum(flat.masters.nbytes for flat in optimizer._flats)
        states = list(optimizer.state.values())
    elif isinstance(model, DistributedDataParallel):
        elements = sum(p.numel() for p in model.parameters())
        own["high precision"] = sum(p.nbytes for p in model.parameters())
        inner = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
        states = list(inner.state.values())
    else:
        weights = [p for name, p in model.named_parameters() if "blocks" in name and p.ndim == 2]
        elements = sum(p.numel() for p in weights)
        for p in weights:
            local = p.to_local() if isinstance(p, DTensor) else p
            primary = local.scale_state.primary if isinstance(local, ShardedWeight) else None
            plain = local.shard if isinstance(local, ShardedWeight) else local
            own["codes"] += 0 if primary is None or primary.codes is None else primary.codes.nbytes
            own["high precision"] += plain.nbytes if primary is None else primary.master.nbytes
        states = [optimizer.state[p] for p in weights]
    for state in states:
        tensors = [t.to_local() if isinstance(t, DTensor) else t for t in state.values()]
        own["states"] += sum(t.nbytes for t in tensors if t.numel() > 1)
    return {f"{name}, B": size * dist.get_world_size() / elements for name, size in own.items()}


def measure(case: tuple[str, str], arguments: argparse.Namespace) -> dict[str, dict[str, object]]:
    gc.collect()
    torch.cuda.empty_cache()
    name, kind = case
    recipe, shape = options.RECIPES[name], shape_of(arguments)
    model, optimizer = build(recipe, kind, shape)
    step = step_torch.step_of(model, optimizer, shape, lambda: None if recipe is None else qshard.update_scales(model))
    for _ in range(2):
        step()
    with Wire() as wire:
        step()
    found = step_torch.time_steps(step, step_torch.FLAT_STEPS if arguments.flat else arguments.steps)
    row: dict[str, object] = {
        "recipe": name,
        "kind": kind,
        "ranks": dist.get_world_size(),
        "layers": shape.layers,
        **found.row(),
        **{f"{key}_MB": f"{size / 1e6:.1f}" for key, size in wire.bytes.items()},
        **{
            key.replace(", B", "_B").replace(" ", "_"): f"{value:.2f}"
            for key, value in kept_bytes(model, optimizer).items()
        },
        "loss": f"{found.loss:.4f}",
        **(found.flat_row() if arguments.flat else {}),
    }
    return {arguments.out + "_flat" * arguments.flat: row}


def cases(arguments: argparse.Namespace) -> Iterator[tuple[str, str]]:
    kinds = arguments.kinds.split(",")
    for name in arguments.recipes.split(","):
        if name == "bf16":  # has one FSDP2 kind; ZeroOptimizer also takes plain layers
            kinds_of_fsdp2 = ["nn.Linear"] if {"shard", "primary", "nn.Linear"} & set(kinds) else []
            others = [kind for kind in kinds if kind not in ("shard", "primary", "nn.Linear")]
            yield from ((name, kind) for kind in (*kinds_of_fsdp2, *others))
        else:
            yield from ((name, kind) for kind in kinds if kind not in OF_BF16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    step_torch.add_arguments(parser, "fsdp2")
    parser.add_argument("--recipes", default=",".join(options.RECIPES))
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"some of {', '.join(ALL_KINDS)}")
    arguments = parser.parse_args()
    if unknown := set(arguments.kinds.split(",")) - set(ALL_KINDS):
        parser.error(f"--kinds: {sorted(unknown)[0]!r} is not one of {', '.join(ALL_KINDS)}")
    if not step_torch.has_device():
        parser.exit(message="bench_fsdp2: no CUDA device, nothing to measure\n")
    sys.exit(measure_cases(measure, list(cases(arguments)), arguments, step_torch.DEVICE))


if __name__ == "__main__":
    main()
