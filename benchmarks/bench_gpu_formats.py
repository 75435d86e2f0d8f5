"""Whole quantizations on one GPU, for every format and plane, compared with a copy in the same run and torch.compile.

A contender launches what `quantize`, `dequantize` or a transpose launches. `gpu_timing.py` explains how it is timed.
Bytes are the minimum that must move. If a scale depends on the amax of the whole tensor, x is read twice: current
scaling and NVFP4 have rows for both steps together, and for each alone ("amax given"). "two separate passes" are an
amax and a cast of different tensors, so the cast finds nothing in L2. Current scaling has to beat them.
`percent_of_copy` compares GB/s with a device copy of x in the same run. Rivals use the formulas of `quantize_rivals.py`
for the rowwise plane only, because they take seconds to compile. Rivals of NVFP4 get the amax as an input.

    python benchmarks/bench_gpu_formats.py [--size 8192] [--rounds 20] [--no-rivals]
"""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import torch

import rows
from gpu_timing import COPIES, Contenders, microseconds, rows_of
from qshard._core import quantize_steps
from qshard.formats import FP8_E4M3, NVFP4, Usage
from qshard.torch_bridge._ops.bind import ops
from quantize_rivals import USAGES, cases, torch_quantize


def blocks(x: list[torch.Tensor]) -> Contenders:
    """Contenders for formats in blocks, with the minimum bytes per element."""
    found: Contenders = {}
    amax = torch.full((), 5.0, device="cuda")
    whole_scale = ops.global_scale_nvfp4(amax, scale_max=NVFP4.scaling.scale_max)
    known = {
        "amax_tensor": lambda *_, **__: amax,
        "amax_hadamard": lambda *_, **__: (amax, amax),
        "global_scale_nvfp4": lambda *_, **__: whole_scale,
    }
    given = SimpleNamespace(**{**vars(ops), **known})
    for name, fmt, usage, count in cases():
        found[f"{name} qshard"] = (
            count + (2 if fmt.scaling.global_scale else 0),
            lambda i, fmt=fmt, usage=usage: quantize_steps.quantize(ops, x[i], fmt, USAGES[usage]),
        )
        if fmt.scaling.global_scale:
            found[f"{name}, amax given, qshard"] = (
                count,
                lambda i, fmt=fmt, usage=usage: quantize_steps.quantize(given, x[i], fmt, USAGES[usage]),
            )
        if usage == "both":
            continue
        each = USAGES[usage]
        parts = [quantize_steps.quantize(ops, t, fmt, each)[each] for t in x]
        found[f"de{name} qshard"] = (
            count,
            lambda i, parts=parts, fmt=fmt, each=each: quantize_steps.dequantize(
                ops, parts[i], fmt, each, torch.bfloat16
            ),
        )
        if fmt.shares_codes and each is Usage.ROWWISE:
            found[f"transpose {fmt} qshard"] = (
                2 * (count - 2),
                lambda i, parts=parts, fmt=fmt: quantize_steps.transpose_plane(ops, parts[i], fmt),
            )
    pair = torch.tensor([1, 0], dtype=torch.int32, device="cuda")
    philox = quantize_steps.Philox(pair, torch.zeros_like(pair))
    found["hadamard qshard"] = (4, lambda i: ops.hadamard(x[i], block_rows=16, block_cols=1))
    found["amax_hadamard qshard"] = (
        2,
        lambda i: ops.amax_hadamard(x[i], block_rows=x[i].shape[0], block_cols=x[i].shape[1]),
    )
    # The steps of recipe NVFP4 for activations and for gradients.
    for what, options in {
        "rotated": {"hadamard": True},
        "stochastic": {"rounding": "stochastic"},
        "rotated, stochastic": {"hadamard": True, "rounding": "stochastic"},
    }.items():
        fmt = NVFP4.with_options(**options)
        for usage, each in USAGES.items():
            if what == "rotated" and usage == "rowwise":
                continue
            count = 2 + len(each.planes) * (0.5 + 1 / 16)
            for given_name, of, more in (("", ops, 2), (", amax given", given, 0)):
                found[f"quantize NVFP4 {usage}, {what}{given_name}, qshard"] = (
                    count + more,
                    lambda i, of=of, fmt=fmt, each=each: quantize_steps.quantize(of, x[i], fmt, each, philox=philox),
                )
    return found


def one_scale(x: list[torch.Tensor]) -> Contenders:
    """Contenders for per-tensor FP8."""
    scale = torch.full((), 64.0, device="cuda")
    e4m3 = {"element": "float8_e4m3fn"}

    def separate(i: int) -> object:
        return ops.amax_tensor(x[i], lead=0), ops.cast_tensor(x[(i + 1) % COPIES], scale, **e4m3)

    return {
        "current scaling qshard": (5, lambda i: quantize_steps.quantize(ops, x[i], FP8_E4M3, Usage.ROWWISE)),
        "current scaling both qshard": (6, lambda i: quantize_steps.quantize(ops, x[i], FP8_E4M3, Usage.BOTH)),
        "two separate passes qshard": (5, separate),
        "amax_tensor qshard": (2, lambda i: ops.amax_tensor(x[i], lead=0)),
        "cast_delayed qshard": (3, lambda i: ops.cast_delayed(x[i], scale, lead=0, margin=0, **e4m3)),
        "cast_transpose_delayed qshard": (
            4,
            lambda i: ops.cast_transpose_delayed(x[i], scale, batch=0, margin=0, **e4m3),
        ),
    }


def rivals(x: list[torch.Tensor]) -> Contenders:
    """Contenders with the same formulas, compiled by torch.compile."""

    def current(t: torch.Tensor) -> torch.Tensor:
        scale = 448.0 / t.abs().amax().float()
        return (t.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn)

    compiled = torch.compile(current, dynamic=False)
    found: Contenders = {"current scaling torch.compile": (5, lambda i: compiled(x[i]))}
    torch._dynamo.config.recompile_limit = 100  # rivals of all formats are one function
    every = [torch_quantize(t) for t in x]
    for name, _, usage, count in cases():
        if usage == "rowwise":
            calls = [torch.compile(of_copy[f"{name} torch"][1], fullgraph=True, dynamic=False) for of_copy in every]
            found[f"{name} torch.compile"] = (count, lambda i, calls=calls: calls[i]())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--no-rivals", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(message="bench_gpu_formats: no CUDA device, nothing to measure\n")
    x = [torch.randn(options.size, options.size, device="cuda", dtype=torch.bfloat16) for _ in range(COPIES)]
    out = [torch.empty_like(t) for t in x]
    contenders: Contenders = {"copy": (4, lambda i: out[i].copy_(x[i])), **one_scale(x), **blocks(x)}
    if not options.no_rivals:
        contenders |= rivals(x)
    us = microseconds(contenders, options.rounds)
    shape = f"{options.size}x{options.size}"
    rows.write("gpu_formats", torch.cuda.get_device_name(), rows_of(contenders, us, options.size**2, shape, "copy"))


if __name__ == "__main__":
    main()
