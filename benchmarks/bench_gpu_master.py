"""Steps of `cast_master` on one GPU for 64 slices of 2^21 float32 masters, compared with a copy and with torch loops.

Each slice is an eighth of a weight of 4096 x 4096 and starts within a row and within blocks. It is aligned to 16 bytes,
like ZeRO's slices, or for rows named "odd start" it starts at an odd element, so that masters are read one by one.
"amaxes" zeroes the grids of whole weights and raises the amaxes of the slice's blocks. "codes" casts a slice into
a piece with given scales. "cast_master" is the whole step of one rank, without communication: amaxes, scales of whole
weights, codes. The masters are together many times larger than L2, so one copy of them suffices. `gpu_timing.py`
explains how calls are timed. Rows are compared with a copy of half the masters, because a copy of all is slower.

Bytes are the minimum per element of a slice: the master read once for amaxes and once for codes, amaxes and scales of
whole weights written once, the scales that a slice needs read once, and codes written once.

    python benchmarks/bench_gpu_master.py [--rounds 20]
"""

from __future__ import annotations

import argparse

import torch

import rows
from gpu_timing import Contenders, microseconds, rows_of
from qshard._core.flat_shards import FlatSlice, plan_master
from qshard.formats import FORMATS, Format
from qshard.torch_bridge import CastPlan, QuantizedSlice, cast_master

SHAPE, SLICES, RANKS = (4096, 4096), 64, 8
LENGTH = SHAPE[0] * SHAPE[1] // RANKS
START, ODD_START = 3 * LENGTH + 12336, 3 * LENGTH + 12345
NAMES = ("FP8_E4M3", "FP8_1x128", "FP8_128x128", "MXFP8_E4M3", "MXFP8_32x32", "MXFP4_32x32", "NVFP4", "NVFP4_16x16")


def steps(name: str, fmt: Format, masters: list[torch.Tensor], start: int = START) -> Contenders:
    device = masters[0].device
    name = name if start == START else f"{name}, odd start,"
    starts = torch.full((SLICES,), start, dtype=torch.int64, device=device)
    pairs = starts.view(torch.int32).view(SLICES, 2)
    (batch,) = plan_master([FlatSlice(SHAPE, fmt)] * SLICES).batches
    slices = [QuantizedSlice.empty(fmt, SHAPE, LENGTH, device=device) for _ in masters]
    plan = CastPlan(slices, parity="master")
    scale = torch.ones(batch.blocks, device=device)
    shared = {**batch.attributes, "element": fmt.element.name, "pieces": True}

    def amaxes(_: int) -> torch.Tensor:
        amax = torch.zeros(batch.amaxes, device=device)
        torch.ops.qshard.amax_slices(pairs, amax, masters, whole=fmt.scaling.global_scale or "none", **batch.attributes)
        return amax

    def codes(_: int) -> None:
        torch.ops.qshard.cast_slices(pairs, scale, masters, [s.data for s in slices], **shared)

    def whole(_: int) -> None:
        cast_master(slices, masters, starts, parity="master", plan=plan)

    blocks = batch.blocks / (SLICES * LENGTH)  # blocks of whole weights, per element of the slices
    code, scale_inv = 1 / fmt.element.codes_per_byte, 4 if fmt.scale_dtype == "float32" else 1
    return {
        f"amaxes {name} qshard": (4 + 4 * blocks, amaxes),
        f"codes {name} qshard": (4 + 4 * blocks / RANKS + code, codes),
        f"cast_master {name} qshard": (4 + 4 + code + scale_inv * blocks, whole),
    }


def rivals(masters: list[torch.Tensor]) -> Contenders:
    """Contenders in torch for one scale per tensor: loops of ops over weights."""
    scale = torch.full((), 64.0, device=masters[0].device)
    return {
        "amaxes FP8_E4M3 torch._foreach_norm": (4, lambda _: torch._foreach_norm(masters, torch.inf)),
        "codes FP8_E4M3 torch": (5, lambda _: [(m * scale).clamp_(-448, 448).to(torch.float8_e4m3fn) for m in masters]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(message="bench_gpu_master: no CUDA device, nothing to measure\n")
    masters = list(torch.randn(SLICES, LENGTH, device="cuda"))
    source = torch.randn(SLICES * LENGTH, device="cuda")
    target = torch.empty_like(source)
    targets = list(target.view(SLICES, LENGTH))
    half = source.numel() // 2
    contenders: Contenders = {
        "copy": (4, lambda _: target[:half].copy_(source[:half])),
        "copy of 64": (8, lambda _: torch._foreach_copy_(targets, masters)),
        "copy of all": (8, lambda _: target.copy_(source)),
    }
    for name in NAMES:
        contenders |= steps(name, FORMATS[name], masters)
    contenders |= steps("NVFP4_16x16", FORMATS["NVFP4_16x16"], masters, ODD_START)
    contenders |= rivals(masters)
    us = microseconds(contenders, options.rounds)
    table = rows_of(contenders, us, SLICES * LENGTH, f"{SLICES} x 2^{LENGTH.bit_length() - 1}", "copy")
    rows.write("gpu_master", torch.cuda.get_device_name(), table)


if __name__ == "__main__":
    main()
