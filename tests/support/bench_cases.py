"""Cases for `benchmarks/cases.py` to measure, in a module that its processes can import."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch.distributed as dist


def measure_or_fail(case: str, arguments: argparse.Namespace) -> dict[str, dict[str, object]]:
    """Two rows of a case. In "raises" rank 1 fails while the others wait for it; in "dies" it leaves no error."""
    if case == "raises" and dist.get_rank() == 1:
        raise ValueError("this case cannot be")
    if case == "dies" and dist.get_rank() == 1:
        sys.exit(3)
    dist.barrier()
    return {str(Path(arguments.out, name)): {"kind": case, "of": name} for name in ("time", "profile")}
