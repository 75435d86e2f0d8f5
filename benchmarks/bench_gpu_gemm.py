"""GEMMs of codes on one GPU, compared with torch._scaled_mm on the same codes, and bfloat16 GEMMs of the same shapes.

The shapes occur in a model of 2.0 B parameters with 8192 tokens. `TFLOP_per_s` counts 2 M N K. Block scales start in
their stored layout. Moving them into cuBLASLt's layout is part of a call: in the handler for qshard, before the call
for torch. `gpu_timing.py` explains how contenders are timed.

    python benchmarks/bench_gpu_gemm.py [--rounds 20]
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable

import torch

import rows
from gpu_timing import COPIES, Call, microseconds
from qshard import gemm_dispatch
from qshard._core.quantize_steps import Plane
from qshard.formats import E5M2, FP8_E4M3, FP8_E5M2, Format, FP8_1x128, FP8_128x128
from qshard.torch_bridge._ops.bind import ops
from qshard.torch_bridge._quantized.gemm import Operand, matmul

M, SIZES = 8192, (4096, 14336)
BF16 = torch.bfloat16


def operands(rows: int, k: int, fmt: Format) -> list[Operand]:
    """Draw COPIES of an operand, with normally distributed codes: they draw as much power as in training."""
    grid = () if fmt.block is None else (rows // fmt.block[0], k // fmt.block[1])
    dtype = getattr(torch, fmt.element.name)
    made = [torch.randn(rows, k, device="cuda").to(dtype).view(torch.uint8) for _ in range(COPIES)]
    return [Operand(fmt, Plane(codes, torch.ones(grid, device="cuda"))) for codes in made]


def by_torch(a: Operand, b: Operand, fast: bool) -> torch.Tensor:
    """Multiply by torch._scaled_mm, which reads scales of 1-D blocks by columns and scales of 2-D blocks by rows."""

    def scale(operand: Operand) -> torch.Tensor:
        stored: torch.Tensor = operand.parts.scale_inv
        return stored.t().contiguous().t() if operand.format.block == (1, 128) else stored

    a_codes, b_codes = (x.parts.data.view(getattr(torch, x.format.element.name)) for x in (a, b))
    scale_b = scale(b) if b.format.block is None else scale(b).t()
    return torch._scaled_mm(
        a_codes, b_codes.t(), scale_a=scale(a), scale_b=scale_b, out_dtype=BF16, use_fast_accum=fast
    )


def contenders(n: int, k: int) -> dict[str, tuple[float, Call]]:
    x, w = ([torch.randn(size, k, device="cuda", dtype=BF16) for _ in range(COPIES)] for size in (M, n))
    found: dict[str, Callable[[int], object]] = {"bfloat16 torch.mm": lambda i: torch.mm(x[i], w[i].t())}
    options = {"dtype": BF16, "workspace": gemm_dispatch.LIBRARY_BYTES}
    found["bfloat16 qshard"] = lambda i: ops.gemm_values_nt(x[i], w[i], **options)
    kinds = {
        "E4M3, fast": (FP8_E4M3, FP8_E4M3, True),
        "E4M3": (FP8_E4M3, FP8_E4M3, False),
        "E5M2 x E4M3": (FP8_E5M2, FP8_E4M3, False),
        "1x128 x 128x128": (FP8_1x128, FP8_128x128, False),
        "1x128 x 1x128": (FP8_1x128, FP8_1x128, False),
    }
    for name, (a_format, b_format, fast) in kinds.items():
        a, b = operands(M, k, a_format), operands(n, k, b_format)
        found[f"{name} qshard"] = lambda i, a=a, b=b, fast=fast: matmul(a[i], b[i], BF16, fast=fast)
        if a_format.element != E5M2:
            found[f"{name} torch._scaled_mm"] = lambda i, a=a, b=b, fast=fast: by_torch(a[i], b[i], fast)
    return {name: (0.0, call) for name, call in found.items() if runs(call)}


def runs(call: Callable[[int], object]) -> bool:
    """Return whether this PyTorch supports a call. qshard's calls fall back if the GPU does not support them."""
    try:
        call(0)
    except (RuntimeError, ValueError) as error:
        print(str(error).splitlines()[0])
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU: nothing to measure")
        return
    version = gemm_dispatch.library_version()
    results = []
    for n, k in itertools.product(SIZES, SIZES):
        us = microseconds(contenders(n, k), args.rounds)
        for name, time in us.items():
            tflops = 2 * M * n * k / time / 1e6
            row = {"operation": name, "shape": f"{M}x{n}x{k}", "us": round(time, 1), "TFLOP_per_s": round(tflops)}
            results.append(row | {"cublaslt": version})
        torch.cuda.empty_cache()
    rows.write("gpu_gemm", torch.cuda.get_device_name(), results)


if __name__ == "__main__":
    main()
