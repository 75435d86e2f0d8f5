"""Trains every recipe with both examples on the GPUs present, and keeps their rows.

Runs `examples/train_jax.py` and `examples/train_torch.py`, which train the same GPT from the same bits, and copies
their rows, with machine, commit and versions. Use `make train` on a CPU: it takes minutes there, its times mean little,
and it keeps no rows here.

    python benchmarks/bench_training.py [--steps 120] [--out build/train]
"""

from __future__ import annotations

import argparse
import csv
import pathlib
import subprocess
import sys

import torch

import rows

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("build/train"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(message="bench_training: no CUDA device, nothing to measure\n")
    for framework in ("jax", "torch"):
        script = EXAMPLES / f"train_{framework}.py"
        arguments = ["--formats", "all", "--steps", str(options.steps), "--out", str(options.out)]
        subprocess.run([sys.executable, str(script), *arguments], check=True)
        name = f"training_{framework}"
        with (options.out / f"{name}.csv").open(newline="") as file:
            rows.write(name, torch.cuda.get_device_name(), list(csv.DictReader(file)))


if __name__ == "__main__":
    main()
