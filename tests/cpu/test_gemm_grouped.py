"""Grouped products of experts on the CPU: the bits of a product for each expert, sharded in JAX, and dispatch rules.

Their bits are also tested with all ops (test_ops.py, kernel_bits.py).
"""

import itertools

import jax
import numpy as np
import pytest
import torch
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from qshard import formats, gemm_dispatch
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
from qshard.gemm_dispatch import Gpu, Plane
from qshard.jax import ops as jax_ops
from qshard.torch_bridge._ops.bind import ops
from support.awkward import assert_bits_equal

EXPERTS = 4
M_GROUPED = [
    (FP8_E4M3, FP8_E5M2),
    (FP8_1x128, FP8_128x128),
    (FP8_1x128, FP8_1x128),
    (MXFP8_E4M3, MXFP8_32x32),
    (MXFP4, MXFP4),
    (NVFP4, NVFP4_16x16),
]
K_GROUPED = [pair for pair in M_GROUPED if pair[1].block is None or pair[1].block[0] == 1]
K_GROUPED += [(MXFP8_E5M2, MXFP8_E4M3), (NVFP4, NVFP4)]


def codes(shape, fmt, seed, experts=EXPERTS):
    """Random codes `[..., rows, cols]`, and scales: one for each expert, of 1-D or 2-D blocks, or both."""
    generator = torch.Generator().manual_seed(seed)
    *lead, rows, cols = shape
    data = torch.randint(0, 120, (*lead, rows, cols // fmt.element.codes_per_byte), generator=generator)
    grid = (experts,) if fmt.block is None else (*lead, -(-rows // fmt.block[0]), cols // fmt.block[1])
    if fmt.scale_dtype == "float32":
        return Plane(data.to(torch.uint8), 0.5 + torch.rand(grid, generator=generator))
    range_ = (60, 127) if fmt.tensor_scaled else (120, 130)  # E4M3, without its NaN, and E8M0
    scales = torch.randint(*range_, grid, generator=generator).to(torch.uint8)
    if not fmt.tensor_scaled:
        return Plane(data.to(torch.uint8), scales)
    return Plane(data.to(torch.uint8), scales, 0.5 + torch.rand(experts, generator=generator))


def rows_of(plane, fmt, rows):
    """Rows of a plane of 1-D blocks, or of one with a scale for each expert."""
    if fmt.block is None:
        return plane._replace(data=plane.data[rows])
    return plane._replace(data=plane.data[rows], scale_inv=plane.scale_inv[rows])


def contracted(plane, fmt, part):
    """A part of the last axis, of whole blocks."""
    packed = slice(*(end // fmt.element.codes_per_byte for end in (part.start, part.stop)))
    if fmt.block is None:
        return plane._replace(data=plane.data[:, packed].contiguous())
    own = slice(part.start // fmt.block[1], part.stop // fmt.block[1])
    return plane._replace(data=plane.data[:, packed].contiguous(), scale_inv=plane.scale_inv[:, own].contiguous())


def of_expert(plane, fmt, expert):
    """The plane of an expert, with its scale."""
    if fmt.block is None:
        return plane._replace(scale_inv=plane.scale_inv[expert])
    return plane._replace(global_scale_inv=plane.global_scale_inv[expert]) if fmt.tensor_scaled else plane


def stored_columns(plane, fmt):
    """A plane `[rows, cols]` that contracts its columns, as the columnwise plane of `fmt` is stored."""
    transposed = gemm_dispatch.contracts_last(fmt, Usage.COLUMNWISE)
    return plane if transposed else Plane(*(x.t().contiguous() for x in plane[:2]))


def ranges(stops):
    return [slice(*ends) for ends in itertools.pairwise((0, *stops))]


HOW = {"dtype": torch.bfloat16, "fast": False, "workspace": 0}


@pytest.mark.parametrize("pair", M_GROUPED, ids=lambda pair: f"{pair[0]} {pair[1]}")
def test_rows_are_those_of_a_product_for_each_expert(pair):
    m, n, k, stops = 96, 64, 256, [32, 32, 64, 80]
    a, b = codes((m, k), pair[0], 0), codes((EXPERTS, n, k), pair[1], 1)
    got = gemm_dispatch.multiply_grouped(ops, a, pair[0], b, pair[1], torch.tensor(stops, dtype=torch.int32), **HOW)
    want = torch.zeros(m, n, dtype=torch.bfloat16)
    for e, rows in enumerate(ranges(stops)):
        matrix = of_expert(b, pair[1], e)._replace(data=b.data[e], scale_inv=b.scale_inv[e])
        row_codes = of_expert(rows_of(a, pair[0], rows), pair[0], e)
        want[rows] = gemm_dispatch.multiply(ops, row_codes, pair[0], matrix, pair[1], **HOW)
    assert want.any()
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))


ONE_SCALE = (FP8_E4M3, FP8_E5M2)
SIZES = (1, 7, 0, 33, 130, 127)


def padded_stops(sizes, unit=16):
    return list(itertools.accumulate(-(-size // unit) * unit for size in sizes))


def int32(numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def test_results_are_written_without_padding():
    """Any number of rows for each expert, and zeros after the last."""
    experts, n, k, tokens = len(SIZES), 48, 64, sum(SIZES) + 5
    stops, ends = padded_stops(SIZES), list(itertools.accumulate(SIZES))
    a, b = codes((stops[-1] + 32, k), FP8_E4M3, 0, experts), codes((experts, n, k), FP8_E5M2, 1, experts)
    operands = ops, a, ONE_SCALE[0], b, ONE_SCALE[1], int32(stops)
    got = gemm_dispatch.multiply_grouped(*operands, ends=int32(ends), tokens=tokens, **HOW)
    padded = gemm_dispatch.multiply_grouped(*operands, **HOW)
    want = torch.zeros(tokens, n, dtype=torch.bfloat16)
    for rows, own in zip(ranges(stops), ranges(ends), strict=True):
        want[own] = padded[rows][: own.stop - own.start]
    assert want[: ends[-1]].any(1).all()
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("ends", "meant"),
    [
        ([5, 3, 9, 12], [5, 5, 9, 12]),
        ([-1, -(2**31), 4, 2**31 - 1], [0, 0, 4, 20]),
        ([100, 0, 0, 0], [20, 20, 20, 20]),
    ],
)
def test_ends_that_are_wrong_never_leave_the_result(ends, meant):
    """Clamped to the result, and to the end before. Rows that an expert does not have are zeros."""
    stops, tokens = [3, 3, 8, 20], 20
    a, b = codes((20, 32), FP8_E4M3, 0), codes((EXPERTS, 16, 32), FP8_E5M2, 1)
    operands = ops, a, ONE_SCALE[0], b, ONE_SCALE[1], int32(stops)
    got = gemm_dispatch.multiply_grouped(*operands, ends=int32(ends), tokens=tokens, **HOW)
    padded = gemm_dispatch.multiply_grouped(*operands, **HOW)
    want = torch.zeros(tokens, 16, dtype=torch.bfloat16)
    for rows, own in zip(ranges(stops), ranges(meant), strict=True):
        number = min(rows.stop - rows.start, own.stop - own.start)
        want[own.start : own.start + number] = padded[rows.start : rows.start + number]
    assert torch.equal(got, want)


def test_results_of_blocks_keep_their_padding():
    a, b = codes((32, 128), FP8_1x128, 0), codes((EXPERTS, 128, 128), FP8_128x128, 1)
    stops = int32([16, 16, 32, 32])
    with pytest.raises(ValueError, match="ends are not supported for blocks"):
        gemm_dispatch.multiply_grouped(ops, a, FP8_1x128, b, FP8_128x128, stops, ends=stops, tokens=32, **HOW)


@pytest.mark.parametrize("pair", K_GROUPED, ids=lambda pair: f"{pair[0]} {pair[1]}")
def test_contracted_rows_are_those_of_a_product_for_each_expert(pair):
    m, n, p, stops = 48, 64, 512, [128, 128, 256, 384]
    a, b = codes((m, p), pair[0], 0), codes((n, p), pair[1], 1)
    given = torch.tensor(stops, dtype=torch.int32)
    stored = [stored_columns(x, fmt) for x, fmt in zip((a, b), pair, strict=True)]
    got = gemm_dispatch.multiply_grouped_k(ops, stored[0], pair[0], stored[1], pair[1], given, **HOW)
    for e, part in enumerate(ranges(stops)):
        sides = [of_expert(contracted(x, fmt, part), fmt, e) for x, fmt in zip((a, b), pair, strict=True)]
        want = gemm_dispatch.multiply(ops, sides[0], pair[0], sides[1], pair[1], **HOW)
        assert want.any() == (e != 1)
        assert torch.equal(got[e].view(torch.int16), want.view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
def test_values_are_those_of_a_product_for_each_expert(layout, dtype):
    m, n, k, stops = 37, 24, 40, [5, 5, 11, 30]
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(m, k, generator=generator).to(dtype)
    b = torch.randn({"nt": (EXPERTS, n, k), "nn": (EXPERTS, k, n), "tn": (m, n)}[layout], generator=generator).to(dtype)
    how = {"dtype": torch.float32, "workspace": 0}
    given = torch.tensor(stops, dtype=torch.int32)
    got = gemm_dispatch.multiply_grouped_values(ops, a, b, given, layout=layout, **how)
    product = getattr(ops, f"gemm_values_{layout}")
    if layout == "tn":
        want = torch.stack([product(a[rows], b[rows], **how)[0] for rows in ranges(stops)])
    else:
        parts = [product(a[rows], b[e], **how)[0] for e, rows in enumerate(ranges(stops))]
        want = torch.cat([*parts, torch.zeros(m - stops[-1], n)])
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("stops", "meant"),
    [
        ([5, 3, 9, 12], [5, 5, 9, 12]),
        ([-1, -(2**31), 4, 2**31 - 1], [0, 0, 4, 20]),
        ([100, 0, 0, 0], [20, 20, 20, 20]),
    ],
)
def test_stops_that_are_wrong_never_leave_the_rows(stops, meant):
    """Clamped to the rows, and to the stop before."""
    a, b = torch.randn(20, 8), torch.randn(EXPERTS, 6, 8)
    how = {"layout": "nt", "dtype": torch.float32, "workspace": 0}
    got, want = (
        gemm_dispatch.multiply_grouped_values(ops, a, b, torch.tensor(x, dtype=torch.int32), **how)
        for x in (stops, meant)
    )
    assert torch.equal(got, want)


def test_an_expert_without_rows_gives_zeros_whatever_its_scales():
    a = codes((16, 64), FP8_E4M3, 0)._replace(scale_inv=torch.tensor([1.0, torch.nan, torch.inf, 1.0]))
    b = codes((16, 64), FP8_E4M3, 1)
    stops = torch.tensor([32, 32, 32, 64], dtype=torch.int32)
    got = gemm_dispatch.multiply_grouped_k(ops, a, FP8_E4M3, b, FP8_E4M3, stops, **HOW)
    assert not got[1:3].view(torch.int16).any()
    assert got[[0, 3]].isfinite().all()


def test_an_expert_without_rows_gives_zeros_whatever_its_global_scales():
    a = codes((16, 64), NVFP4, 0)._replace(global_scale_inv=torch.tensor([1.0, torch.nan, torch.inf, 1.0]))
    stops = torch.tensor([32, 32, 32, 64], dtype=torch.int32)
    got = gemm_dispatch.multiply_grouped_k(ops, a, NVFP4, codes((16, 64), NVFP4, 1), NVFP4, stops, **HOW)
    assert not got[1:3].view(torch.int16).any()
    assert got[[0, 3]].isfinite().all()


# --- JAX ---

JAX_CALLS = {
    "gemm_grouped_values_nt": [(64, 32), (EXPERTS, 16, 32)],
    "gemm_grouped_values_nn": [(64, 32), (EXPERTS, 32, 16)],
    "gemm_grouped_values_tn": [(64, 32), (64, 16)],
}


@pytest.mark.each_value
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize(
    ("name", "axis"), [(name, i) for name, (_, b) in JAX_CALLS.items() for i in range(len(b))], ids=str
)
def test_sharded_operands_give_the_whole_product(name, axis, kind):
    """XLA runs the op on whole operands: rows of an expert may be on any shard, and so may experts."""
    shapes = JAX_CALLS[name]
    rng = np.random.default_rng(0)
    operands = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    stops = np.int32([10, 10, 40, 57])
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,))
    # On an Explicit mesh an op shards all operands as its first one.
    specs = [P(*("x" if i == axis % 2 else None for i in range(2))), P(*[None] * axis, "x")]
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(operands, specs, strict=True)]
    placed.append(jax.device_put(stops, NamedSharding(mesh, P("x"))))

    def product(a, b, stops):
        return getattr(jax_ops, name)(a, b, stops, dtype="float32", workspace=0)[0]

    with jax.set_mesh(mesh):
        got = jax.jit(product)(*placed)
    assert_bits_equal(np.asarray(got), np.asarray(product(*operands, stops)))


def test_sharded_codes_give_the_whole_product():
    """Likewise without padding, where the result has rows of its own."""
    rng = np.random.default_rng(0)
    codes_of = {"a": (64, 32), "b": (EXPERTS, 16, 32)}
    a, b = (rng.integers(0, 120, shape, np.uint8) for shape in codes_of.values())
    scales, stops, ends = np.float32([0.5, 1, 2, 4]), np.int32([16, 16, 48, 64]), np.int32([7, 7, 30, 45])
    operands = [a, scales, b, scales[::-1].copy(), stops, ends]
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    placed = [jax.device_put(x, NamedSharding(mesh, P("x"))) for x in operands]

    def product(*operands):
        options = {"a_element": "float8_e4m3fn", "b_element": "float8_e4m3fn", "fast": False, "tokens": 48}
        return jax_ops.gemm_grouped(*operands, dtype="float32", workspace=0, **options)[0]

    got = np.asarray(jax.jit(product)(*placed))
    assert got.shape == (48, 16)
    assert got[:45].any(1).all()
    assert not got[45:].any()
    assert_bits_equal(got, np.asarray(product(*operands)))


ONE_BYTE_CALLS = {
    "gemm_grouped_mxfp8_tn": [(128, 16), (4, 16), (128, 32), (4, 32)],
    "gemm_grouped_nvfp4": [(64, 64), (64, 8), (4,), (EXPERTS, 16, 64), (EXPERTS, 16, 8), (4,)],
    "gemm_grouped_nvfp4_k": [(16, 64), (16, 8), (4,), (32, 64), (32, 8), (4,)],
}


@pytest.mark.parametrize("name", ONE_BYTE_CALLS)
def test_sharded_codes_with_one_byte_scales_give_the_whole_product(name):
    """Each operand is sharded over its first axis: rows, blocks along k, or experts."""
    rng = np.random.default_rng(0)
    shapes = [(shape, np.float32 if len(shape) == 1 else np.uint8) for shape in ONE_BYTE_CALLS[name]]
    operands = [rng.integers(1, 120, shape).astype(kind) for shape, kind in shapes]
    operands.append(np.int32([32, 32, 64, 64]))
    options = {"a_element": "float8_e4m3fn", "b_element": "float8_e5m2"} if "mxfp8" in name else {}
    options |= {"b_rows": 1} if name == "gemm_grouped_nvfp4" else {}
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    placed = [jax.device_put(x, NamedSharding(mesh, P("x"))) for x in operands]

    def product(*operands):
        return getattr(jax_ops, name)(*operands, dtype="float32", workspace=0, **options)[0]

    want = np.asarray(product(*operands))
    assert want.any()
    assert_bits_equal(np.asarray(jax.jit(product)(*placed)), want)


# --- dispatch ---


@pytest.mark.parametrize(
    ("pair", "kinds"),
    [
        ((FP8_E4M3, FP8_E4M3), ("tensors", "tensors")),
        ((FP8_E5M2, FP8_E4M3), ("tensors", "tensors")),
        ((FP8_E5M2, FP8_E5M2), (None, None)),
        ((FP8_1x128, FP8_128x128), ("blocks", None)),
        ((FP8_1x128, FP8_1x128), ("blocks", "blocks")),
        ((FP8_128x128, FP8_1x128), (None, None)),
        ((MXFP8_E4M3, MXFP8_E4M3), ("mxfp8", "mxfp8")),
        ((MXFP8_E4M3, MXFP8_32x32), ("mxfp8", None)),
        ((NVFP4, NVFP4), ("nvfp4", "nvfp4")),
        ((NVFP4, NVFP4_16x16), ("nvfp4", None)),
        ((NVFP4_16x16, NVFP4), (None, None)),
        ((MXFP4, MXFP4), (None, None)),
    ],
    ids=str,
)
def test_kinds_of_grouped_products(pair, kinds):
    assert tuple(gemm_dispatch.grouped_kind_of(*pair, by_k=by_k) for by_k in (False, True)) == kinds


def test_where_grouped_products_run():
    """Not on another capability, nor with an older library, nor because of the library of other products."""
    gpus = [
        Gpu((9, 0), 130100, 130802),
        Gpu((9, 0), 130500, 130500),
        Gpu((9, 0), 130100, 130400),
        Gpu((9, 0), 130100, 130301),
        Gpu((9, 0), 130802),
        Gpu((10, 0), 130802, 130802),
        Gpu((8, 0), 130802, 130802),
    ]
    runs = {kind: [gemm_dispatch.grouped_runs_on(kind, gpu) for gpu in gpus] for kind in ("tensors", "blocks")}
    assert runs == {"tensors": [True, True] + [False] * 5, "blocks": [True] * 3 + [False] * 4}
    assert [gemm_dispatch.grouped_runs_on("values", gpu) for gpu in gpus] == runs["blocks"]
    blackwell = [Gpu((10, 0), 130802, 130400), Gpu((10, 3), 130100, 131000)]
    others = [*gpus[:5], Gpu((10, 0), 130802, 130301), Gpu((11, 0), 131000, 131000), Gpu((12, 0), 131000, 131000)]
    for kind in ("mxfp8", "nvfp4"):
        assert all(gemm_dispatch.grouped_runs_on(kind, gpu) for gpu in blackwell)
        assert not any(gemm_dispatch.grouped_runs_on(kind, gpu) for gpu in others)
    assert not any(gemm_dispatch.grouped_runs_on(kind, gpu) for kind in ("tensors", "values") for gpu in blackwell)


@pytest.mark.parametrize(
    ("kind", "sizes", "unit", "by_k", "want"),
    [
        ("mxfp8", (64, 48, 96), 16, False, True),
        ("mxfp8", (64, 48, 96), 8, False, False),
        ("mxfp8", (48, 80, 96), 32, True, True),
        ("mxfp8", (48, 80, 96), 16, True, False),
        ("nvfp4", (64, 48, 96), 16, False, True),
        ("nvfp4", (64, 48, 80), 16, False, False),
        ("nvfp4", (48, 80, 96), 32, True, True),
        ("nvfp4", (48, 80, 96), 16, True, False),
    ],
)
def test_sizes_of_products_with_one_byte_scales(kind, sizes, unit, by_k, want):
    """Rows of 4-bit codes are whole 16 bytes for 32 elements; stops along k end where blocks and 16 bytes do."""
    assert gemm_dispatch.grouped_fits(kind, sizes, unit, by_k=by_k) is want


@pytest.mark.parametrize(
    ("pair", "by_k"),
    [
        *itertools.product(
            [None, (FP8_E4M3, FP8_E5M2), (FP8_1x128, FP8_1x128), (MXFP8_E4M3, MXFP8_E4M3), (NVFP4, NVFP4)],
            [False, True],
        ),
        *[((FP8_1x128, FP8_128x128), False), ((MXFP8_E4M3, MXFP8_32x32), False), ((NVFP4, NVFP4_16x16), False)],
    ],
    ids=str,
)
def test_workspaces_have_room_for_groups(pair, by_k):
    """Workspaces fit the arrays and scales of `gemm_groups.h`, and 32 MiB besides."""
    for e, m, n, k in itertools.product((1, 8, 63, 500), (16, 4096), (16, 272, 2048), (16, 640, 7168)):
        stride = -(-e // 64) * 64
        needed = 4 * 4 * stride + 5 * 8 * stride + 256
        for rows, fmt, matrices in ((m, pair and pair[0], 1), (n, pair and pair[1], 1 if by_k else e)):
            if fmt is None:
                continue
            if fmt.block is None:
                needed += -(-16 * e // 256) * 256
                continue
            across = -(-k // fmt.block[1])
            if fmt.scale_bytes == 1:  # Tiles of 512 bytes, some of them for each expert.
                down, tiles = -(-rows // 128), -(-across // 4)
                by_rows = (rows // 128 + e) * tiles if matrices == 1 else e * down * tiles
                needed += 512 * ((across // 4 + e) * down if by_k else by_rows)
                continue
            each = rows * across if fmt.block[0] == 1 else -(-rows // 128) * (-(-across // 4) * 4)
            needed += matrices * (-(-4 * each // 256) * 256)
        if pair and pair[0].tensor_scaled and pair[0].block:  # Alphas, and two arrays of pointers.
            needed += -(-4 * e // 256) * 256 + 2 * 8 * stride
        size = gemm_dispatch.grouped_workspace_size(e, (m, n, k), *(pair or ()), by_k=by_k)
        assert needed + 2**25 <= size


def test_every_format_has_a_cpu_product():
    """The op's rows take the codes of all formats with fp32 or E8M0 scales."""
    for fmt in formats.FORMATS.values():
        if fmt.scale_dtype not in ("float32", formats.E8M0.name) or (fmt.block and fmt.block[0] > 1):
            continue
        a, b = codes((32, 256), fmt, 0, 2), codes((2, 32, 256), fmt, 1, 2)
        stops = torch.tensor([16, 32], dtype=torch.int32)
        got = gemm_dispatch.multiply_grouped(ops, a, fmt, b, fmt, stops, **HOW)
        assert got.shape == (32, 32)
        assert got.any()
