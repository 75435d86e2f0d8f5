"""Host time and collectives of a step under tensor parallelism, forward and backward, on a CPU.

Blocks and kinds are as in `bench_tensor_parallel.py`, but so small that products take little time. One process runs as
rank 0 of a process group without other ranks: collectives do nothing, and only the host's work is measured.
Rows have the minimum over rounds of the CPU time of the calling thread, and the collectives of a step by kind.

    python benchmarks/bench_tensor_parallel_host.py [--ranks 4] [--rounds 40] [--kinds "fp8,fp8 codes"] [--profile 30]

`--profile N` also prints the callers of collectives, and the N functions with the most time of their own.
"""

from __future__ import annotations

import argparse
import collections
import cProfile
import dataclasses
import pstats
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import bench_tensor_parallel
import rows
import step_torch
from model_shapes import SHAPES
from qshard import _ffi

KINDS = ("bf16", "fp8", "fp8 codes", "fp8 overlap", "mxfp8 codes", "nvfp4 codes")
SHAPE = dataclasses.replace(SHAPES["tiny"], context=128)  # 32 rows for each of 4 ranks: whole blocks of MXFP8
WARM_UP = 3
PACKAGES = "torch_bridge", "distributed/tensor"
"""Parts of paths: the innermost two frames from these name the caller of a collective."""


class Collectives(TorchDispatchMode):
    """Counts collectives by kind and by (kind, caller)."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: collections.Counter[str] = collections.Counter()
        self.callers: collections.Counter[tuple[str, str]] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kind = func.__name__.split(".")[0].strip("_")
        if func.namespace in ("c10d", "_c10d_functional") and not kind.startswith(("wait", "wrap")):
            frames = [frame for frame in traceback.extract_stack() if any(part in frame.filename for part in PACKAGES)]
            self.kinds[kind] += 1
            self.callers[kind, " < ".join(frame.name for frame in reversed(frames[-5:]))] += 1
        return func(*args, **(kwargs or {}))


def collectives_of(step: Callable[[], Tensor]) -> Collectives:
    with torch.compiler.set_stance("force_eager"), Collectives() as found:  # Dynamo would trace the mode.
        step()
    return found


def host_ms(step: Callable[[], Tensor], rounds: int) -> float:
    best = float("inf")
    for number in range(WARM_UP + rounds):
        start = time.thread_time()
        step()
        if number >= WARM_UP:
            best = min(best, time.thread_time() - start)
    return 1e3 * best


def print_profile(step: Callable[[], Tensor], found: Collectives, functions: int) -> None:
    for (kind, caller), count in found.callers.most_common():
        print(f"{count:4} {kind}: {caller}")
    with cProfile.Profile() as profile:
        for _ in range(10):
            step()
    pstats.Stats(profile).sort_stats("tottime").print_stats(functions)


def measure(kinds: list[str], rounds: int, functions: int) -> list[dict[str, object]]:
    results: list[dict[str, object]] = []
    for kind in kinds:
        torch._dynamo.reset()
        step = bench_tensor_parallel.build(kind, SHAPE)
        took = host_ms(step, rounds)
        found = collectives_of(step)
        if functions:
            print(f"\n{kind}")
            print_profile(step, found, functions)
        by_kind = ", ".join(f"{count} {name}" for name, count in sorted(found.kinds.items()))
        results.append({"kind": kind, "ranks": dist.get_world_size(), "ms": f"{took:.2f}", "collectives": by_kind})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--profile", type=int, default=0, metavar="N")
    options = parser.parse_args()
    torch.set_num_threads(1)
    _ffi.set_num_threads(1)
    step_torch.DEVICE = "cpu"
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.ranks)
    found = measure(options.kinds.split(","), options.rounds, options.profile)
    rows.write("tensor_parallel_host", rows.cpu_name(), found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
