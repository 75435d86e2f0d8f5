"""Every kernel against `qshard.reference`, bit for bit. A script: QSHARD_SIMD picks the CPU loops that it looks at.

    QSHARD_SIMD=scalar python tests/cpu/kernel_bits.py
    python tests/cpu/kernel_bits.py cuda [op ...]
    python tests/cpu/kernel_bits.py --part 1 3  # The second third of the calls.
    compute-sanitizer python tests/cpu/kernel_bits.py cuda --few  # Up to three calls of each op; `make cudacheck`.

Calls are drawn from the rows of `ffi/ops.def` (support/draws.py). Each is made in every way that support/op_calls.py
knows, and all give the bytes of the reference (support/oracle_tensors.py).
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from qshard import _ffi, reference
from qshard.formats import E4M3
from qshard.op_table import OpSpec
from support import op_calls
from support.awkward import TAME, assert_bits_equal, awkward_values
from support.draw_values import filled
from support.draws import IN_ANY_ORDER, SPECS, WIDE, Call, choices, draw
from support.op_calls import call
from support.oracle_tensors import cast_tensor, dequantize

LEAST, MOST = 40, 108


def check_op(spec: OpSpec, part: int, parts: int) -> None:
    """Check each choice of attributes and dtypes, on one to three threads; long rows; all 16-bit numbers and codes.

    Only the calls of one part of `parts` run. Parts together have half of the calls that repeat a choice.
    """
    count, least = len(choices(spec)), LEAST if parts == 1 else LEAST // 2
    for number in range(min(max(count, least), MOST))[part::parts]:
        _ffi.set_num_threads(1 + number // parts % 3)
        op_calls.check(filled(draw(spec, number), number))
    if not spec.many:
        for number in range(24 if parts == 1 else 12)[part::parts]:
            op_calls.check(filled(draw(spec, number, lengths=WIDE), number), ("plain", "odd"))
        for number in range(min(count, 9))[part::parts]:
            op_calls.check(filled(draw(spec, number, lengths=(256,)), number), ("plain",))


FEW_WAYS = ("plain", "in place")  # initcheck does not see that PyTorch fills the margins of "odd" tensors.


def check_few(spec: OpSpec) -> None:
    """Check one call of an op for each kind of length, without empty tensors."""
    for lengths in ({},) if spec.many else ({}, {"lengths": WIDE}, {"lengths": (256,)}):
        calls = (draw(spec, number, **lengths) for number in range(LEAST))
        full = (made for made in calls if all(math.prod(shape) for each in made.tensors for shape, _ in each))
        op_calls.check(filled(next(full), 0), FEW_WAYS)


def check_streaming() -> None:
    """Tensors written around the caches, in chunks of many tasks, equal their parts computed alone."""
    cache = max(os.sysconf("SC_LEVEL3_CACHE_SIZE"), 1 << 20) if "SC_LEVEL3_CACHE_SIZE" in os.sysconf_names else 1 << 25
    options, scale = {"element": E4M3.name}, np.float32(1.5)
    for size in [3_000_001] + [cache + 12_345] * (cache <= 64 << 20):
        x = np.resize(awkward_values((1, 1 << 16), kinds=("normal",), dtype="bfloat16"), (size // 2049, 2049))
        rows = slice(None, None, max(1, len(x) // 5))
        amax, some = reference.amax(x), cast_tensor(x[rows], scale, **options)
        some_values = dequantize(some, scale, dtype="float32", **options)
        parts = [call("cast_tensor", x[i : i + 64], scale, **options) for i in range(0, len(x), 64)]
        for threads in (1, 3):
            _ffi.set_num_threads(threads)
            data = call("cast_tensor", x, scale, **options)
            both, data_t = call("cast_transpose", x, scale, batch=0, **options)
            values = call("dequantize", data, scale, dtype="float32", **options)
            assert_bits_equal(call("amax_tensor", x, lead=0), amax)
            assert_bits_equal(np.concatenate(parts), data)
            assert_bits_equal(both, data)
            assert_bits_equal(data_t, data.T)
            assert_bits_equal(call("transpose", data, batch=0), data.T)
            assert_bits_equal(data[rows], some)
            assert_bits_equal(values[rows], some_values)


def check_transposed() -> None:
    """Transpose `[k, *outer, m]` with an offset per block, since XLA may shard any axis."""
    spec = SPECS["cast_block_stochastic"]
    for number, (k, outer, m, cols) in enumerate(
        [(48, (3,), 32, 16), (37, (2, 2), 64, 16), (16, (1,), 16, 16), (130, (2,), 128, 16), (33, (5,), 24, 8)]
    ):
        grid = (k, *outer, m // cols)
        for prefix, dtype in ((len(grid), "bfloat16"), (1, "float32"), (len(grid) - 1, "float16")):
            options = {"block_rows": 1, "block_cols": cols, "row_step": 1, "col_step": 4099, "transposed": True}
            words = [((*grid[:prefix], 2), "uint32")]
            made = Call(spec, options, [[((k, *outer, m), dtype)], [(grid, "float32")], words, words])
            op_calls.check(filled(made, number))


def check_wide_norms() -> None:
    """Normalize rows of every width for which a GPU keeps them elsewhere: registers, shared memory, nowhere."""
    for number, (cols, dtype) in enumerate(
        itertools.product((4104, 8192, 8200, 16384, 16392), ("bfloat16", "float16", "float32"))
    ):
        x, grad = (awkward_values((17, cols), seed, dtype, kinds=TAME) for seed in (number, number + 99))
        weight = awkward_values((1, cols), number, dtype, kinds=("normal",))[0]
        check_made("rms_norm", {"eps": 1e-5, "lead": 0}, x, weight)
        rstd = np.linspace(0.5, 2, 17, dtype=np.float32)
        check_made("rms_norm_grad", {"lead": 0, "rows": 16}, x, weight, rstd, grad)


def check_thresholds() -> None:
    """Check elements that random rounding decides by their last bit, or by the last bit of the rounded sum."""
    rng, shape = np.random.default_rng(0), (256, 512)
    words = {"seed": np.uint32([7, 9]), "offset": np.uint32([16, 0])}
    random = reference.random_bytes(7 | 9 << 32, 16 + np.arange(math.prod(shape), dtype=np.uint64)).astype(np.float64)
    values = np.float64([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    code = rng.integers(0, 7, random.size)
    x = values[code + 1] - (values[code + 1] - values[code]) * random / 256  # Exactly up, or below.
    x = (x - rng.choice([0, 0, *2.0 ** -np.arange(24, 40)], x.size)).astype(np.float32).view(np.int32)
    x = np.abs((x + rng.integers(-2, 3, x.size)).astype(np.int32).view(np.float32)) * rng.choice(
        np.float32([1, -1]), x.size
    )
    x = x.reshape(shape)
    steps = {"row_step": shape[1], "col_step": 1}
    for name, block, amaxes in [
        ("quantize_nvfp4_stochastic", (1, 16), 1),
        ("quantize_nvfp4_stochastic", (16, 16), 1),
        ("quantize_nvfp4_stochastic_t", (16, 1), 1),
        ("quantize_nvfp4_stochastic_both", (16, 16), 2),
    ]:
        check_unscaled(name, x, block, amaxes, steps, *words.values())


def check_midpoints() -> None:
    """Check elements halfway between two values of E2M1, or a few bits off, in every dtype."""
    rng, shape = np.random.default_rng(0), (256, 512)
    values = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6, 8, np.inf])
    middle = rng.choice(np.append((values[1:-1] + values[:-2]) / 2, values), shape) * rng.choice([1, -1], shape)
    for dtype, bits in (("float32", "int32"), ("float16", "int16"), ("bfloat16", "int16")):
        x = middle.astype(dtype)
        x = np.where(np.isfinite(middle), (x.view(bits) + rng.integers(-2, 3, shape).astype(bits)).view(dtype), x)
        x = np.where(np.isfinite(x) & (np.abs(x) <= 8), x, middle.astype(dtype))  # 0 less a bit is NaN.
        for name, block, amaxes in [
            ("quantize_nvfp4", (1, 16), 1),
            ("quantize_nvfp4", (16, 16), 1),
            ("quantize_nvfp4_t", (16, 1), 1),
            ("quantize_nvfp4_t", (16, 16), 1),
            ("quantize_nvfp4_both", (16, 16), 2),
            ("quantize_nvfp4_square_both", (16, 16), 1),
        ]:
            check_unscaled(name, np.clip(x, -6, 6).astype(dtype), block, amaxes, {})
        options = {"block_rows": 256, "block_cols": 512, "element": "float4_e2m1fn"}
        check_made("cast_block", options, x, np.float32([[1]]))


def check_whole_blocks(ways: tuple[str, ...] = op_calls.WAYS) -> None:
    """Quantize blocks that cover a matrix of several tiles: on a GPU, thread blocks wait for one another."""
    rule = {"element": E4M3.name, "eps": 0.0, "pow2": False, "rounding": "up", "scale_dtype": "float32"}
    for number, shape in enumerate([(300, 264), (40, 1096), (2056, 16)]):
        options = {"block_rows": shape[0], "block_cols": shape[1], "nonfinite": "nan", **rule}
        x = awkward_values(shape, number, "bfloat16", kinds=("normal",))
        check_made("quantize_block", options, x, ways=ways)
        check_made("quantize_square_both", {"outer": 0, **options}, x, ways=ways)


def check_unscaled(
    name: str, x: np.ndarray, block: tuple[int, int], amaxes: int, options: dict[str, object], *more: np.ndarray
) -> None:
    """Check an NVFP4 op with a 6 in every block of x and S = 1, so that all scales are 1."""
    x = x.copy()
    x[:, ::16] = x[::16] = 6
    options = {"block_rows": block[0], "block_cols": block[1], "nonfinite": "nan", "scale_max": 448.0, **options}
    if name.endswith(("_t", "_both")):
        options["outer"] = 0
        options |= {"hadamard": False} if "square" not in name else {}
    check_made(name, options, x, *[np.float32(6 * 448)] * amaxes, *more)


def check_made(
    name: str, options: dict[str, object], *operands: np.ndarray, ways: tuple[str, ...] = op_calls.WAYS
) -> None:
    tensors = [[(np.shape(a), str(np.asarray(a).dtype))] for a in operands]
    op_calls.check(Call(SPECS[name], options, tensors, list(operands)), ways)


def main(device: str = "cpu", *ops: str, part: int = 0, parts: int = 1, few: bool = False) -> None:
    np.seterr(all="ignore")
    torch.set_num_threads(1)
    op_calls.device = device
    print(f"{device}, SIMD target", _ffi.simd())
    there = [spec for name, spec in SPECS.items() if device == "cpu" or name not in IN_ANY_ORDER]
    if few:
        checks = {spec.name: functools.partial(check_few, spec) for spec in there}
        checks["whole blocks"] = functools.partial(check_whole_blocks, FEW_WAYS)
    else:
        checks = {spec.name: functools.partial(check_op, spec, part, parts) for spec in there}
        checks |= {"transposed": check_transposed, "thresholds": check_thresholds, "wide norms": check_wide_norms}
        checks["whole blocks"] = check_whole_blocks
        if part == parts - 1:  # It takes as long as a third of all calls.
            checks["streaming"] = check_streaming
        checks["midpoints"] = check_midpoints
    for name in ops or checks:
        start = time.perf_counter()
        checks[name]()
        print(f"{name:32} {time.perf_counter() - start:6.2f} s", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("device", nargs="?", default="cpu")
    parser.add_argument("ops", nargs="*")
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), help="calls I, I + N, .. of each op")
    parser.add_argument("--few", action="store_true", help="up to three calls of each op")
    given = parser.parse_args()
    main(given.device, *given.ops, part=given.part[0], parts=given.part[1], few=given.few)
