"""Device of benchmarks in PyTorch. With `BENCH_DEVICE=cpu` in the environment, CPUs try a benchmark, without Triton."""

import os

DEVICE = os.environ.get("BENCH_DEVICE", "cuda")
COMPILER = "aot_eager" if DEVICE == "cpu" else "inductor"
