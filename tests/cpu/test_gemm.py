"""GEMMs of codes on the CPU, compared with fp64 for every pair of formats, and the choice of tensor core kernels.

Their bits are tested with all ops (test_ops.py, kernel_bits.py).
"""

import itertools

import ml_dtypes
import numpy as np
import pytest
import torch

from qshard import formats, gemm_dispatch, reference
from qshard.formats import (
    FP8_E4M3,
    FP8_E5M2,
    MXFP4,
    MXFP8_E4M3,
    MXFP8_E5M2,
    NVFP4,
    FP8_1x128,
    FP8_128x128,
    MXFP8_32x32,
    NVFP4_16x16,
    Usage,
)
from qshard.gemm_dispatch import Gpu
from qshard.layout import plane
from qshard.torch_bridge._ops.bind import ops

KINDS = {
    "tensors": [fmt for fmt in formats.FORMATS.values() if fmt.block is None],
    "float": [FP8_1x128, FP8_128x128],
    "E8M0": [fmt for fmt in formats.FORMATS.values() if fmt.scale_dtype == formats.E8M0.name],
    "nvfp4": [NVFP4, NVFP4_16x16],
}
PAIRS = [pair for kind in KINDS.values() for pair in itertools.product(kind, kind)]
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def quantized(rows, k, fmt, seed):
    """Return a plane `[rows, k]`, and its values in fp64."""
    x = np.random.default_rng(seed).standard_normal((rows, k)).astype(np.float32)
    made = reference.quantize(x, fmt).rowwise
    codes = made.data if fmt.element.codes_per_byte == 1 else reference.unpack(made.data)
    scale = made.scale_inv.astype(np.float64)
    if fmt.scale_dtype in formats.ELEMENTS:
        scale = reference.decode(np.asarray(made.scale_inv).view(np.uint8), formats.ELEMENTS[fmt.scale_dtype])
    if fmt.block is not None:
        scale = np.repeat(np.repeat(scale, fmt.block[0], 0), fmt.block[1], 1)[:rows, :k]
    whole = 1.0 if made.global_scale_inv is None else np.float64(made.global_scale_inv)
    parts = [
        None if part is None else torch.from_numpy(as_bytes(np.asarray(part)).copy())
        for part in (made.data, made.scale_inv, made.global_scale_inv)
    ]
    numbers = reference.decode(codes.view(np.uint8), fmt.element).astype(np.float64)
    return gemm_dispatch.Plane(*parts), numbers * scale.astype(np.float64) * whole


def as_bytes(x):
    return x if x.dtype == np.float32 else x.view(np.uint8)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0]} {pair[1]}")
def test_products_are_those_of_values(pair):
    """Bound: fp32 sums of exact products of codes have K roundings of the sum, two of scales, and one of the result."""
    square = any(fmt.scaling.whole_blocks and fmt.block[0] > 1 for fmt in pair if fmt.block)
    rows = (32, 64) if square else (7, 33)
    for number, k in enumerate((0, 32, 160, 320)):
        a, x = quantized(rows[0], k, pair[0], number)
        b, y = quantized(rows[1], k, pair[1], number + 10)
        name = list(DTYPES)[number % 3]
        how = {"dtype": getattr(torch, name), "fast": False, "workspace": 0}
        got = gemm_dispatch.multiply(ops, a, pair[0], b, pair[1], **how).double().numpy()
        exact, size = x @ y.T, np.abs(x) @ np.abs(y).T
        bound = (k + 8) * 2.0**-24 * size + float(ml_dtypes.finfo(DTYPES[name]).eps) * np.abs(exact) + 2.0**-25
        assert got.shape == rows
        assert (np.abs(got - exact) <= bound).all()


@pytest.mark.parametrize("letters", ["nt", "nn", "tn", "tt"])
@pytest.mark.parametrize("name", DTYPES)
def test_products_of_values(name, letters):
    """Bound: fp32 sums have K roundings of the sum, as many of float32 products, and one of the result."""
    dtype = getattr(torch, name)
    for m, n, k in ((7, 33, 0), (1, 1, 1), (65, 31, 300)):
        generator = torch.Generator().manual_seed(k)
        a, b = (torch.randn(rows, k, generator=generator).to(dtype) for rows in (m, n))
        exact, size = a.double() @ b.double().T, a.double().abs() @ b.double().abs().T
        x, y = a.T if letters[0] == "t" else a, b if letters[1] == "t" else b.T
        op = getattr(ops, f"gemm_values_{letters}")
        for result in (dtype, torch.float32):
            got, _ = op(x.contiguous(), y.contiguous(), dtype=result, workspace=0)
            bound = (2 * k + 2) * 2.0**-24 * size + torch.finfo(result).eps * exact.abs()
            assert (got.dtype, got.shape) == (result, (m, n))
            assert ((got.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_with_a_workspace_of_a_symbol(dynamic):
    """A workspace size computed from symbolic shapes stays symbolic."""

    def multiply(a, b):
        one = torch.ones((), dtype=torch.float32)
        size = gemm_dispatch.workspace_size(FP8_E4M3, FP8_E4M3, (1, 1, 1)) * 0 + a.shape[0]
        how = {"a_element": "float8_e4m3fn", "b_element": "float8_e4m3fn", "fast": False, "workspace": size}
        out, workspace = torch.ops.qshard.gemm(a, one, b, one, dtype=torch.float32, **how)
        return out, workspace.numel()

    torch._dynamo.reset()
    compiled = torch.compile(multiply, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (3, 5, 9):
        a, b = (torch.randint(0, 120, (count, 16), dtype=torch.uint8) for count in (rows, 4))
        got, want = compiled(a, b), multiply(a, b)
        assert torch.equal(got[0], want[0])
        assert got[1] == want[1] == rows


HOPPER, ADA, BLACKWELL, AMPERE = ((9, 0), 130000), ((8, 9), 120100), ((10, 0), 130000), ((8, 0), 130000)
OLD_HOPPER, NO_LIBRARY = ((9, 0), 120800), ((9, 0), 0)


@pytest.mark.parametrize(
    ("pair", "runs"),
    [
        ((FP8_E4M3, FP8_E4M3), [HOPPER, ADA, BLACKWELL, OLD_HOPPER]),
        ((FP8_E5M2, FP8_E4M3), [HOPPER, ADA, BLACKWELL, OLD_HOPPER]),
        ((FP8_E5M2, FP8_E5M2), []),
        ((FP8_1x128, FP8_128x128), [HOPPER]),
        ((FP8_128x128, FP8_1x128), [HOPPER]),
        ((FP8_1x128, FP8_1x128), [HOPPER]),
        ((FP8_128x128, FP8_128x128), []),
        ((FP8_E4M3, FP8_1x128), []),
        ((MXFP8_E4M3, MXFP8_E5M2), [BLACKWELL]),
        ((MXFP8_E4M3, MXFP8_32x32), [BLACKWELL]),
        ((MXFP8_E4M3, FP8_1x128), []),
        ((MXFP4, MXFP4), []),
        ((NVFP4, NVFP4_16x16), [BLACKWELL]),
        ((NVFP4.with_options(global_scale="row"), NVFP4), []),
    ],
    ids=str,
)
def test_what_tensor_cores_take(pair, runs):
    kind = gemm_dispatch.kind_of(*pair)
    everywhere = [HOPPER, ADA, BLACKWELL, AMPERE, OLD_HOPPER, NO_LIBRARY]
    assert [gpu for gpu in everywhere if kind is not None and gemm_dispatch.runs_on(kind, Gpu(*gpu))] == [
        gpu for gpu in everywhere if gpu in runs
    ]


def test_where_an_op_multiplies_values():
    everywhere = [HOPPER, ADA, BLACKWELL, AMPERE, OLD_HOPPER, NO_LIBRARY, ((7, 5), 130000)]
    assert [gemm_dispatch.runs_on("values", Gpu(*gpu)) for gpu in everywhere] == [True] * 5 + [False] * 2


@pytest.mark.parametrize("fmt", formats.FORMATS.values(), ids=str)
def test_planes_that_have_what_is_contracted_last(fmt):
    """`contracts_last` follows the layout: `[M, K]` contracts the last axis, the transpose `[K, M]` the first."""
    assert gemm_dispatch.contracts_last(fmt, Usage.ROWWISE)
    if fmt.scaling.global_scale != "row":
        transposed = plane(fmt, (128, 256), Usage.COLUMNWISE).transposed
        assert gemm_dispatch.contracts_last(fmt, Usage.COLUMNWISE) == transposed


@pytest.mark.parametrize("pair", [(FP8_1x128, FP8_128x128), (MXFP8_E4M3, MXFP8_32x32), (NVFP4, NVFP4)], ids=str)
def test_workspaces_have_room_for_scales(pair):
    """Workspaces fit the scales of `gemm_scales.h`, padded to tiles and aligned, and 32 MiB besides."""
    number = 4 if pair[0].scale_dtype == "float32" else 1
    for m, n, k in itertools.product((16, 144, 8192), (16, 272, 4096), (16, 640, 14336)):
        needed = 256
        for rows, fmt in ((m, pair[0]), (n, pair[1])):
            across = -(-k // fmt.block[1])
            padded = -(-across // 4) * 4
            if number == 1:
                size = -(-rows // 128) * 128 * padded
            else:
                size = 4 * (rows * across if fmt.block[0] == 1 else -(-rows // 128) * padded)
            needed += -(-size // 256) * 256
        size = gemm_dispatch.workspace_size(*pair, (m, n, k))
        assert needed + 2**25 <= size <= needed * 2 + 2**25 + 2**18
