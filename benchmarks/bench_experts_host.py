"""Host time of a layer of experts under FSDP2 on one rank, forward and backward, with 8 and with 128 experts.

On a CPU, with weights so small that products take little time, and as many padded rows for both numbers of experts.
A kind says how the layer has its experts: "list", a parameter for each, or "stack", one for all
(`GroupedLinear(stacked=True)`). Rows have the minimum over rounds of the CPU time of the calling thread, and its ratio
to the time with 8 experts.

    python benchmarks/bench_experts_host.py [--rounds 40]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rows
from qshard import _ffi
from qshard.torch_bridge import GroupedLinear

FEW, MANY = 8, 128
WIDTH, TOKENS = 16, 2048  # 16 rows, a whole tile, for each of 128 experts
WARM_UP = 3  # calls that build plans
KINDS = {"list": False, "stack": True}


def call_of(experts: int, *, stacked: bool) -> Callable[[], None]:
    layer = GroupedLinear(experts, WIDTH, WIDTH, recipe="CurrentScaling", stacked=stacked)
    fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    x, sizes = torch.randn(TOKENS, WIDTH, requires_grad=True), torch.full((experts,), TOKENS // experts)
    return lambda: layer(x, sizes).sum().backward()


def measure(rounds: int) -> list[dict[str, object]]:
    calls = {(kind, e): call_of(e, stacked=stacked) for kind, stacked in KINDS.items() for e in (FEW, MANY)}
    best = dict.fromkeys(calls, float("inf"))
    for number in range(WARM_UP + rounds):
        for key, call in calls.items():
            start = time.thread_time()
            call()
            if number >= WARM_UP:
                best[key] = min(best[key], time.thread_time() - start)
    return [
        {"kind": f"{kind}, {experts} experts", "ms": f"{1e3 * took:.2f}", "times": f"{took / best[kind, FEW]:.2f}"}
        for (kind, experts), took in best.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    _ffi.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows.write("experts_host", rows.cpu_name(), measure(options.rounds))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
