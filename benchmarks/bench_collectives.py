"""Rates of the collectives of sharded training over the GPUs of a host, in bfloat16.

A kind is a collective and the size of the whole tensor, that a rank gathers, or has before a reduction or exchange.
`gb_per_s` are the bytes that a rank receives from the others in a second, `(R - 1) / R` of the whole. Calls are issued
back to back; the median over rounds of the slowest rank counts. The row of the smallest size is the latency.

    python benchmarks/bench_collectives.py [--ranks 4] [--rounds 5] [--mib 0.0625,16,128,512]
"""

from __future__ import annotations

import argparse
import statistics
import sys

import torch
import torch.distributed as dist

import step_torch
from cases import measure_cases
from qshard.torch_bridge._ops import collectives

CALLS = 5
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # the name before torch 2.13
COLLECTIVES = {
    "all-gather": lambda whole, part: collectives.all_gather(whole, part),
    "reduce-scatter": lambda whole, part: reduce_scatter(part, whole),
    "all-to-all": lambda whole, part: dist.all_to_all_single(torch.empty_like(whole), whole),
}


def measure(case: tuple[str, float], arguments: argparse.Namespace) -> dict[str, dict[str, object]]:
    name, mib = case
    ranks = dist.get_world_size()
    part = torch.zeros(max(1, int(mib * 2**20) // (2 * ranks)), dtype=torch.bfloat16, device=step_torch.DEVICE)
    whole = torch.zeros(ranks * part.numel(), dtype=torch.bfloat16, device=step_torch.DEVICE)
    times = []
    for _ in range(1 + arguments.rounds):
        dist.barrier()
        begin = step_torch.mark()
        for _ in range(CALLS):
            COLLECTIVES[name](whole, part)
        took = torch.tensor(step_torch.milliseconds(begin, step_torch.mark()) / CALLS, device=step_torch.DEVICE)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        times.append(took.item())
    ms = statistics.median(times[1:])  # the first round connects
    rate = whole.nbytes * (ranks - 1) / ranks / ms / 1e6
    row = {"kind": name, "ranks": ranks, "mib": f"{mib:g}", "ms": f"{ms:.4f}", "gb_per_s": f"{rate:.1f}"}
    return {arguments.out: row}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", default="0.0625,16,128,512")
    parser.add_argument("--out", default="collectives", help="the file of results, without .csv")
    arguments = parser.parse_args()
    if not step_torch.has_device() or arguments.ranks < 2:
        parser.exit(message="bench_collectives: fewer than two GPUs, nothing to measure\n")
    cases = [(name, float(mib)) for name in COLLECTIVES for mib in arguments.mib.split(",")]
    sys.exit(measure_cases(measure, cases, arguments, step_torch.DEVICE))


if __name__ == "__main__":
    main()
