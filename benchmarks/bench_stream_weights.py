"""Weight sync on several GPUs: `stream_weights` of an FSDP2 model, against all-gathers of the same bytes.

The model has the linear layers of transformer blocks in bfloat16. A kind is the format of a serving engine and of the
weights. A stream quantizes shards, reduces amaxes, gathers codes bucket by bucket, and drops each tensor. Its base is
one `all_gather_into_tensor` of a whole bucket after the other, with as many bytes in all. `gb_per_s` are the bytes that
a rank has at the end, by the time of the slowest rank; `above_mib` is the peak memory above the model, and `host_ms`
the time until rank 0 has issued all work. Contenders take turns, and the median over rounds counts.

    torchrun --nproc-per-node 2 benchmarks/bench_stream_weights.py [--blocks 8] [--rounds 5] [--bucket-mib 256]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rows
from bench_device import DEVICE
from qshard.torch_bridge import stream_weights
from qshard.torch_bridge._ops.collectives import all_gather

MIB = 2**20
BASE = "all-gather"
KINDS = {
    "deepseek": "FP8_128x128",
    "compressed-tensors": "FP8_E4M3",
    "compressed-tensors MX": "MXFP8_E4M3",
    "modelopt": "NVFP4",
}
"""Format of the engine, which ends at a space, and of the weights."""


class Shape(NamedTuple):
    blocks: int
    width: int
    hidden: int


class Measured(NamedTuple):
    """Seconds on the slowest rank, bytes that a rank has at the end, and bytes of peak memory above the model.

    `host` are the seconds until this rank has issued all work.
    """

    seconds: float
    nbytes: int
    above: int
    host: float


def model_of(shape: Shape) -> nn.Module:
    """Build the linear layers of attention and SwiGLU of each block, sharded by FSDP2."""
    blocks = []
    for _ in range(shape.blocks):
        sizes = [(shape.width, shape.width)] * 4 + [(shape.width, shape.hidden)] * 2 + [(shape.hidden, shape.width)]
        blocks.append(nn.Sequential(*(nn.Linear(*each, bias=False, dtype=torch.bfloat16) for each in sizes)))
    model = nn.Sequential(*blocks).to(DEVICE)
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    for block in (*model, model):
        fully_shard(block, mesh=mesh)
    return model


def stream(model: nn.Module, kind: str, bucket: int) -> int:
    """Stream the weights once, and return their bytes."""
    found = stream_weights(model, kind.split()[0], weight_format=KINDS[kind], bucket_bytes=bucket)
    return sum(tensor.nbytes for _, tensor in found)


def gather(nbytes: int, bucket: int) -> int:
    """All-gather as many bytes, a bucket at a time, and return their number."""
    ranks, done = dist.get_world_size(), 0
    while done < nbytes:
        part = -(-min(bucket, nbytes - done) // ranks)
        whole = torch.empty(ranks * part, dtype=torch.uint8, device=DEVICE)
        all_gather(whole, torch.empty(part, dtype=torch.uint8, device=DEVICE))
        done += whole.nbytes
    return done


def measure(call: Callable[[], int]) -> Measured:
    """Run a call between barriers."""
    dist.barrier()
    before = 0
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    nbytes = call()
    host = time.perf_counter() - start
    above = 0
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        above = torch.cuda.max_memory_allocated() - before
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=DEVICE)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return Measured(seconds.item(), nbytes, above, host)


def contenders(model: nn.Module, bucket: int, rounds: int) -> dict[str, Measured]:
    """Measure each kind beside an all-gather of its bytes."""
    calls: dict[str, Callable[[], int]] = {}
    for kind in KINDS:
        nbytes = stream(model, kind, bucket)
        calls[kind] = lambda kind=kind: stream(model, kind, bucket)
        calls[f"{BASE} of {kind}"] = lambda nbytes=nbytes: gather(nbytes, bucket)
    found: dict[str, list[Measured]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            found[name].append(measure(call))
    return {
        name: each[0]._replace(
            seconds=statistics.median(one.seconds for one in each), host=statistics.median(one.host for one in each)
        )
        for name, each in found.items()
    }


def rows_of(measured: dict[str, Measured]) -> list[dict[str, object]]:
    made: list[dict[str, object]] = []
    for kind, fmt in KINDS.items():
        one, base = measured[kind], measured[f"{BASE} of {kind}"]
        speed, of_base = (each.nbytes / each.seconds / 1e9 for each in (one, base))
        made.append(
            {
                "kind": f"{kind.split()[0]} {fmt}, {dist.get_world_size()} GPUs",
                "gb_per_s": f"{speed:.1f}",
                "all_gather_gb_per_s": f"{of_base:.1f}",
                "percent_of_all_gather": f"{100 * speed / of_base:.0f}",
                "gathered_mib": f"{one.nbytes / MIB:.0f}",
                "above_mib": f"{one.above / MIB:.0f}",
                "host_ms": f"{1e3 * one.host:.1f}",
            }
        )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=14336)
    parser.add_argument("--bucket-mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(message="bench_stream_weights: no CUDA device, nothing to measure\n")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    model = model_of(Shape(options.blocks, options.width, options.hidden))
    measured = contenders(model, options.bucket_mib * MIB, options.rounds)
    if dist.get_rank() == 0:
        rows.write("stream_weights", torch.cuda.get_device_name(), rows_of(measured))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
