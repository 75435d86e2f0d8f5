"""Weight gradients of experts by the project's own kernel on Hopper, which needs no newer cuBLASLt: against fp64."""

import itertools

import pytest

torch = pytest.importorskip("torch")

from qshard import gemm_dispatch  # noqa: E402
from qshard._core.quantize_steps import Plane  # noqa: E402
from qshard.formats import E5M2, FP8_E4M3, FP8_E5M2, FloatScaling, Format, FP8_1x128  # noqa: E402
from qshard.torch_bridge._ops.bind import ops  # noqa: E402
from support.cuda_graphs import capture  # noqa: E402
from support.gemm_bounds import assert_is_product_of_codes  # noqa: E402

E5M2_1x128 = Format(name="E5M2 1x128", element=E5M2, block=(1, 128), scaling=FloatScaling())
PAIRS = [
    (FP8_E4M3, FP8_E4M3),
    (FP8_E5M2, FP8_E4M3),
    (FP8_E4M3, FP8_E5M2),
    (FP8_1x128, FP8_1x128),
    (E5M2_1x128, FP8_1x128),
    (FP8_1x128, E5M2_1x128),
]
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
CASES = [
    # Rows of each expert in units of 16 or 128, rows after the last stop in units, M, N.
    ((1,), 0, 128, 256),
    ((0, 3, 0, 1, 8, 0), 2, 144, 272),
    ((0, 0, 41), 1, 272, 496),
    ((5, 8, 9, 15, 16, 17, 23, 24, 25, 7), 0, 528, 752),
    ((1, 0, 2) * 100, 3, 256, 192),
    ((0, 0), 2, 256, 256),
    ((2, 9), 0, 2320, 544),
    ((3, 64, 65, 1, 90), 1, 256, 272),  # Many rows, from places that are no multiple of 128.
]


@pytest.fixture(scope="module", autouse=True)
def _hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel runs on Hopper")


def unit_of(fmt):
    return 16 if fmt.block is None else 128


def stops_of(sizes):
    return torch.tensor(list(itertools.accumulate(sizes)), dtype=torch.int32, device="cuda")


def parts_of(sizes):
    return [(slice(None), slice(*ends)) for ends in itertools.pairwise((0, *itertools.accumulate(sizes)))]


def codes(rows, length, fmt, seed, experts):
    """Random codes of small numbers, and scales from 1/8 to 1: one for each expert, or of blocks."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn(rows, length, generator=generator).to(getattr(torch, fmt.element.name)).view(torch.uint8)
    grid = (experts,) if fmt.block is None else (rows, length // 128)
    return Plane(data.cuda(), (0.125 + 0.875 * torch.rand(grid, generator=generator)).cuda())


def numbers(plane, fmt, parts):
    values = plane.data.view(getattr(torch, fmt.element.name)).double()
    if fmt.block is None:
        for scale, part in zip(plane.scale_inv.double(), parts, strict=True):
            values[part] *= scale
        return values
    return values * plane.scale_inv.double().repeat_interleave(128, 1)


def contract(a, b, pair, stops, dtype):
    sizes = (a.data.shape[0], b.data.shape[0], a.data.shape[1])
    workspace = gemm_dispatch.grouped_workspace_size(stops.numel(), sizes, *pair, by_k=True)
    return gemm_dispatch.multiply_grouped_k(ops, a, pair[0], b, pair[1], stops, dtype=dtype, workspace=workspace)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0]} {pair[1]}")
def test_products(pair, dtype):
    """Expert by expert. An expert without rows gives zeros, whatever its scale; two calls give the same bits."""
    unit = unit_of(pair[0])
    for number, (units, rest, m, n) in enumerate(CASES):
        sizes, experts = [unit * count for count in units], len(units)
        length, parts = sum(sizes) + unit * rest, parts_of(sizes)
        a, b = codes(m, length, pair[0], number, experts), codes(n, length, pair[1], number + 100, experts)
        x, y = numbers(a, pair[0], parts), numbers(b, pair[1], parts)
        if unit == 16:
            a.scale_inv[[i for i, size in enumerate(sizes) if not size]] = torch.nan
        stale = torch.full((experts, m, n), torch.nan, dtype=dtype, device="cuda")  # The allocator reuses this memory.
        del stale
        got = contract(a, b, pair, stops_of(sizes), dtype)
        assert (got.dtype, got.shape) == (dtype, (experts, m, n))
        for own, part in enumerate(parts):
            if sizes[own]:
                assert_is_product_of_codes(got[own], x[part], y[part])
            else:
                assert not got[own].view(torch.uint8).any()
        assert torch.equal(got, contract(a, b, pair, stops_of(sizes), dtype))


@pytest.mark.parametrize("pair", PAIRS[1::3], ids=lambda pair: f"{pair[0]} {pair[1]}")
def test_rows_of_other_experts_are_not_read(pair):
    """Also where an expert ends within the 128 codes that are copied together: NaN times 0 would be NaN."""
    unit, m, n = unit_of(pair[0]), 256, 384
    sizes = [3 * unit, 8 * unit, 69 * unit, 9 * unit]
    a, b = (codes(rows, sum(sizes) + 128, fmt, rows, 4) for rows, fmt in zip((m, n), pair, strict=True))
    want = contract(a, b, pair, stops_of(sizes), torch.float32)
    for nan in (1, 3):
        part = parts_of(sizes)[nan]
        x, y = (plane._replace(data=plane.data.clone()) for plane in (a, b))
        for plane in (x, y):
            plane.data[part] = 0x7F  # NaN in both formats
            plane.data[:, sum(sizes) :] = 0x7F
        got = contract(x, y, pair, stops_of(sizes), torch.float32)
        others = [own for own in range(4) if own != nan]
        assert torch.equal(got[others], want[others])
        assert got[nan].isnan().all()


@pytest.mark.parametrize("pair", PAIRS[1::3], ids=lambda pair: f"{pair[0]} {pair[1]}")
def test_stops_that_are_wrong(pair):
    """They are rounded down to the unit, clamped to the rows, and none is less than the one before."""
    unit = unit_of(pair[0])
    a, b = (codes(rows, 8 * unit, fmt, rows, 5) for rows, fmt in zip((256, 256), pair, strict=True))
    wrong = [unit + 1, -(2**31), 5 * unit - 1, 2 * unit, 2**31 - 1]
    right = [unit, unit, 4 * unit, 4 * unit, 8 * unit]
    results = [
        contract(a, b, pair, torch.tensor(stops, dtype=torch.int32, device="cuda"), torch.bfloat16)
        for stops in (wrong, right)
    ]
    assert torch.equal(*results)


@pytest.mark.parametrize("pair", PAIRS[1::3], ids=lambda pair: f"{pair[0]} {pair[1]}")
def test_a_captured_product_takes_other_sizes(pair):
    unit = unit_of(pair[0])
    counts = [(4, 0, 12, 8), (8, 8, 0, 0), (0, 0, 0, 24), (1, 2, 3, 4)]
    a, b = (codes(rows, 24 * unit, fmt, rows, 4) for rows, fmt in zip((512, 272), pair, strict=True))
    stops = stops_of([unit * count for count in counts[0]])
    graph, out = capture(lambda: contract(a, b, pair, stops, torch.bfloat16))
    for each in counts:
        stops.copy_(stops_of([unit * count for count in each]))
        graph.replay()
        assert torch.equal(out, contract(a, b, pair, stops, torch.bfloat16))


def test_addresses_that_are_aligned_to_16_bytes_only():
    """Operands and scales anywhere in a buffer."""
    a, b = (codes(rows, 208, fmt, rows, 2) for rows, fmt in zip((256, 256), PAIRS[1], strict=True))
    want = contract(a, b, PAIRS[1], stops_of((48, 160)), torch.bfloat16)
    moved = []
    for plane in (a, b):
        data = torch.empty(plane.data.numel() + 16, dtype=torch.uint8, device="cuda")[16:].view_as(plane.data)
        scale = torch.empty(3, device="cuda")[1:]
        moved.append(Plane(data.copy_(plane.data), scale.copy_(plane.scale_inv)))
    assert torch.equal(contract(*moved, PAIRS[1], stops_of((48, 160)), torch.bfloat16), want)
