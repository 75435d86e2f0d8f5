"""Every kernel against `qshard.reference`, bit for bit. A script: QSHARD_SIMD picks the CPU loops that it looks at.

Operands are torch tensors, which can be bfloat16. Each call is made three times, and must give the same bytes: as it
is, with subnormals flushed to zero in the calling thread, and with operands and results that start in the middle of a
cache line.

    QSHARD_SIMD=scalar python tests/cpu/kernel_bits.py
    python tests/cpu/kernel_bits.py cuda
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))
import kernel_bits_blocks

from qshard import _ffi, reference
from qshard.formats import E4M3, E5M2, E8M0, ELEMENTS, ElementFormat
from support.awkward import BFLOAT16, DTYPES, assert_bits_equal, awkward_values, ties_and_neighbours

FP8 = (E4M3, E5M2)
DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cpu"
# Shorter and longer than, and next to, the blocks of 16, 32 and 64 elements that the loops work in.
LENGTHS = (1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129)
SPECIAL = np.array([1, 3, 0.37, 0, -2, 2.0**-130, 2.0**121, np.inf, np.nan], np.float32)


def to_torch(x: np.ndarray) -> torch.Tensor:
    tensor = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if x.dtype == BFLOAT16 else torch.from_numpy(x)
    return tensor.to(DEVICE)


def to_numpy(x: torch.Tensor) -> np.ndarray:
    x = x.cpu()
    return x.view(torch.int16).numpy().view(BFLOAT16) if x.dtype == torch.bfloat16 else x.numpy()


def misaligned(x: torch.Tensor, elements: int = 3) -> torch.Tensor:
    """A copy of `x` that does not start at a vector, nor with a cache line."""
    room = x.new_zeros(x.numel() + elements)
    copy = room[elements:].view(x.shape)
    return copy.copy_(x)


def call(
    op: str, inputs: Sequence[np.ndarray], outputs: Sequence[tuple[Sequence[int], Any]], **attributes: Any
) -> list[np.ndarray]:
    """Results of `op`, each given by its shape and dtype."""

    def run(prepare: Callable[[torch.Tensor], torch.Tensor], flush: bool) -> list[np.ndarray]:
        # Not zeros, so that an element that nobody writes is seen.
        results = tuple(prepare(to_torch(np.full(shape, 0x5A, dtype))) for shape, dtype in outputs)
        operands = tuple(prepare(to_torch(np.array(x, order="C"))) for x in inputs)
        torch.set_flush_denormal(flush)  # Off before NumPy works again: it is the thread's.
        try:
            _ffi.call(op, operands, results, attributes)
        finally:
            torch.set_flush_denormal(False)
        return [to_numpy(x) for x in results]

    plain = run(lambda x: x, flush=False)
    for what, results in [
        ("with flushed subnormals", run(lambda x: x, flush=True)),
        ("misaligned", run(misaligned, flush=False)),
    ]:
        for a, b in zip(results, plain, strict=True):
            assert_bits_equal(a, b, f"{op} {what}")
    return plain


def encoded(x: np.ndarray, scale: np.ndarray | float, element: ElementFormat) -> np.ndarray:
    with np.errstate(all="ignore"):
        return reference.encode(x.astype(np.float32) * np.float32(scale), element)


def decoded(codes: np.ndarray, scale_inv: np.ndarray | float, element: ElementFormat, dtype: np.dtype) -> np.ndarray:
    with np.errstate(all="ignore"):
        value = (reference.decode(codes, element) * np.float32(scale_inv)).astype(dtype)
    return np.where(np.isnan(value), dtype.type(np.nan), value)


@functools.cache
def inputs(dtype: np.dtype) -> np.ndarray:
    """What an encoder may get wrong: every 16-bit float; else every tie, its neighbours, and bits at random."""
    if dtype.itemsize == 2:
        return np.arange(2**16, dtype=np.uint16).view(dtype)
    ties = np.concatenate([ties_and_neighbours(element.name) for element in ELEMENTS.values()])
    powers = np.arange(2**8, dtype=np.uint32)[:, None] << 23 | np.array(
        [0, 1, 0x3FFFFF, 0x400000, 0x400001, 0x7FFFFF], np.uint32
    )
    bits = np.random.default_rng(0).integers(0, 2**32, 200_003, np.uint32)
    positive = np.concatenate([ties, powers.reshape(-1).view(np.float32)])
    return np.concatenate([positive, -positive, bits.view(np.float32)])


def check_encode() -> None:
    for dtype in DTYPES:
        x = inputs(dtype)
        for element in ELEMENTS.values():
            [codes] = call("encode", [x], [(x.shape, np.uint8)], element=element.name)
            wide = x.astype(np.float32)
            want = encoded(x, 1, element) if element.signed else round_up_to_power(wide)
            assert_bits_equal(codes, want, f"encode {dtype} {element}")


def round_up_to_power(x: np.ndarray) -> np.ndarray:
    """E8M0 codes: the least power of two that is not below |x|."""
    powers = reference.decode(np.arange(E8M0.max_code + 1), E8M0)
    code = np.searchsorted(powers, np.minimum(np.abs(x), powers[-1]))
    return np.where(np.isnan(x), E8M0.nan_code, code).astype(np.uint8)


def check_decode() -> None:
    for element in ELEMENTS.values():
        codes = np.tile(np.arange(2**element.bits, dtype=np.uint8), 3)[: -(2**element.bits) // 3]
        [x] = call("decode", [codes], [(codes.shape, np.float32)], element=element.name)
        assert_bits_equal(x, reference.decode(codes, element), f"decode {element}")


def check_amax() -> None:
    for dtype in DTYPES:
        for n in (0, *LENGTHS, 1000):
            x = awkward_values((9, n), n, dtype)
            for shape in ((), (9,)):
                [amax] = call("amax_tensor", [x], [(shape, np.float32)])
                assert_bits_equal(amax, reference.amax(x, axis=1 if shape else None), f"amax {dtype} {x.shape}")
        # The largest, or a NaN, at each place; -0; NaN with any payload gives the one NaN.
        x = -np.zeros((130, 130), dtype)
        np.fill_diagonal(x, -2)
        x[64:].reshape(-1).view(f"u{dtype.itemsize}")[64::131] = (
            np.array([-np.inf], dtype).view(f"u{dtype.itemsize}")[0] + 1
        )
        [amax] = call("amax_tensor", [x], [((130,), np.float32)])
        assert_bits_equal(amax, reference.amax(x, axis=1), f"amax {dtype} by place")
        every = inputs(dtype)
        [amax] = call("amax_tensor", [every], [(every.shape, np.float32)])
        assert_bits_equal(amax, reference.amax(every[:, None], axis=1), f"amax {dtype} of each")


def check_scale_from_amax() -> None:
    amax = np.abs(inputs(np.dtype(np.float32)))
    for element in FP8:
        for pow2 in (False, True):
            for eps in (0.0, 1e-3):
                got = call(
                    "scale_from_amax", [amax], [(amax.shape, np.float32)] * 2, element=element.name, pow2=pow2, eps=eps
                )
                want = reference.scale_from_amax(amax, element, pow2=pow2, eps=eps)
                for a, b, name in zip(got, want, ("scale", "scale_inv"), strict=True):
                    assert_bits_equal(a, b, f"scale_from_amax {element} {name}")


def check_cast() -> None:
    for dtype in DTYPES:
        every = inputs(dtype)
        for element in FP8:
            for scale in SPECIAL:
                [codes] = call(
                    "cast_tensor", [every, scale.reshape(())], [(every.shape, np.uint8)], element=element.name
                )
                assert_bits_equal(codes, encoded(every, scale, element), f"cast {dtype} {element} * {scale}")
            for n in (0, *LENGTHS):
                x = awkward_values((7, n), n, dtype)
                for axes in range(3):
                    scale = (
                        awkward_values((7, n), n + 1)[:, 0]
                        if axes == 1 and n
                        else np.float32(1.7) + np.zeros(x.shape[:axes], np.float32)
                    )
                    [codes] = call("cast_tensor", [x, scale], [(x.shape, np.uint8)], element=element.name)
                    each = scale.reshape(scale.shape + (1,) * (2 - axes))
                    assert_bits_equal(
                        codes, encoded(x, each, element), f"cast {dtype} {element} {x.shape}, scale {scale.shape}"
                    )


def check_dequantize() -> None:
    codes = np.tile(np.arange(256, dtype=np.uint8), 2)[:-3]
    for dtype in DTYPES:
        for element in FP8:
            scales = np.concatenate([SPECIAL, [2.0**-149, 2.0**-20, 2.0**-14, 1 / 3, 5.5, 2.0**112]]).astype(np.float32)
            data = np.broadcast_to(codes, (len(scales), len(codes)))
            [x] = call("dequantize", [data, scales], [(data.shape, dtype)], element=element.name)
            assert_bits_equal(x, decoded(data, scales[:, None], element, dtype), f"dequantize {element} {dtype}")
            rng = np.random.default_rng(1)
            for n in (0, *LENGTHS):
                data = rng.integers(0, 256, (7, n), np.uint8)
                for axes in range(3):
                    scale = rng.standard_normal(data.shape[:axes], np.float32)
                    [x] = call("dequantize", [data, np.asarray(scale)], [(data.shape, dtype)], element=element.name)
                    each = np.reshape(scale, data.shape[:axes] + (1,) * (2 - axes))
                    assert_bits_equal(
                        x,
                        decoded(data, each, element, dtype),
                        f"dequantize {element} {dtype} {data.shape}, scale {axes}",
                    )


MATRICES = [(0, 5), (5, 0), (1, 1), (1, 70), (70, 1), (63, 65), (64, 64), (65, 63), (128, 192), (257, 130), (300, 77)]


def check_transpose() -> None:
    for rows, cols in MATRICES:
        for batch in ((), (3,), (2, 0)):
            data = np.random.default_rng(2).integers(0, 256, (*batch, rows, cols), np.uint8)
            [data_t] = call("transpose", [data], [((*batch, cols, rows), np.uint8)], batch=len(batch))
            assert_bits_equal(data_t, np.swapaxes(data, -1, -2), f"transpose {data.shape}")


def check_cast_transpose() -> None:
    for rows, cols in MATRICES:
        for batch in ((), (2,)):
            for dtype in DTYPES:
                x = awkward_values((*batch, rows, cols), rows, dtype)
                for axes in (0, 1, len(x.shape)):
                    scale = np.asarray(np.random.default_rng(cols).standard_normal(x.shape[:axes], np.float32))
                    element = FP8[axes % 2]
                    data, data_t = call(
                        "cast_transpose",
                        [x, scale],
                        [(x.shape, np.uint8), ((*batch, cols, rows), np.uint8)],
                        batch=len(batch),
                        element=element.name,
                    )
                    want = encoded(x, scale.reshape(scale.shape + (1,) * (x.ndim - axes)), element)
                    assert_bits_equal(data, want, f"cast_transpose {dtype} {x.shape}, scale {scale.shape}")
                    assert_bits_equal(data_t, np.swapaxes(want, -1, -2), f"cast_transpose {dtype} {x.shape}, data_t")


def check_threads_and_streaming() -> None:
    """Sizes that are cut over threads, and those that are written around the caches, equal their parts done alone."""
    cache = max(os.sysconf("SC_LEVEL3_CACHE_SIZE"), 1 << 20) if "SC_LEVEL3_CACHE_SIZE" in os.sysconf_names else 1 << 25
    sizes = [3_000_001] + [cache + 12_345] * (cache <= 64 << 20)
    for threads in (1, 3):
        _ffi.set_num_threads(threads)
        for size in sizes:
            cols = 2049
            x = torch.randn(size // cols, cols, device=DEVICE).to(torch.bfloat16)
            rows = len(x)
            scale, data = torch.tensor(1.5, device=DEVICE), torch.empty_like(x, dtype=torch.uint8)
            both, data_t, back_t = torch.empty_like(data), data.new_empty(cols, rows), data.new_empty(cols, rows)
            attributes = {"element": E4M3.name}
            _ffi.call("cast_tensor", (x, scale), (data,), attributes)
            _ffi.call("cast_transpose", (x, scale), (both, data_t), {"batch": 0, **attributes})
            _ffi.call("transpose", (data,), (back_t,), {"batch": 0})
            wide = torch.empty_like(x, dtype=torch.float32)
            _ffi.call("dequantize", (data, scale), (wide,), attributes)
            amax = torch.empty((), device=DEVICE)
            _ffi.call("amax_tensor", (x,), (amax,), {})
            assert torch.equal(amax, x.abs().max().float())
            assert torch.equal(both, data)
            assert torch.equal(data_t, data.T)
            assert torch.equal(back_t, data.T)
            for i in range(0, rows, max(1, rows // 5)):
                want = encoded(to_numpy(x[i]), 1.5, E4M3)
                assert_bits_equal(to_numpy(data[i]), want, f"cast of {size} elements, row {i}")
                assert_bits_equal(
                    to_numpy(wide[i]),
                    decoded(want, 1.5, E4M3, np.dtype(np.float32)),
                    f"dequantize of {size} elements, row {i}",
                )
            part = torch.empty_like(data)
            for i in range(0, rows, 64):
                _ffi.call("cast_tensor", (x[i : i + 64], scale), (part[i : i + 64],), attributes)
            assert torch.equal(part, data)


def main() -> None:
    np.seterr(all="ignore")
    torch.set_num_threads(1)
    print(f"{DEVICE}, SIMD target", _ffi.simd(), "with ml_dtypes", ml_dtypes.__version__)
    kernel_bits_blocks.use(DEVICE)
    checks = [f for names in (globals(), vars(kernel_bits_blocks)) for name, f in names.items() if name[:6] == "check_"]
    for check in checks:
        start = time.perf_counter()
        check()
        print(f"{check.__name__:32} {time.perf_counter() - start:6.2f} s", flush=True)


if __name__ == "__main__":
    main()
