"""Ops on padded rows of experts on a GPU: the bits of gathered rows, at the sizes of layers, and in CUDA graphs.

`tests/cpu/kernel_bits.py`, which test_kernels_gpu.py runs, compares small calls with the reference.
"""

import pytest

torch = pytest.importorskip("torch")
import qshard.torch_bridge  # noqa: E402, F401
from support.cuda_graphs import capture  # noqa: E402
from support.torch_models import void_amaxes  # noqa: E402

OPS = torch.ops.qshard
CAST = {"element": "float8_e4m3fn", "nonfinite": "saturate"}
BLOCK = {"element": "float8_e4m3fn", "eps": 0.0, "nonfinite": "saturate", "pow2": False, "rounding": "up"}
FLOAT = {**BLOCK, "scale_dtype": "float32"}
BLOCK_128 = {"block_rows": 128, "block_cols": 128}
E8M0 = {**BLOCK, "scale_dtype": "float8_e8m0fnu"}


def routed(experts, tokens, columns, unit, dtype=torch.bfloat16, top=2):
    """Return x, and rows and stops of experts that get the tokens in random order; the last one gets none."""
    generator = torch.Generator("cuda").manual_seed(experts)
    x = torch.randn(tokens, columns, device="cuda", generator=generator)
    x = (x * torch.rand(tokens, 1, device="cuda", generator=generator).exp2().mul(8).exp2()).to(dtype)
    expert = torch.randint(experts - 1, (tokens * top,), device="cuda", generator=generator)
    sizes = torch.bincount(expert, minlength=experts)
    padded = (sizes + unit - 1) // unit * unit
    stops = padded.cumsum(0)
    order = expert.argsort(stable=True)
    place = (stops - padded)[expert[order]] + torch.arange(len(order), device="cuda")
    place -= (sizes.cumsum(0) - sizes)[expert[order]]
    rows = torch.full((int(stops[-1]) + 3 * unit,), tokens, device="cuda", dtype=torch.int32)
    rows[place] = (order % tokens).int()
    return x, rows, stops.int()


def gathered(x, rows):
    with_zeros = torch.cat([x, torch.zeros_like(x[:1])])
    return with_zeros[torch.where((rows >= 0) & (rows < len(x)), rows, len(x))]


def all_same(got, want):
    for a, b in zip(got, want, strict=True):
        same(a, b)


def same(got, want):
    assert got.shape == want.shape
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


SHAPES = [(8, 3000, 4096, 128), (128, 4000, 2048, 16), (300, 5000, 768, 16), (5, 700, 1032, 32), (5, 700, 77, 16)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize(("experts", "tokens", "columns", "unit"), SHAPES)
def test_amaxes_of_experts_from_amaxes_of_rows(experts, tokens, columns, unit):
    """SwiGLU gives the amaxes of rows: `amax_grouped` reads one column of them instead of x, NaN and infinity too."""
    x, rows, stops = routed(experts, tokens, columns, unit)
    x[5, 3], x[tokens // 2, 0] = torch.inf, torch.nan
    same(OPS.amax_grouped(x.abs().amax(1).float()[:, None], rows, stops), OPS.amax_grouped(x, rows, stops))


@pytest.mark.parametrize("name", ["CurrentScaling", "DelayedScaling"])
def test_layers_with_passed_amaxes_keep_bits(name):
    """Writes to h, and to the gradients of both products, void their amaxes."""
    import qshard.torch_bridge as qt

    torch.manual_seed(0)
    layer = qt.MoE(512, 768, num_experts=8, top_k=2, recipe=name, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(3000, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step():
        y = layer(x)
        return y, *torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y))

    passed = step()
    void_amaxes(layer)
    all_same(passed, step())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("experts", "tokens", "columns", "unit"), SHAPES)
def test_casts_are_those_of_each_expert(experts, tokens, columns, unit, dtype):
    x, rows, stops = routed(experts, tokens, columns, unit, dtype)
    padded = gathered(x, rows)
    amax = OPS.amax_grouped(x, rows, stops)
    scale, _ = OPS.scale_from_amax(amax, **CAST, eps=0.0, pow2=False)
    data, data_t = OPS.cast_transpose_grouped(x, rows, stops, scale, **CAST)
    same(OPS.cast_grouped(x, rows, stops, scale, **CAST), data)
    same(data_t, data.view(torch.uint8).t().contiguous())
    ends = [0, *stops.tolist()]
    for e in range(experts):
        own = padded[ends[e] : ends[e + 1]]
        same(amax[e].reshape(1), OPS.amax_tensor(own, lead=0).reshape(1))
        same(data[ends[e] : ends[e + 1]], OPS.cast_tensor(own, scale[e], **CAST))
    assert not data[ends[-1] :].view(torch.uint8).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("options", "block"), [(FLOAT, 128), (E8M0, 32), (FLOAT, 32), (E8M0, 48)])
@pytest.mark.parametrize(("experts", "tokens", "columns", "unit"), SHAPES)
def test_blocks_are_those_of_gathered_rows(experts, tokens, columns, unit, options, block, dtype):
    x, rows, _ = routed(experts, tokens, columns, unit, dtype)
    padded, blocks = gathered(x, rows), {"block_rows": block, "block_cols": block}
    want = OPS.quantize_block_both_t(padded, **blocks, outer=0, **options)
    all_same(OPS.quantize_block_both_t_rows(x, rows, **blocks, **options), want)
    all_same(OPS.quantize_block_rows(x, rows, **blocks | {"block_rows": 1}, **options), want[:2])
    all_same(
        OPS.quantize_block_both_rows(x, rows, **blocks, **options), OPS.quantize_block_both(padded, **blocks, **options)
    )
    want = OPS.quantize_square_both(padded, **blocks, outer=0, **options)
    all_same(OPS.quantize_square_both_rows(x, rows, **blocks, **options), want)
    all_same(OPS.quantize_block_rows(x, rows, **blocks, **options), want[:2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", [32, 16])
@pytest.mark.parametrize(("experts", "tokens", "columns", "unit"), SHAPES[:4])
def test_packed_blocks_are_those_of_gathered_rows(experts, tokens, columns, unit, block, dtype):
    x, rows, _ = routed(experts, tokens, columns, unit, dtype)
    padded, options = gathered(x, rows), E8M0 | {"element": "float4_e2m1fn"}
    blocks = {"block_rows": block, "block_cols": block}
    want = OPS.quantize_block_both_t(padded, **blocks, outer=0, **options)
    all_same(OPS.quantize_block_both_t_rows(x, rows, **blocks, **options), want)
    all_same(OPS.quantize_block_rows(x, rows, **blocks | {"block_rows": 1}, **options), want[:2])
    want = OPS.quantize_square_both(padded, **blocks, outer=0, **options)
    all_same(OPS.quantize_square_both_rows(x, rows, **blocks, **options), want)


NVFP4 = {"scale_max": 448.0, "nonfinite": "nan"}
SHAPES_16 = [(8, 3000, 4096, 128), (128, 4000, 2048, 16), (300, 5000, 768, 16), (5, 700, 1040, 32)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize(("experts", "tokens", "columns", "unit"), SHAPES_16)
def test_nvfp4_is_that_of_each_expert(experts, tokens, columns, unit, stochastic, hadamard, dtype):
    """Each expert has its global scales and its Philox key, and counts its own elements; zeros after the last stop."""
    x, rows, stops = routed(experts, tokens, columns, unit, dtype)
    x[3, 5] = torch.nan
    padded, amaxes = gathered(x, rows), [OPS.amax_grouped(x, rows, stops)]
    if hadamard:
        amaxes = [*OPS.amax_hadamard_grouped(x, rows, stops)]
    seeds = torch.arange(2 * experts, dtype=torch.int32, device="cuda").view(-1, 2)
    kind, last, drawn = ("_stochastic", [seeds], {"row_step": columns, "col_step": 1}) if stochastic else ("", [], {})
    first = torch.zeros(2, dtype=torch.int32, device="cuda")
    squares, both = {"block_rows": 16, "block_cols": 16}, {"hadamard": hadamard, **NVFP4}
    operands = x, rows, stops, amaxes[0]
    of_rows, of_squares, of_both = (
        getattr(OPS, f"quantize_nvfp4{kind}{name}_rows")(*operands, *more, *last, **options)
        for name, more, options in (
            ("", [], {**squares, "block_rows": 1, **NVFP4}),
            ("", [], {**squares, **NVFP4}),
            ("_both", [amaxes[-1]], {**squares, **both}),
        )
    )
    all_same(of_rows, of_both[:2])
    ends = [0, *stops.tolist()]
    for e in range(0, experts, 1 + experts // 8):
        own, where = padded[ends[e] : ends[e + 1]], slice(ends[e], ends[e + 1])
        if not len(own):
            continue
        if hadamard:
            found = OPS.amax_hadamard(own, block_rows=own.shape[0], block_cols=columns)
            all_same([amax[e].reshape(1, 1) for amax in amaxes], found)
        given = [] if not stochastic else [seeds[e], first]
        want = getattr(OPS, f"quantize_nvfp4{kind}_both")(
            own, amaxes[0][e], amaxes[-1][e], *given, outer=0, **squares, **both, **drawn
        )
        all_same((of_both[0][where], of_both[1][where]), want[:2])
        transposed = slice(ends[e] // 2, ends[e + 1] // 2), slice(ends[e] // 16, ends[e + 1] // 16)
        all_same([part[:, cut].contiguous() for part, cut in zip(of_both[2:], transposed, strict=True)], want[2:])
        want = getattr(OPS, f"quantize_nvfp4{kind}")(own, amaxes[0][e], *given, **squares, **NVFP4, **drawn)
        all_same((of_squares[0][where], of_squares[1][transposed[1]]), want)
    assert not of_both[0][ends[-1] :].any()
    assert not of_both[2][:, ends[-1] // 2 :].any()


def test_rows_on_the_device_change_between_replays():
    """A captured graph reads rows and stops when it runs; numbers outside x, also negative ones, are padding."""
    x, rows, stops = routed(8, 1000, 512, 128)
    generator = torch.Generator("cuda").manual_seed(0)

    def step():
        amax = OPS.amax_grouped(x, rows, stops)
        scale, _ = OPS.scale_from_amax(amax, **CAST, eps=0.0, pow2=False)
        both = OPS.cast_transpose_grouped(x, rows, stops, scale, **CAST)
        seeds = torch.stack([stops, stops], dim=1)
        nvfp4 = OPS.quantize_nvfp4_stochastic_both_rows(
            x, rows, stops, *OPS.amax_hadamard_grouped(x, rows, stops), seeds, block_rows=16, block_cols=16, **NVFP4
        )
        return amax, *both, *OPS.quantize_block_both_t_rows(x, rows, **BLOCK_128, **FLOAT), *nvfp4

    graph, made = capture(step, warm_up=1)
    for _ in range(3):
        rows.copy_(torch.randint(-500, 1500, rows.shape, device="cuda", generator=generator))
        stops.copy_(torch.randint(0, len(rows), stops.shape, device="cuda", generator=generator).sort()[0])
        graph.replay()
        for got, want in zip(made, step(), strict=True):
            same(got, want)
        same(made[3], OPS.quantize_block_both_t(gathered(x, rows), block_rows=128, block_cols=128, outer=0, **FLOAT)[0])


@pytest.mark.parametrize("stops", [[-1, 2], [5, 2], [2**31 - 1, 0], [0, -(2**31)]])
def test_bad_stops_stay_inside(stops):
    """As on the CPU: a row belongs to the first expert whose stop is after it."""
    x, rows = torch.tensor([[1.0], [2], [3]]), torch.tensor([2, 1, 0], dtype=torch.int32)
    operands = x, rows, torch.tensor(stops, dtype=torch.int32)
    assert torch.equal(OPS.amax_grouped(*(t.cuda() for t in operands)).cpu(), OPS.amax_grouped(*operands))


def test_more_elements_than_32_bits_count(much_memory):
    """Many padded rows of few rows of x: the last are those of a call of their own."""
    x = torch.randn(300, 2**15, device="cuda", dtype=torch.bfloat16)
    count = 2**17 + 256
    rows = (torch.arange(count, device="cuda") * 7 % 311).int()
    stops = torch.tensor([128, count], device="cuda", dtype=torch.int32)
    scale = torch.tensor([1.0, 3.0], device="cuda")
    assert count * x.shape[1] > 2**32
    tail = slice(count - 256, count)
    one = torch.tensor([0, 256], device="cuda", dtype=torch.int32)
    data, data_t = OPS.cast_transpose_grouped(x, rows, stops, scale, **CAST)
    want, want_t = OPS.cast_transpose_grouped(x, rows[tail], one, scale, **CAST)
    same(data[tail], want)
    same(data_t[:, tail].contiguous(), want_t)
    del data, data_t
    data, scale_inv, data_t, scale_inv_t = OPS.quantize_block_both_t_rows(x, rows, **BLOCK_128, **FLOAT)
    want = OPS.quantize_block_both_t_rows(x, rows[tail], **BLOCK_128, **FLOAT)
    same(data[tail], want[0])
    same(scale_inv[tail], want[1])
    same(data_t[:, tail].contiguous(), want[2])
    same(scale_inv_t[:, -2:].contiguous(), want[3])
