"""Grouped products of experts on one GPU, without quantization, compared with torch._grouped_mm in bfloat16.

"forward" multiplies tokens by the weight of their expert, "dx" multiplies the output's gradient by the transposed
weight, and "dw" contracts the tokens of each expert. Tokens are distributed uniformly at random. Rows of experts are
padded to 16 for codes with one scale for each expert, and to 128 for codes in blocks. `TFLOP_per_s` counts 2 M N K of
the tokens without padding. Sizes are on the device. Moving scales into cuBLASLt's layout is part of a call.
"dw" of codes is the project's own kernel, or cuBLASLt with QSHARD_CONTRACT_ROWS=0.
`gpu_timing.py` explains how contenders are timed.

    python benchmarks/bench_gpu_grouped_gemm.py [--rounds 10] [--shapes 8x16384x4096x14336,64x32768x7168x2048]
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

import rows
from gpu_timing import COPIES, Call, microseconds
from qshard import gemm_dispatch
from qshard._core.quantize_steps import Plane
from qshard.formats import FP8_E4M3, FP8_E5M2, Format, FP8_1x128, FP8_128x128
from qshard.torch_bridge._ops.bind import ops

# Experts, tokens, K, N: layers as in Mixtral, DeepSeek-V3 and Qwen3-30B-A3B.
SHAPES = "8x16384x4096x14336,64x32768x7168x2048,128x65536x2048x768"
BF16 = torch.bfloat16


def sizes_of(tokens: int, experts: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.bincount(torch.randint(experts, (tokens,), generator=generator), minlength=experts)


def padded_stops(sizes: Tensor, unit: int) -> Tensor:
    return ((sizes + unit - 1) // unit * unit).cumsum(0).to(torch.int32).cuda()


def codes(shape: tuple[int, ...], fmt: Format, experts: int) -> Plane:
    """Draw normally distributed codes: they draw as much power as in training."""
    data = torch.cat([torch.randn(each, device="cuda").to(getattr(torch, fmt.element.name)) for each in parts(shape)])
    grid = (experts,)
    if fmt.block is not None:
        grid = (*shape[:-2], *(-(-size // side) for size, side in zip(shape[-2:], fmt.block, strict=True)))
    return Plane(data.view(torch.uint8).view(shape), torch.ones(grid, device="cuda"))


def parts(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Split along the first axis, so that the fp32 numbers of codes take little memory."""
    step = max(1, -(-shape[0] // 8))
    return [(min(step, shape[0] - start), *shape[1:]) for start in range(0, shape[0], step)]


def of_values(layout: str, m: int, n: int, k: int, stops: Tensor) -> dict[str, Call]:
    """Return products of bfloat16. The tokens are K for layout "tn", and else M."""
    e, by_k = stops.numel(), layout == "tn"
    a_shape = (k, m) if by_k else (m, k)
    b_shape = {"nt": (e, n, k), "nn": (e, k, n), "tn": (k, n)}[layout]
    a, b = ([torch.randn(shape, device="cuda", dtype=BF16) for _ in range(COPIES)] for shape in (a_shape, b_shape))
    how = {"dtype": BF16, "workspace": gemm_dispatch.grouped_workspace_size(e, (m, n, k), by_k=by_k)}
    op = getattr(ops, f"gemm_grouped_values_{layout}")

    def by_torch(i: int) -> Tensor:
        first = a[i].t() if by_k else a[i]
        return torch._grouped_mm(first, b[i].transpose(1, 2) if layout == "nt" else b[i], offs=stops)

    return {"bf16 torch._grouped_mm": by_torch, "bf16 qshard": lambda i: op(a[i], b[i], stops, **how)}


def of_codes(a: Format, b: Format, m: int, n: int, k: int, stops: Tensor, by_k: bool, fast: bool) -> Call:
    e = stops.numel()
    x = [codes((m, k), a, e) for _ in range(COPIES)]
    y = [codes((n, k) if by_k else (e, n, k), b, e) for _ in range(COPIES)]
    workspace = gemm_dispatch.grouped_workspace_size(e, (m, n, k), a, b, by_k=by_k)
    multiply = gemm_dispatch.multiply_grouped_k if by_k else gemm_dispatch.multiply_grouped
    how = {"dtype": BF16, "fast": fast, "workspace": workspace}
    return lambda i: multiply(ops, x[i], a, y[i], b, stops, **how)


def contenders(product: str, sizes: Tensor, width: int, hidden: int) -> dict[str, tuple[float, Call]]:
    """Return the calls of one product. `width` is K of the forward pass and `hidden` its N."""
    by_k, tokens = product == "dw", int(sizes.sum())
    n, k = {"forward": (hidden, width), "dx": (width, hidden), "dw": (width, 0)}[product]
    element = FP8_E4M3 if product == "forward" else FP8_E5M2
    pairs = {
        "E4M3": (element, FP8_E4M3, 16),
        "blocks": (FP8_1x128, FP8_1x128 if by_k else FP8_128x128, 128),
    }
    layout = {"forward": "nt", "dx": "nn", "dw": "tn"}[product]
    stops = sizes.cumsum(0).to(torch.int32).cuda()
    found = of_values(layout, hidden if by_k else tokens, n, tokens if by_k else k, stops)
    for name, (a, b, unit) in pairs.items():
        stops = padded_stops(sizes, unit)
        padded = int(stops[-1])
        name = name if element is FP8_E4M3 or name == "blocks" else "E5M2 x E4M3"
        m, depth = (hidden, padded) if by_k else (padded, k)
        found[f"{name} qshard"] = of_codes(a, b, m, n, depth, stops, by_k, fast=product == "forward")
    return {f"{product}, {name}": (0.0, call) for name, call in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--shapes", default=SHAPES, help="experts x tokens x K x N, separated by commas")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU: nothing to measure")
        return
    gpu = gemm_dispatch.gpu_of(torch.cuda.get_device_capability())
    if not gemm_dispatch.grouped_runs_on("tensors", gpu):
        print(f"grouped products do not run here ({gpu}): nothing to measure")
        return
    results = []
    for shape in args.shapes.split(","):
        experts, tokens, width, hidden = map(int, shape.split("x"))
        sizes = sizes_of(tokens, experts)
        for product in ("forward", "dx", "dw"):
            for name, time in microseconds(contenders(product, sizes, width, hidden), args.rounds).items():
                tflops = 2 * tokens * width * hidden / time / 1e6
                row = {"operation": name, "shape": shape, "us": round(time, 1), "TFLOP_per_s": round(tflops)}
                results.append(row | {"cublaslt": gpu.grouped_cublaslt})
            torch.cuda.empty_cache()
    rows.write("gpu_grouped_gemm", torch.cuda.get_device_name(), results)


if __name__ == "__main__":
    main()
