"""Adam step on one GPU for 64 parameters of 2^20 elements, compared with a copy and with torch's fused AdamW.

Bytes are the minimum the step must move: parameter, gradient and states read once, and all but the gradient written
once. The tensors are together many times larger than L2, so one copy of them suffices. `gpu_timing.py` explains how
steps are timed.

    python benchmarks/bench_gpu_adam.py [--tensors 64] [--rounds 20]
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

import rows
from gpu_timing import Contenders, microseconds, rows_of
from qshard.torch_bridge import AdamW

SHAPE, CUT_SHAPE = (1024, 1024), (1024, 1000)  # rows of the second end within a block of scaled states
FP8 = {"exp_avg_dtype": torch.float8_e4m3fn, "exp_avg_sq_dtype": torch.float8_e5m2}
FP16 = {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16}
BF16 = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
SCALES = 2 * 2 * 4 / 128  # bytes per element of the scales of two states, read and written
SETTINGS: dict[str, tuple[float, torch.dtype, dict[str, Any]]] = {
    "adam float32": (28, torch.float32, {}),
    "adam float32, states bfloat16": (20, torch.float32, BF16),
    "adam float32, states float16": (20 + SCALES, torch.float32, FP16),
    "adam float32, states FP8": (16 + SCALES, torch.float32, FP8),
    "adam bfloat16 + float32 master": (28, torch.bfloat16, {"master_weights": "float32"}),
    "adam bfloat16 + remainder, states bfloat16": (18, torch.bfloat16, {**BF16, "master_weights": "remainder"}),
    "adam bfloat16 + remainder, states FP8": (14 + SCALES, torch.bfloat16, {**FP8, "master_weights": "remainder"}),
}


def parameters(count: int, dtype: torch.dtype, shape: tuple[int, int] = SHAPE) -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(torch.randn(shape, device="cuda").to(dtype)) for _ in range(count)]
    for p in made:
        p.grad = torch.randn_like(p)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(message="bench_gpu_adam: no CUDA device, nothing to measure\n")
    elements = options.tensors * SHAPE[0] * SHAPE[1]
    source = torch.randn(elements, device="cuda")
    target = torch.empty_like(source)
    contenders: Contenders = {"copy": (8, lambda _: target.copy_(source))}
    lr = torch.tensor(1e-3, device="cuda")
    for name, (size, dtype, settings) in SETTINGS.items():
        adam = AdamW(parameters(options.tensors, dtype), lr=lr, weight_decay=0.1, **settings)
        contenders[name] = (size, lambda _, adam=adam: adam.step())
    cut = AdamW(parameters(options.tensors, torch.float32, CUT_SHAPE), lr=lr, weight_decay=0.1, **FP8)
    moved = (16 + SCALES) * CUT_SHAPE[1] / SHAPE[1]  # per element of the other tensors
    contenders["adam float32, states FP8, rows of 1000"] = (moved, lambda _: cut.step())
    fused = torch.optim.AdamW(
        parameters(options.tensors, torch.float32), lr=1e-3, weight_decay=0.1, fused=True, capturable=True
    )
    contenders["adam float32, torch fused"] = (28, lambda _: fused.step())
    us = microseconds(contenders, options.rounds)
    shape = f"{options.tensors} x {SHAPE[0]}x{SHAPE[1]}"
    rows.write("gpu_adam", torch.cuda.get_device_name(), rows_of(contenders, us, elements, shape, "copy"))


if __name__ == "__main__":
    main()
