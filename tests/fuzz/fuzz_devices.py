"""Random calls of every op on the CPU and on the GPU: both give the same bits, or both refuse the call.

    python -P tests/fuzz/fuzz_devices.py --calls 100000 --workers 8 --seed 1

Calls are drawn as in `support/draws.py`, with operands of up to 2^21 elements: `tests/cpu/kernel_bits.py` draws smaller
ones, because it compares with the reference. Products and exponentials are left out: GPUs sum in another order, and
have exponentials of their own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from qshard import _ffi
from support import draws
from support.device_bits import compare


def work(device: str, calls: int, seed: int) -> list[str]:
    draws.MOST = 2**21
    np.seterr(all="ignore")
    torch.set_num_threads(1)
    _ffi.set_num_threads(1)
    return compare(device, calls, seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    each = -(-given.calls // given.workers)
    seeds = range(given.seed * 1000, given.seed * 1000 + given.workers)
    with multiprocessing.get_context("spawn").Pool(given.workers) as pool:
        parts = pool.starmap(work, [(given.device, each, seed) for seed in seeds])
    differ = [line for lines in parts for line in lines]
    print(f"{each * given.workers} calls, {len(differ)} differ: {dict(Counter(line.split()[0] for line in differ))}")
    print(*differ[:20], sep="\n")
    sys.exit(bool(differ))


if __name__ == "__main__":
    main()
